"""Making room: which nodes shrink, and which go, when memory runs out.

The order of sacrifice (see `order`) decides. All nodes shrink, the least valuable first,
before the first one goes: many contexts that answer a little worse are worth more than
few. A node with a pin, or with a pinned descendant, does neither; one with a living child
never goes, so leaves go first.

In the background room is made gently: what is dropped stays until the longest read is
over. A put that does not fit has no time for that. No step locks anything: each is a
compare-and-swap in Redis, and a server that stands still hinders no other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from weakref import WeakValueDictionary

from criticalkv.services.store.books import Books
from criticalkv.services.store.janitor import Janitor
from criticalkv.services.store.metrics import METRICS
from criticalkv.services.store.nodes import Nodes
from criticalkv.services.store.quotas import Quotas
from criticalkv.services.store.shrinking import Shrinker
from criticalkv.services.store.tasks import repeat
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import NodeTooLargeError, StoreFullError

log = logging.getLogger(__name__)
_PAGE = 64
_TALL_PAGE = 8
"""Nodes looked at for each one that shrinks: its value changes, so the order does."""
_ROUNDS = 16
"""How often a put makes room that others take away, before it is refused."""
_FRUITLESS = 4
"""How often it may find nothing that can go."""
_PAUSE_S = 0.1
INTERVAL_S = 1.0
YOUNG_S = 5.0
"""Nodes used this recently are left to whoever is about to read them, unless a put needs room."""
REST_S = 5.0
"""Pause of the background after a round in which nothing could go."""
Step = Callable[[str], Awaitable[tuple[str, int]]]
Reserve = Callable[[], Awaitable[tuple[int, int]]]


class Evictor:
    """Admits puts and reserves their bytes; shrinks and evicts nodes for that."""

    def __init__(
        self, nodes: Nodes, books: Books, janitor: Janitor, shrinker: Shrinker, config: StoreConfig
    ) -> None:
        self._nodes = nodes
        self._books = books
        self._janitor = janitor
        self._shrinker = shrinker
        self._quotas = Quotas(config)
        self._high = int(config.high_watermark * books.limit_bytes)
        self._low = int(config.low_watermark * books.limit_bytes)
        self._rests_until = 0.0
        self.young_s = YOUNG_S
        # One per tenant that is beyond its own quota, and one, "", for the whole store.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # ---------------------------------------------------------------- puts

    async def admit(self, member: str, tenant: str) -> None:
        """Count an attempt against its tenant; its least valuable node goes if need be.

        Raises:
            QuotaExceededError: if the tenant has too many nodes, and none of them may go.
        """
        if not tenant:
            return
        quota = self._quotas.of(tenant)
        for _ in range(_ROUNDS):
            over = await self._books.admit(member, tenant, quota.max_nodes)
            if over < 0:
                raise _expired()
            if over == 0:
                return
            go = partial(self._go, later=True, ages=False)
            if not await self._sacrifice(over, tenant, go, tall=False, nodes=True):
                break
        raise quota.exceeded("max_nodes", f"a node beyond {quota.max_nodes}")

    async def reserve(self, member: str, nbytes: int, tenant: str = "") -> None:
        """Have an attempt hold `nbytes` altogether, making room if they do not fit.

        Raises:
            NodeTooLargeError: if it exceeds the store's limit, or the tenant's.
            StoreFullError: if nothing more may go.
            QuotaExceededError: if nothing more of the tenant's may go.
        """
        quota, limit = self._quotas.of(tenant), self._books.limit_bytes
        if nbytes > limit:
            raise NodeTooLargeError(
                f"a node of {nbytes} bytes exceeds store.memory_limit_mb ({limit} bytes); lower "
                "eviction.store_tier, or raise the limit",
                param="store.memory_limit_mb",
            )
        if 0 < quota.max_bytes < nbytes:
            raise quota.too_large(nbytes)
        reserve = partial(self._books.reserve, member, nbytes, quota.max_bytes)
        missing, own = await reserve()
        if own > 0:  # nobody else waits for that
            missing, own = await self._reserve_making_room(reserve, tenant)
        if missing > 0 >= own:
            missing, own = await self._reserve_making_room(reserve, "")
        if missing < 0:
            raise _expired()
        if own > 0:
            raise quota.exceeded("max_mb", f"a node that needs {own} bytes more")
        if missing > 0:
            raise StoreFullError(
                f"the store is full: {missing} bytes too many, and all else is pinned or in use",
                retry_after_s=1.0,
            )

    async def _reserve_making_room(self, reserve: Reserve, tenant: str) -> tuple[int, int]:
        """Make room for a reservation until it fits, or nothing more goes.

        Args:
            tenant: make room in its quota, among its own nodes; "" = in the store.
        """
        fruitless = 0
        async with self._locks.setdefault(tenant, asyncio.Lock()):
            found = await reserve()
            for _ in range(_ROUNDS):
                if (wanted := found[1] if tenant else found[0]) <= 0:
                    break
                if not await self.make_room(wanted, tenant):
                    fruitless += 1
                    if fruitless > _FRUITLESS or not await self._may_go(tenant, fruitless):
                        break
                found = await reserve()
        return found

    async def _may_go(self, tenant: str, fruitless: int) -> bool:
        """Help or await what is going already; False if nothing of the tenant's is."""
        if tenant and not await self._books.goes(tenant):
            return False
        # Another server may be about to unlink what it has just dropped.
        await (self._janitor.sweep() if fruitless == 1 else asyncio.sleep(_PAUSE_S))
        return True

    async def make_room(self, nbytes: int, tenant: str = "") -> int:
        """Free `nbytes` at once; return what was freed.

        First what waits for the end of reads that began before, then top tiers, then
        nodes.

        Args:
            tenant: only this one's; "" = all.
        """
        freed = await self._shrinker.unlink_early(nbytes, tenant)
        if freed < nbytes:
            freed += await self._janitor.empty_early(nbytes - freed, tenant)
        if freed < nbytes and self._books.order.shrinks:
            shrink = partial(self._shrinker.shrink, at_once=True)
            freed += await self._sacrifice(nbytes - freed, tenant, shrink, tall=True)
        if freed < nbytes:
            # What a tenant's own quota costs it makes nobody else's nodes older.
            go = partial(self._go, later=False, ages=not tenant)
            freed += await self._sacrifice(nbytes - freed, tenant, go, tall=False)
        return freed

    # ---------------------------------------------------------- watermarks

    async def run(self) -> None:
        """Keep the store below its high watermark until cancelled."""
        await repeat(INTERVAL_S, self.keep_watermark, "making room")

    async def keep_watermark(self) -> None:
        """Above the high watermark make room down to the low one, gently."""
        state = await self._books.state()
        METRICS.held.set(state.total)
        METRICS.freeing.set(state.freeing)
        used = state.total - state.freeing
        if used <= self._high or time.monotonic() < self._rests_until:
            return
        # Others may be doing the same: look anew after every page.
        while (missing := state.total - state.freeing - self._low) > 0:
            if not await self._make_room_gently(missing, state.now_us - int(1e6 * self.young_s)):
                self._rests_until = time.monotonic() + REST_S
                log.info("%d bytes above the low watermark, and nothing may go", missing)
                return
            state = await self._books.state()

    async def _make_room_gently(self, nbytes: int, before_us: int) -> int:
        freed = 0
        if self._books.order.shrinks:
            freed = await self._sacrifice(
                nbytes, "", self._shrinker.shrink, tall=True, before_us=before_us
            )
        go = partial(self._go, later=True, ages=True)
        return freed or await self._sacrifice(nbytes, "", go, tall=False, before_us=before_us)

    # --------------------------------------------------------------- steps

    async def _sacrifice(
        self,
        wanted: int,
        tenant: str,
        step: Step,
        *,
        tall: bool,
        nodes: bool = False,
        before_us: int = 0,
    ) -> int:
        """Apply a step to nodes in the order of sacrifice; return what that gained.

        Args:
            wanted: stop when this is reached.
            tenant: only this one's nodes; "" = all.
            step: what happens to one node.
            tall: whether it is shrinking, so that only nodes that can shrink are asked.
            nodes: count nodes rather than bytes.
            before_us: only nodes that were not used since; and stop after the first page
                that gained something. 0 = all of them.
        """
        gained, size = 0, _TALL_PAGE if tall else _PAGE
        gone: set[str] = set()
        for hopeful in (True, False):  # what seems to be spared is tried last
            offset = 0
            while gained < wanted:
                page = await self._books.cheapest(offset, size, tenant=tenant, tall=tall)
                if not page:
                    break
                before, left = gained, len(page)
                old = [node_id for node_id, used in page if not before_us or used <= before_us]
                for node_id in await self._promising(old, tall, hopeful):
                    outcome, nbytes = await step(node_id)
                    # Once: what is listed again has a place that the books do not know.
                    if outcome in ("absent", "floor") and node_id not in gone:
                        gone.add(node_id)
                        left -= 1
                    gained += bool(nbytes) if nodes else nbytes
                    if gained >= wanted or (tall and nbytes):
                        break
                if before_us and gained:
                    return gained
                # A leaf that went frees its parent for the next round: begin anew.
                offset = 0 if gained > before else offset + left
            if gained:
                break
        return gained

    async def _promising(self, page: list[str], shrinking: bool, hopeful: bool) -> list[str]:
        """Those nodes of a page that may be worth a step, or with `hopeful` False the rest."""
        free = ("", "parent") if shrinking else ("",)
        spared = await self._nodes.spared(page)
        step = "shrink" if shrinking else "evict"
        for reason in spared if hopeful else ():
            if reason not in free:
                METRICS.spared.labels(step, reason).inc()
        return [
            node_id
            for node_id, reason in zip(page, spared, strict=True)
            if reason != "pinned" and (reason in free) == hopeful
        ]

    async def _go(self, node_id: str, *, later: bool, ages: bool) -> tuple[str, int]:
        outcome, nbytes = await self._nodes.drop(node_id, guard="evict", later=later, ages=ages)
        if outcome == "dropped":
            METRICS.evictions.inc()
            log.info("evicted node %s (%d bytes)", node_id[:16], nbytes)
        return outcome, nbytes


def _expired() -> StoreFullError:
    return StoreFullError("the put's lease in the books has expired", retry_after_s=1.0)
