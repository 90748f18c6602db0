"""A circuit breaker: while a peer does not answer, calls fail at once instead of waiting."""

from __future__ import annotations

import random
import threading
import time
from types import TracebackType

from criticalkv.shared.errors import CriticalKVError, DeadlineError, StoreUnavailableError

FAILURES = 5
WINDOW_S = 30.0
PAUSE_S = 1.0
SHORTEST_S = 0.2
"""A deadline shorter than this says nothing about the peer."""


class CircuitOpenError(StoreUnavailableError):
    """No call was made: the peer has not answered for a while."""


class Breaker:
    """Counts calls to one peer that got no answer. Thread-safe.

    After `failures` in a row within `window_s` it is open: calls fail at once. After a
    pause one call goes through as a probe, and what becomes of it decides.
    """

    def __init__(
        self,
        peer: str,
        failures: int = FAILURES,
        window_s: float = WINDOW_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        """Prepare a closed breaker.

        Args:
            peer: its name, for the error.
            failures: calls in a row without an answer that open it.
            window_s: the first of them must not be older.
            pause_s: between opening and a probe, on average.
        """
        self._peer = peer
        self._failures = failures
        self._window_s = window_s
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._failed: list[float] = []
        self._probe_at = 0.0
        self._probing = False

    def begin(self, timeout_s: float) -> Passage:
        """Let a call with this deadline through, or not.

        Raises:
            CircuitOpenError: if the breaker is open.
        """
        with self._lock:
            if not self._is_open():
                return Passage(self, timeout_s, probe=False)
            left = self._probe_at - time.monotonic()
            if left > 0 or self._probing:
                raise CircuitOpenError(
                    f"{self._peer} does not answer; calls fail at once for a while",
                    retry_after_s=max(left, self._pause_s),
                )
            self._probing = True
            return Passage(self, timeout_s, probe=True)

    def answered(self) -> None:
        """Note that the peer is there: close the breaker."""
        with self._lock:
            self._failed.clear()

    def _is_open(self) -> bool:
        return len(self._failed) >= self._failures

    def _end(self, answered: bool | None, probe: bool) -> None:
        with self._lock:
            if probe:
                self._probing = False
            if answered:
                self._failed.clear()
            elif answered is False:
                self._count(time.monotonic())

    def _count(self, now: float) -> None:
        if not self._is_open():
            self._failed = [at for at in self._failed if now - at < self._window_s]
            self._failed.append(now)
        # Not all clients at the same moment.
        self._probe_at = now + self._pause_s * random.uniform(0.75, 1.25)


class Passage:
    """One call that was let through. Leaving its context without a verdict says nothing.

    Attributes:
        probe: whether it decides for all others, who wait for it.
    """

    def __init__(self, breaker: Breaker, timeout_s: float, *, probe: bool) -> None:
        self.probe = probe
        self._breaker = breaker
        self._timeout_s = timeout_s
        self._ended = False

    def answered(self) -> None:
        """The peer answered, even if with an error of its own. Later verdicts do not count."""
        self._end(True)

    def failed(self, error: CriticalKVError) -> None:
        """The call failed: no answer, or the peer's own error."""
        if isinstance(error, DeadlineError):
            self._end(False if self._timeout_s >= SHORTEST_S else None)
        else:
            self._end(not isinstance(error, StoreUnavailableError))

    def close(self) -> None:
        """No verdict: the call was cancelled."""
        self._end(None)

    def __enter__(self) -> Passage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if isinstance(error, CriticalKVError):
            self.failed(error)
        elif error is None:
            self.answered()
        self.close()

    def _end(self, answered: bool | None) -> None:
        if not self._ended:
            self._ended = True
            self._breaker._end(answered, self.probe)
