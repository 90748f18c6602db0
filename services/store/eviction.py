"""Making room: which nodes go when the memory limit is reached.

Value per byte decides (see `books.value_of`), the longest unused first among equals.
A node with a pin, a pinned descendant or a living child never goes, so leaves go first.
"""

from __future__ import annotations

import asyncio
import logging

from criticalkv.services.store.books import Books
from criticalkv.services.store.janitor import Janitor
from criticalkv.services.store.metrics import METRICS
from criticalkv.services.store.nodes import Nodes
from criticalkv.shared.errors import StoreFullError

log = logging.getLogger(__name__)
_PAGE = 64


class Evictor:
    """Reserves bytes for puts and evicts nodes where that is needed."""

    def __init__(self, nodes: Nodes, books: Books, janitor: Janitor) -> None:
        self._nodes = nodes
        self._books = books
        self._janitor = janitor
        self._lock = asyncio.Lock()

    async def reserve(self, member: str, nbytes: int) -> None:
        """Reserve bytes for an attempt, evicting if they do not fit.

        Raises:
            StoreFullError: if nothing more may go.
        """
        if nbytes > self._books.limit_bytes:
            raise StoreFullError(
                f"{nbytes} bytes exceed store.memory_limit_mb ({self._books.limit_bytes} bytes)"
            )
        missing = await self._books.reserve(member, nbytes)
        if missing > 0:
            async with self._lock:
                missing = await self._reserve_evicting(member, nbytes)
        if missing > 0:
            raise StoreFullError(
                f"the store is full: {missing} bytes too many, and all else is pinned or in use",
                retry_after_s=1.0,
            )
        if missing < 0:
            raise StoreFullError("the put's lease in the books has expired", retry_after_s=1.0)

    async def _reserve_evicting(self, member: str, nbytes: int) -> int:
        missing = await self._books.reserve(member, nbytes)
        for swept in (False, True):
            if missing <= 0:
                break
            if swept:
                await self._janitor.sweep()
            await self.make_room(missing)
            missing = await self._books.reserve(member, nbytes)
        return missing

    async def make_room(self, nbytes: int) -> int:
        """Evict the least valuable nodes until `nbytes` are free; return what was freed."""
        freed = offset = 0
        while freed < nbytes:
            page = await self._books.cheapest(offset, _PAGE)
            if not page:
                break
            gained = await self._evict(page, nbytes - freed)
            freed += gained
            # A dropped leaf frees its parent for the next round, so look again from 0.
            offset = 0 if gained else offset + len(page)
        return freed

    async def _evict(self, candidates: list[str], nbytes: int) -> int:
        freed = 0
        for node_id in candidates:
            outcome, gained = await self._nodes.drop(node_id, guard="evict")
            if outcome == "dropped":
                METRICS.evictions.inc()
                log.info("evicted node %s (%d bytes)", node_id[:16], gained)
            freed += gained
            if freed >= nbytes:
                break
        return freed
