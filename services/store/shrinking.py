"""Shrinking: a node's next generation without its top tier, and the end of that tier.

Nothing is rewritten. The tier's segments stay until the longest read is over, so a read
that began before finishes. The books know of them before the manifest changes: a server
that dies in between leaves a note to look after, never segments that nobody knows.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass

from criticalkv.services.store import keys, scripts
from criticalkv.services.store.books import Books, Cut, Worth
from criticalkv.services.store.metrics import METRICS
from criticalkv.services.store.nodes import Nodes, fields_of, lower_tier, split_parts
from criticalkv.services.store.redis_data import RedisData
from criticalkv.shared.cache.manifest import Manifest, decode_manifest, encode_manifest
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import CorruptNodeError

log = logging.getLogger(__name__)
_STEP = 256


@dataclass(frozen=True)
class _Current:
    """A node as its manifest describes it now."""

    generation: int
    manifest: Manifest
    cost: float
    hits: int

    def worth(self, manifest: Manifest) -> Worth:
        return Worth(self.cost, self.hits, manifest.tier_bytes()[-1])

    def dropped(self) -> dict[Cut, int]:
        """Its dropped tiers and their bytes, the empty ones left out."""
        return self._sizes(len(self.manifest.tiers), self.manifest.dropped_tiers)

    def above(self, tier: str) -> dict[Cut, int]:
        """The same of the tiers in use above `tier`."""
        first = self.manifest.tier_index(tier) + 1
        return self._sizes(first, len(self.manifest.tiers) - first)

    def _sizes(self, first: int, count: int) -> dict[Cut, int]:
        manifest = self.manifest
        sizes = {t: manifest.added_bytes(t) for t in range(first, first + count)}
        return {Cut(manifest.node_id, manifest.attempt, t): n for t, n in sizes.items() if n}


class Shrinker:
    """Shrinks nodes, tier by tier."""

    def __init__(self, redis: RedisData, nodes: Nodes, books: Books, config: StoreConfig) -> None:
        self._redis = redis
        self._nodes = nodes
        self._books = books
        self._floor = config.shrink_floor
        self._grace_ms = int(config.read_deadline_s * 1000)

    async def shrink(self, node_id: str, *, at_once: bool = False) -> tuple[str, int]:
        """Drop a node's top tier.

        Args:
            at_once: unlink its segments now; who reads them gets a clean miss.

        Returns:
            ("shrunk", bytes that are freed, now or later) or (why not, 0): absent,
            other = somebody else was faster, floor, pinned, held.
        """
        now = await self._current(node_id)
        if now is None:
            await self._books.forget(node_id)
            return "absent", 0
        tier = lower_tier(now.manifest.tiers, self._floor)
        if tier is None:
            worth = now.worth(now.manifest)
            await self._books.shrunk(node_id, worth, worth, tall=False)
            return "floor", 0
        cuts = await self._books.cut(now.above(tier), self._grace_ms)
        outcome, smaller = await self._publish(now, tier)
        if outcome != "shrunk":
            for cut in cuts:
                await self._settle(cut)
            return outcome, 0
        await self._note(now, smaller)
        if at_once:
            for cut in cuts:
                METRICS.early_unlinks.inc(bool(await self._unlink(cut, now.manifest)))
        return outcome, now.manifest.tier_bytes()[-1] - smaller.tier_bytes()[-1]

    async def unlink_due(self) -> None:
        """Unlink the dropped tiers whose last read is over."""
        while cuts := await self._books.cuts(due=True, count=_STEP):
            for cut in cuts:
                await self._settle(cut, unlink=True)
            if len(cuts) < _STEP:
                return

    async def unlink_early(self, nbytes: int, tenant: str = "") -> int:
        """Unlink dropped tiers before that, until `nbytes` are free; return how many are.

        Args:
            tenant: only this one's; "" = all.
        """
        freed = offset = 0
        while freed < nbytes:
            cuts = await self._books.cuts(due=False, count=_STEP, offset=offset)
            if not cuts:
                break
            owners = await self._books.owners([cut.member for cut in cuts])
            for cut, owner in zip(cuts, owners, strict=True):
                gained = 0
                if freed < nbytes and tenant in ("", owner):
                    gained = await self._settle(cut, unlink=True, patient=True)
                    METRICS.early_unlinks.inc(bool(gained))
                freed += gained
                offset += not gained
        return freed

    async def mend(self, member: str) -> None:
        """Bring the account of a stored node in line with its manifest."""
        node_id, attempt = member.split(":")
        now = await self._current(node_id)
        if now is None or now.manifest.attempt != attempt:
            return
        kept = now.manifest.tier_bytes()[-1]
        if await self._books.mend(member, kept, now.dropped(), self._grace_ms):
            log.info("the account of node %s was wrong and is mended", node_id[:16])

    async def _publish(self, now: _Current, tier: str) -> tuple[str, Manifest]:
        node_id = now.manifest.node_id
        smaller, parts = await asyncio.to_thread(_shrunk, now.manifest, tier)
        outcome = await self._redis.run(
            scripts.SHRINK,
            [
                keys.manifest(node_id),
                keys.pins(node_id),
                keys.pinned_below(node_id),
                keys.holds(node_id),
            ],
            [now.generation, secrets.token_hex(8), "top", tier, *fields_of(smaller, parts)],
        )
        return outcome.decode(), smaller

    async def _note(self, now: _Current, smaller: Manifest) -> None:
        METRICS.shrinks.inc()
        old, new = now.worth(now.manifest), now.worth(smaller)
        METRICS.shrunk_bytes.inc(old.nbytes - new.nbytes)
        tall = lower_tier(smaller.tiers, self._floor) is not None
        await self._books.shrunk(smaller.node_id, old, new, tall=tall)
        log.info("shrunk node %s to tier %s", smaller.node_id[:16], smaller.tiers[-1])

    async def _settle(self, cut: Cut, *, unlink: bool = False, patient: bool = False) -> int:
        """Do with a scheduled tier what its manifest says; return the bytes freed.

        Args:
            unlink: unlink it if it is dropped; otherwise that stays scheduled.
            patient: leave a tier in use scheduled: somebody may be about to drop it.
        """
        now = await self._current(cut.node_id)
        if now is None or now.manifest.attempt != cut.attempt:
            await self._books.uncut(cut)  # all of the attempt goes another way
        elif cut.tier < len(now.manifest.tiers):
            if not patient:
                await self._books.uncut(cut)
        elif unlink:
            return await self._unlink(cut, now.manifest)
        return 0

    async def _unlink(self, cut: Cut, manifest: Manifest) -> int:
        indexes = manifest.segments_of(cut.tier)
        await self._nodes.unlink_segments(cut.node_id, cut.attempt, indexes)
        return await self._books.cut_done(cut)

    async def _current(self, node_id: str) -> _Current | None:
        found = await self._redis.command(
            "HMGET", keys.manifest(node_id), "generation", "attempt", "parts", "cost", "hits"
        )
        if found[0] is None:
            return None
        try:
            manifest = await asyncio.to_thread(decode_manifest, split_parts(found[2]))
            if (manifest.node_id, manifest.attempt) != (node_id, found[1].decode()):
                raise CorruptNodeError("the manifest is of another node")
        except CorruptNodeError as error:
            log.warning("node %s is dropped: %s", node_id[:16], error.message)
            await self._nodes.drop(node_id, found[1].decode(), generation=int(found[0]))
            return None
        return _Current(int(found[0]), manifest, float(found[3]), int(found[4]))


def _shrunk(manifest: Manifest, tier: str) -> tuple[Manifest, list[bytes]]:
    smaller = manifest.shrunk_to(tier)
    return smaller, encode_manifest(smaller)
