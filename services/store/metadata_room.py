"""How full the space for metadata is, and how long new metadata may live.

Token records, handles with what is kept of their responses, idempotency answers and aliases
are no payload: no limit counts them, they only expire. So the fuller their space is, the
shorter new ones live. The space is what Redis's `maxmemory` leaves beside
`store.memory_limit_mb`; its share in use is

    share = (used_memory - payload held) / (maxmemory - memory limit),

what Redis adds to payload included, since that takes the same room, but for the rounding of
sizes by its allocator. Up to HALF everybody lives
as asked for; from there the longest life falls, linearly in its logarithm, from
`store.record_ttl_s` to FLOOR_MS at FULL.

Why memory settles: of r bytes per second that are written or used again, each living T
seconds from then on, there are r T bytes. T falls while the share rises, so there is one share
at which what comes equals what goes. What was written before cannot be called back, but neither
does it grow: let t be a moment at which the share exceeds FULL, and s the last one before at
which it was FULL. What is there at t was there at s (FULL of the space), or came since and was
used within FLOOR_MS:

    used(t) <= FULL space + r (FLOOR_MS + one look).

So Redis is never out of memory for metadata while r (FLOOR_MS + one look) is at most a tenth
of the space, whatever came before: with 768 MiB beside the payload, up to 130 KB per second.

A token record lives as long as its node's KV at least, which payload's limit bounds, and is
shortened when the KV goes. Otherwise a life is only ever given when something is written, used
or unpinned, and use never shortens one: what was written while there was room keeps its time.
What has expired and is not yet removed counts as well: by default Redis lets that be a tenth
of its keys, and with `active-expire-effort 10`, as the embedded Valkey has it, a hundredth.
Manifests need none of this: they go with their payload, which has a limit. Lists that outlive
their entries are cleaned while they grow: see Handles and Nodes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from criticalkv.services.store.metrics import METRICS
from criticalkv.shared.config import StoreConfig

log = logging.getLogger(__name__)

HALF = 0.5
"""Share of the space up to which metadata live as long as configured."""
FULL = 0.9
"""Share from which on they live FLOOR_MS at most."""
FLOOR_MS = 600_000
"""The longest life when the space is full: a conversation's next turn, a client's retry."""
JEMALLOC = 1.25
"""Most by which jemalloc, other Redis servers' allocator, rounds a payload up: it has four
sizes for each doubling. Not metadata's doing, and full is still full: the share is 1 before
Redis is out of memory."""
UNLIMITED_MS = 1 << 45
"""More than any time to live."""
MARKS = (HALF, FULL)
_AGAIN = 0.1
"""By how much the share must fall before it is warned of once more."""


class MetadataRoom:
    """The space for metadata, as seen at the last look.

    Attributes:
        share: of it in use, 0 to above 1; 0 = not known, or without limit.
    """

    def __init__(self, config: StoreConfig, limit_bytes: int = 0) -> None:
        """Prepare it; until the first look there is room.

        Args:
            limit_bytes: payload that may be held; 0 = as configured.
        """
        self.share = 0.0
        self._limit = limit_bytes or config.memory_limit_mb << 20
        self._record_ttl_ms = config.record_ttl_s * 1000
        self._told: set[float] = set()
        self._told_unlimited = False

    def look(self, infos: Sequence[Mapping[str, Any]], held: int) -> None:
        """Take note of how full Redis is.

        Args:
            infos: INFO memory of every master; empty = it may not be read.
            held: payload bytes by the books, of all masters.
        """
        bounded = [info for info in infos if int(info.get("maxmemory", 0))]
        self._note_unlimited(bool(infos) and not bounded)
        parts = max(1, len(infos))  # payload is spread by digests, so evenly
        shares = [_share(info, held / parts, self._limit / parts) for info in bounded]
        self.share = max(shares, default=0.0)
        METRICS.metadata_share.set(self.share)
        self._warn()

    @property
    def longest_ms(self) -> int:
        """The longest time to live that metadata get now, ms."""
        if self.share <= HALF:
            return UNLIMITED_MS
        pressure = min((self.share - HALF) / (FULL - HALF), 1.0)
        longest = max(self._record_ttl_ms, FLOOR_MS)
        return round(longest * math.pow(FLOOR_MS / longest, pressure))

    def shortened(self, ttl_ms: int) -> int:
        """Return a time to live that is not longer than there is room for, ms."""
        return min(ttl_ms, self.longest_ms)

    def _note_unlimited(self, unlimited: bool) -> None:
        if unlimited and not self._told_unlimited:
            log.info("Redis has no maxmemory: set it, or metadata may fill the machine")
        self._told_unlimited |= unlimited

    def _warn(self) -> None:
        told = {mark for mark in MARKS if self.share > mark - _AGAIN * (mark in self._told)}
        if new := told - self._told:
            log.warning(
                "the space for metadata is more than %.0f %% full, new ones live %d s at most: "
                "raise Redis's maxmemory or lower store.record_ttl_s",
                100 * max(new),
                self.longest_ms // 1000,
            )
        self._told = told


def _share(info: Mapping[str, Any], held: float, limit: float) -> float:
    """Return the share of one master's space that is in use."""
    used, maxmemory = int(info.get("used_memory", 0)), int(info["maxmemory"])
    rounding = JEMALLOC if str(info.get("mem_allocator", "")).startswith("jemalloc") else 1.0
    for factor in (rounding, 1.0):
        if (space := maxmemory - factor * limit) > 0:
            return max(used - factor * held, 0) / space
    # Without room beside the payload, what Redis has altogether counts.
    return used / maxmemory
