"""Nodes that were computed in the background and that nobody needs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.identity import NodeId

log = logging.getLogger(__name__)


class Leftovers:
    """Removes nodes, but never one that a request may be reading.

    A request that has found a node has nothing in the store that says so, until its turn is
    published below it. So a node goes only when no look-up has met it for as long as a
    request may take.

    Args:
        delete: removes a node unless something in the store refers to it.
        longest_s: what a request may take at most.
    """

    def __init__(self, delete: Callable[[NodeId], Awaitable[bool]], longest_s: float) -> None:
        self._delete = delete
        self._longest_s = longest_s
        self._due: dict[NodeId, float] = {}
        self._going: dict[NodeId, asyncio.Event] = {}
        self._worker: asyncio.Task[None] | None = None

    def add(self, node_ids: Iterable[NodeId]) -> None:
        """Have nodes removed."""
        for node_id in node_ids:
            self._due[node_id] = time.monotonic() + self._longest_s
        if self._due and (self._worker is None or self._worker.done()):
            self._worker = asyncio.create_task(self._work())

    async def met(self, node_ids: Iterable[NodeId]) -> None:
        """Called before each look-up: what it may find stays, or is gone before it looks."""
        for node_id in node_ids:
            if node_id in self._due:
                self._due[node_id] = time.monotonic() + self._longest_s
            if (gone := self._going.get(node_id)) is not None:
                await gone.wait()

    async def aclose(self) -> None:
        """Remove all at once: no request runs any more."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for node_id in list(self._due):
            await self._remove(node_id)

    async def _work(self) -> None:
        while self._due:
            node_id = min(self._due, key=self._due.__getitem__)
            wait_s = self._due[node_id] - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif not await self._remove(node_id):
                self.add([node_id])

    async def _remove(self, node_id: NodeId) -> bool:
        """Return False if the store failed."""
        gone = self._going[node_id] = asyncio.Event()
        del self._due[node_id]
        try:
            await self._delete(node_id)
        except CriticalKVError as error:
            log.warning("node %s is not removed yet: %s", node_id[:16], error.code)
            return False
        finally:
            del self._going[node_id]
            gone.set()
        return True
