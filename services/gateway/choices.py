"""The decode requests of one turn, side by side, as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.plan import Plan, Planner
from criticalkv.services.gateway.workers import Event, WorkerLostError, Workers
from criticalkv.shared.errors import NodeMissingError
from criticalkv.shared.requests import DecodeDelta, DecodeEnd, DecodeRequest

BUFFERED = 16  # events per choice that a slow reader may leave waiting


class Choices:
    """Runs one decode request per choice until closed.

    A choice whose context got lost, or whose worker died, before any text is tried
    once more; the context is rebuilt first.

    Args:
        workers: who decodes.
        planner: rebuilds lost contexts.
        plan: what to run.
        count: number of choices.
        request: makes the request of a choice from a plan. A rebuilt context may be
            stored at other tiers, so every attempt makes its own.
        deadline: of the turn.
    """

    def __init__(
        self,
        workers: Workers,
        planner: Planner,
        plan: Plan,
        count: int,
        request: Callable[[Plan, int], DecodeRequest],
        deadline: Deadline,
    ) -> None:
        self.plan = plan
        self._workers = workers
        self._planner = planner
        self._request = request
        self._deadline = deadline
        self._restoring = asyncio.Lock()
        self._queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(BUFFERED * count)
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(count)]

    async def next(self) -> tuple[int, Event]:
        """Return the next event of any choice, or raise what a choice raised."""
        index, event = await self._deadline.bound(self._queue.get())
        if isinstance(event, Exception):
            raise event
        return index, event

    async def aclose(self) -> None:
        """Stop what still runs, and wait until it has stopped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, index: int) -> None:
        try:
            for last in (False, True):
                plan = self.plan
                try:
                    return await self._forward(index, self._request(plan, index))
                except _BeforeTextError as early:
                    if last:
                        raise early.error from None
                    if isinstance(early.error, NodeMissingError):
                        await self._restore(plan, early.error)
        except Exception as error:
            await self._queue.put((index, error))

    async def _forward(self, index: int, request: DecodeRequest) -> None:
        """Pass one attempt's events on."""
        told = False
        left = request.model_copy(update={"deadline_s": self._deadline.remaining()})
        try:
            async with aclosing(self._workers.decode(left)) as events:
                async for event in events:
                    told = told or isinstance(event, DecodeDelta)
                    await self._queue.put((index, event))
                    if isinstance(event, DecodeEnd):
                        return
            # An end without its event must not look like an answer.
            raise WorkerLostError("the worker stopped in the middle of the answer")
        except (NodeMissingError, WorkerLostError) as error:
            if told:
                raise
            raise _BeforeTextError(error) from error

    async def _restore(self, plan: Plan, error: NodeMissingError) -> None:
        """Rebuild the context; once for all choices."""
        if plan.parent is None:
            raise error
        async with self._restoring:
            if self.plan is plan:
                self.plan = await self._planner.restore(plan, self._deadline)


class _BeforeTextError(Exception):
    """An attempt failed before it said anything."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
