"""Redis behind a circuit breaker: while it does not answer, calls fail at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from criticalkv.shared.breaker import Breaker
from criticalkv.shared.redis_location import Location
from criticalkv.shared.resp import DataClient, Unreachable


@contextmanager
def guarded(breaker: Breaker, timeout_s: float) -> Iterator[None]:
    """Run a call to Redis. A refusal says nothing: it may come from a client's own queue.

    Raises:
        CircuitOpenError: if calls are not let through, with the time after which one may be.
    """
    with breaker.begin(timeout_s) as passage:
        try:
            yield
        except Unreachable:
            raise
        except Exception:
            passage.close()
            raise


class GuardedData:
    """A client for payloads behind a breaker."""

    def __init__(self, client: DataClient, breaker: Breaker, timeout_s: float) -> None:
        self._client = client
        self._breaker = breaker
        self._timeout_s = timeout_s

    def set_many(self, items: Sequence[tuple[str, bytes]], ttl_ms: int) -> None:
        """As DataPool.set_many."""
        with guarded(self._breaker, self._timeout_s):
            self._client.set_many(items, ttl_ms)

    def get_many(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """As DataPool.get_many."""
        with guarded(self._breaker, self._timeout_s):
            return self._client.get_many(wanted)

    def location_of(self, key: str) -> Location:
        """As DataPool.location_of. It says nothing of Redis, which may not be asked for it."""
        self._breaker.begin(self._timeout_s).close()
        return self._client.location_of(key)

    def forget(self) -> None:
        """As DataPool.forget."""
        self._client.forget()

    def close(self) -> None:
        """As DataPool.close."""
        self._client.close()
