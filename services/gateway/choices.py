"""The one decode request of a turn, as one stream of its choices' events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.plan import Plan, Planner
from criticalkv.services.gateway.workers import Event, WorkerLostError, Workers
from criticalkv.shared.errors import NodeMissingError
from criticalkv.shared.requests import DecodeEnd, DecodeRequest, DecodeStart

BUFFERED = 64  # events that a slow reader may leave waiting


class Choices:
    """Runs a decode request, with all its choices, until closed.

    If the context got lost, or the worker died, before any choice told anything, all are
    tried once more; a lost context is rebuilt first.

    Args:
        workers: who decodes.
        planner: rebuilds lost contexts.
        plan: what to run.
        request: makes the request from a plan. A rebuilt context may be stored at other
            tiers, so every attempt makes its own.
        deadline: of the turn.
    """

    def __init__(
        self,
        workers: Workers,
        planner: Planner,
        plan: Plan,
        request: Callable[[Plan], DecodeRequest],
        deadline: Deadline,
    ) -> None:
        self.plan = plan
        self._workers = workers
        self._planner = planner
        self._request = request
        self._deadline = deadline
        self._queue: asyncio.Queue[tuple[Event | Exception, float]] = asyncio.Queue(BUFFERED)
        self._task = asyncio.create_task(self._run())

    async def next(self) -> tuple[Event, float]:
        """Return the next event and when it came, or raise what ended the request.

        The time is perf_counter's; a reader that is late does not change it.
        """
        event, at = await self._deadline.bound(self._queue.get())
        if isinstance(event, Exception):
            raise event
        return event, at

    async def aclose(self) -> None:
        """Stop the request if it still runs, and wait until it has stopped."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            for last in (False, True):
                try:
                    return await self._forward(self._request(self.plan))
                except _BeforeTextError as early:
                    if last:
                        raise early.error from None
                    if isinstance(early.error, NodeMissingError):
                        await self._restore(early.error)
        except Exception as error:
            await self._put(error)

    async def _forward(self, request: DecodeRequest) -> None:
        """Pass one attempt's events on, until every choice has ended."""
        told, running = False, 1 + len(request.branch_seeds)
        left = request.model_copy(update={"deadline_s": self._deadline.remaining()})
        try:
            async with aclosing(self._workers.decode(left)) as events:
                async for event in events:
                    told = told or not isinstance(event, DecodeStart)
                    await self._put(event)
                    running -= isinstance(event, DecodeEnd)
                    if not running:
                        return
            # An end without all its events must not look like an answer.
            raise WorkerLostError("the worker stopped in the middle of the answer")
        except (NodeMissingError, WorkerLostError) as error:
            if told:
                raise
            raise _BeforeTextError(error) from error

    async def _put(self, event: Event | Exception) -> None:
        await self._queue.put((event, time.perf_counter()))

    async def _restore(self, error: NodeMissingError) -> None:
        if self.plan.parent is None:
            raise error
        self.plan = await self._planner.restore(self.plan, self._deadline)


class _BeforeTextError(Exception):
    """An attempt failed before it told anything."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
