"""The calls that run now: counted, and no client may take all places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from criticalkv.services.store.metrics import METRICS
from criticalkv.shared.errors import OverloadedError

SHARE = 0.75
"""Of all places, what one connection may take while others may need one."""


class RunningCalls:
    """Counts calls by connection. For one event loop."""

    def __init__(self, limit: int) -> None:
        """Prepare.

        Args:
            limit: calls at once, all clients together.
        """
        self._most = max(1, int(limit * SHARE))
        self._by_peer: Counter[str] = Counter()

    @contextmanager
    def one(self, peer: str) -> Iterator[None]:
        """Count a call while it runs.

        Args:
            peer: the client's connection, as gRPC names it; all that come by a unix
                socket have the same name, and no share.

        Raises:
            OverloadedError: if the connection has too many already.
        """
        if self._by_peer[peer] >= self._most and not peer.startswith("unix:"):
            raise OverloadedError(
                f"one connection may have {self._most} calls at once, {SHARE:.0%} of "
                "store.max_concurrent_rpcs",
                retry_after_s=1.0,
            )
        self._by_peer[peer] += 1
        METRICS.running.inc()
        try:
            yield
        finally:
            METRICS.running.dec()
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]
