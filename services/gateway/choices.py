"""The choices of a turn, as one stream of events, whatever happens to those who decode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.plan import Plan, Planner
from criticalkv.services.gateway.workers import Event, Workers
from criticalkv.shared.errors import (
    CriticalKVError,
    NodeMissingError,
    OverloadedError,
    WorkerLostError,
)
from criticalkv.shared.requests import DecodeDelta, DecodeEnd, DecodeRequest, DecodeStart

BUFFERED = 64  # events that a slow reader may leave waiting
MAX_LOST_WORKERS = 3  # that one turn survives; then a request is more likely to kill them
MAX_LOST_CONTEXTS = 1  # that one turn has rebuilt, for each time that decode begins
PAUSE_S = 0.5  # for those who route to learn that a worker is gone

log = logging.getLogger(__name__)


@dataclass
class Told:
    """What the reader knows of a choice."""

    start: DecodeStart | None = None
    sampled: list[int] = field(default_factory=list)
    ended: bool = False

    def note(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, DecodeStart):
            self.start = event
        elif isinstance(event, DecodeDelta):
            self.sampled += event.sampled
        else:
            self.ended = True

    @property
    def anything(self) -> bool:
        """Whether anything of the answer is known."""
        return bool(self.sampled) or self.ended


@dataclass
class Losses:
    """How often a request began again, and may."""

    workers: int = 0
    contexts: int = 0

    def allow(self, error: CriticalKVError) -> bool:
        """Count what was lost; return whether to go on."""
        if isinstance(error, OverloadedError):  # nothing is lost; the deadline bounds the waiting
            return True
        if isinstance(error, NodeMissingError):
            self.contexts += 1
            return self.contexts <= MAX_LOST_CONTEXTS
        self.workers, self.contexts = self.workers + 1, 0
        return self.workers <= MAX_LOST_WORKERS


class Choices:
    """Runs a decode request, with all its choices, until closed.

    If the context got lost, or the worker died, before any choice told anything, all begin
    again together. Later every choice goes on by itself, on another worker, after exactly
    the tokens that were told. A lost context is rebuilt first.

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
        self._told: list[Told] = []
        self._restoring = asyncio.Lock()
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
            request, losses = self._request(self.plan), Losses()
            self._told = [Told() for _ in range(1 + len(request.branch_seeds))]
            await self._begin(request, losses)
            left = [choice for choice, told in enumerate(self._told) if not told.ended]
            async with asyncio.TaskGroup() as group:
                for choice in left:
                    group.create_task(self._continue(choice, Losses(losses.workers)))
        except* Exception as failed:
            await self._put(_first(failed))

    async def _begin(self, request: DecodeRequest, losses: Losses) -> None:
        """Run all choices, anew until something is told; return when all ended or one is lost."""
        while True:
            error = await self._attempt(request, range(len(self._told)))
            if error is None:
                return
            await self._recover(error, losses)
            if any(told.anything for told in self._told):
                return
            request = self._request(self.plan)

    async def _continue(self, choice: int, losses: Losses) -> None:
        """Run one choice to its end after what is told of it."""
        while True:
            request = self._rest_of(choice)
            error = await self._attempt(request, [choice])
            if error is None:
                return
            await self._recover(error, losses, request.view)

    def _rest_of(self, choice: int) -> DecodeRequest:
        """Return the request for what is left of a choice, at the view that was told."""
        request, told = self._request(self.plan), self._told[choice]
        start = next(t.start for t in (told, *self._told) if t.start is not None)
        seed = (request.sampling.seed, *request.branch_seeds)[choice]
        return request.model_copy(
            update={
                "view": start.view,
                "min_tier": None,
                "sampling": request.sampling.model_copy(update={"seed": seed}),
                "branch_seeds": (),
                "emitted": tuple(told.sampled),
            }
        )

    async def _attempt(
        self, request: DecodeRequest, choices: Sequence[int]
    ) -> CriticalKVError | None:
        """Pass a worker's events on; return what was lost before every choice had ended.

        Args:
            request: for as many choices.
            choices: their numbers to the reader.
        """
        running = len(choices)
        left = request.model_copy(update={"deadline_s": self._deadline.remaining()})
        try:
            async with aclosing(self._workers.decode(left)) as events:
                async for event in events:
                    own = event.model_copy(update={"choice": choices[event.choice]})
                    self._told[own.choice].note(own)
                    await self._put(own)
                    running -= isinstance(own, DecodeEnd)
                    if not running:
                        return None
        except (NodeMissingError, WorkerLostError) as error:
            return error
        except OverloadedError as error:  # who is left has the lost one's work, too
            if not self._has_begun:
                raise
            return error
        # An end without all its events must not look like an answer.
        return WorkerLostError("the worker stopped in the middle of the answer")

    async def _recover(
        self, error: CriticalKVError, losses: Losses, view: Sequence[str] = ()
    ) -> None:
        """Make another attempt possible.

        Args:
            view: tiers that the chain has to be read at again; empty = any.

        Raises:
            CriticalKVError: the loss itself, if there were too many.
        """
        if not losses.allow(error):
            raise error
        log.warning("decode of a turn was lost (%s); it goes on elsewhere", type(error).__name__)
        if isinstance(error, NodeMissingError):
            async with self._restoring:  # choices that go on by themselves lose it together
                await self._restore(error, view)
        elif losses.workers > 1 or isinstance(error, OverloadedError):
            await self._pause(error)

    @property
    def _has_begun(self) -> bool:
        """Whether the reader was told of any choice: a stream then has its 200, and waits."""
        return any(told.start or told.anything for told in self._told)

    async def _pause(self, error: CriticalKVError) -> None:
        await self._deadline.bound(asyncio.sleep(error.retry_after_s or PAUSE_S))

    async def _put(self, event: Event | Exception) -> None:
        await self._queue.put((event, time.perf_counter()))

    async def _restore(self, error: NodeMissingError, view: Sequence[str]) -> None:
        if self.plan.parent is None:
            raise error
        while True:
            try:
                self.plan = await self._planner.restore(self.plan, self._deadline, view)
                return
            except OverloadedError as full:
                if not self._has_begun:
                    raise
                await self._pause(full)


def _first(failed: BaseExceptionGroup[Exception]) -> Exception:
    """Return one of the errors of a group, which may hold groups."""
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
