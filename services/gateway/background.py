"""Work that nobody waits for: one job at a time, a bounded queue, never an error.

Knows nothing of what the jobs do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Literal, Protocol

from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.metrics import Metrics
from criticalkv.shared.errors import (
    ContextExpiredError,
    ContextNotFoundError,
    CriticalKVError,
    LeaseLostError,
    OverloadedError,
    StoreUnavailableError,
    WorkerLostError,
)

RETRY_S = (1.0, 30.0)  # first and longest pause
ATTEMPTS = 6  # that failed; one that only made room for others is none
REST_S = 600.0  # what has failed is not tried again meanwhile
MAX_RESTING = 1024
# What may be otherwise a little later; everything else fails the same way again.
TRANSIENT = (OverloadedError, WorkerLostError, StoreUnavailableError, LeaseLostError)

Outcome = Literal["done", "unused"]

log = logging.getLogger(__name__)


class Job(Protocol):
    """One piece of work. May run several times."""

    @property
    def kind(self) -> str:
        """What metrics and log call it."""
        ...

    @property
    def key(self) -> str:
        """Two jobs of one key are one job. Holds no text."""
        ...

    def join(self, other: Job) -> None:
        """Take over what another job of the same key was to do besides."""
        ...

    def replaces(self, other: Job) -> bool:
        """Whether the other one, if it has not begun, is pointless with this one."""
        ...

    async def run(self, deadline: Deadline) -> Outcome:
        """Do it; "unused" if nobody has any use for the result."""
        ...


class Background:
    """Runs jobs one after the other, in the event loop of whoever submits them.

    Args:
        metrics: counts what becomes of them.
        size: jobs that may wait; more are dropped.
        timeout_s: deadline of each.
    """

    def __init__(self, metrics: Metrics, size: int, timeout_s: float) -> None:
        self._metrics = metrics
        self._size = size
        self._timeout_s = timeout_s
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._running: Job | None = None
        self._current: asyncio.Task[None] | None = None
        self._worker: asyncio.Task[None] | None = None
        self._resting: OrderedDict[str, float] = OrderedDict()
        self._closed = False

    def submit(self, job: Job) -> bool:
        """Enqueue a job, or join it to the one of its key; False if it was dropped.

        Returns at once, and raises nothing.
        """
        same = self._job(job.key)
        if same is not None:
            same.join(job)
            return True
        replaced = [key for key, other in self._waiting.items() if job.replaces(other)]
        full = len(self._waiting) - len(replaced) >= self._size
        if self._closed or self._rests(job.key) or full:
            self._metrics.background(job.kind, "dropped")
            return False
        for key in replaced:
            self._metrics.background(self._waiting.pop(key).kind, "dropped")
        self._waiting[job.key] = job
        self._metrics.background(job.kind, "queued")
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return True

    def has(self, key: str) -> bool:
        """Whether a job waits or runs."""
        return self._job(key) is not None

    async def aclose(self) -> None:
        """Cancel everything, and wait until it has stopped."""
        self._closed = True
        for job in self._waiting.values():
            self._metrics.background(job.kind, "dropped")
        self._waiting.clear()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    def _job(self, key: str) -> Job | None:
        running = self._running
        return running if running and running.key == key else self._waiting.get(key)

    async def _work(self) -> None:
        while self._waiting:
            _, job = self._waiting.popitem(last=False)
            self._running, self._current = job, asyncio.create_task(self._run(job))
            try:
                await asyncio.wait({self._current})
            finally:
                self._current.cancel()
                await asyncio.gather(self._current, return_exceptions=True)
                if self._current.cancelled():
                    self._metrics.background(job.kind, "dropped")
                # `_run` does it too, but not if it was cancelled before its first step.
                self._running = self._current = None

    async def _run(self, job: Job) -> None:
        deadline = Deadline.after(self._timeout_s)
        try:
            event: str = await deadline.bound(self._attempts(job, deadline))
        except (ContextExpiredError, ContextNotFoundError) as error:
            event = "unused"
            _tell(job, error.code)
        except Exception as error:
            event = "failed"
            self._rest(job.key)
            _tell(job, error.code if isinstance(error, CriticalKVError) else type(error).__name__)
        finally:
            # In the same step as the job's end: what joins it later would be lost.
            self._running = None
        self._metrics.background(job.kind, event)

    async def _attempts(self, job: Job, deadline: Deadline) -> Outcome:
        pause, failed = RETRY_S[0], 0
        while True:
            try:
                return await job.run(deadline)
            except TRANSIENT as error:
                # Under load it makes room again and again: the deadline bounds that.
                failed += not isinstance(error, OverloadedError)
                if failed >= ATTEMPTS:
                    raise
                self._metrics.background(job.kind, "retried")
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_S[1])

    def _rests(self, key: str) -> bool:
        return self._resting.get(key, 0.0) > time.monotonic()

    def _rest(self, key: str) -> None:
        self._resting[key] = time.monotonic() + REST_S
        self._resting.move_to_end(key)
        while len(self._resting) > MAX_RESTING:
            self._resting.popitem(last=False)


def _tell(job: Job, code: str) -> None:
    log.info("background %s of %s given up: %s", job.kind, job.key[:24], code)
