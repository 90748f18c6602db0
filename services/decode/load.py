"""What a decode replica tells about its load; routing and autoscaling read it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

RATE_WINDOW_S = 10.0  # over which tokens per second are counted


@dataclass(frozen=True)
class DecodeLoad:
    """Load of one replica at one moment.

    Attributes:
        pool_bytes: size of the KV pool.
        used_bytes: of it, pages that running sequences refer to.
        kept_bytes: of it, nodes that nobody uses now; they go when room is needed.
        queued_bytes: KV that waiting requests need and do not have.
        waiting: requests that wait for a slot or for room.
        waiting_tokens: prompt tokens not yet run, of waiting and of running requests.
        running: sequences in the batch.
        tokens_per_s: generated, over the last seconds.
    """

    pool_bytes: int
    used_bytes: int
    kept_bytes: int
    queued_bytes: int
    waiting: int
    waiting_tokens: int
    running: int
    tokens_per_s: float


class Rate:
    """Events per second over the last `RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, count: int) -> None:
        """Note events that have just happened."""
        self._counts.append((time.monotonic(), count))

    def per_second(self) -> float:
        """Return the present rate."""
        begin = time.monotonic() - RATE_WINDOW_S
        while self._counts and self._counts[0][0] < begin:
            self._counts.popleft()
        return sum(count for _, count in self._counts) / RATE_WINDOW_S
