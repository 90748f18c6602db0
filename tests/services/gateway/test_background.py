"""The background worker: bounds, doubles, retries, deadlines, the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from criticalkv.services.gateway import background as module
from criticalkv.services.gateway.background import Background, Job, Outcome
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.metrics import Metrics
from criticalkv.shared.errors import (
    ContextExpiredError,
    NumericsError,
    OverloadedError,
    WorkerLostError,
)


@dataclass
class Work:
    """A job that a test controls."""

    key: str
    kind: str = "refine"
    outcome: Outcome = "done"
    go: asyncio.Event = field(default_factory=asyncio.Event)
    errors: list[Exception] = field(default_factory=list)
    joined: list[Job] = field(default_factory=list)
    old: str = ""
    runs: int = 0
    cancelled: bool = False

    def join(self, other: Job) -> None:
        self.joined.append(other)

    def replaces(self, other: Job) -> bool:
        return bool(self.old) and other.key == self.old

    async def run(self, _: Deadline) -> Outcome:
        self.runs += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.errors:
            raise self.errors.pop(0)
        return self.outcome


def free(key: str, **fields: object) -> Work:
    work = Work(key, **fields)  # type: ignore[arg-type]
    work.go.set()
    return work


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", (0.001, 0.002))


def events(worker: Background) -> dict[str, float]:
    metric = next(m for m in worker._metrics._background.collect())
    return {
        s.labels["event"]: s.value for s in metric.samples if s.name.endswith("_total") and s.value
    }


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not what():
            await asyncio.sleep(0.005)


def make(size: int = 2, timeout_s: float = 10.0) -> Background:
    return Background(Metrics(), size, timeout_s)


async def test_jobs_run_one_after_the_other() -> None:
    worker, jobs = make(), [Work(k) for k in "abc"]
    assert worker.submit(jobs[0])
    await until(lambda: jobs[0].runs == 1)
    assert all(worker.submit(job) for job in jobs[1:])
    await asyncio.sleep(0.05)
    assert [job.runs for job in jobs] == [1, 0, 0]
    for job in jobs:
        job.go.set()
    await until(lambda: events(worker).get("done") == 3)
    assert not any(worker.has(k) for k in "abc")
    assert worker.submit(free("d"))  # a worker that had gone to sleep
    await until(lambda: events(worker).get("done") == 4)


async def test_a_full_queue_drops_and_counts() -> None:
    worker, first = make(size=1), Work("a")
    worker.submit(first)
    await until(lambda: first.runs == 1)
    assert [worker.submit(Work(k)) for k in "bcd"] == [True, False, False]
    assert events(worker) == {"queued": 2, "dropped": 2}
    await worker.aclose()


async def test_two_jobs_of_one_key_are_one() -> None:
    worker, running, waiting = make(), Work("a"), Work("b")
    worker.submit(running)
    await until(lambda: running.runs == 1)
    worker.submit(waiting)
    doubles = [Work("a"), Work("b")]
    assert [worker.submit(job) for job in doubles] == [True, True]
    assert (running.joined, waiting.joined) == ([doubles[0]], [doubles[1]])
    running.go.set()
    waiting.go.set()
    await until(lambda: events(worker).get("done") == 2)
    assert [job.runs for job in doubles] == [0, 0]


async def test_a_replaced_job_is_dropped_unless_it_runs() -> None:
    worker, running, waiting = make(), Work("a"), Work("b")
    worker.submit(running)
    await until(lambda: running.runs == 1)
    worker.submit(waiting)
    worker.submit(free("c", old="b"))
    worker.submit(free("d", old="a"))
    running.go.set()
    await until(lambda: events(worker).get("done") == 3)
    assert (running.cancelled, waiting.runs) == (False, 0)
    assert events(worker) == {"queued": 4, "done": 3, "dropped": 1}


async def test_a_job_that_is_not_taken_replaces_nothing() -> None:
    worker, running, waiting, rests = make(size=1), Work("a"), Work("b"), Work("c", old="b")
    worker.submit(running)
    await until(lambda: running.runs == 1)
    worker.submit(waiting)
    worker._rest("c")
    assert not worker.submit(rests)
    assert worker.has("b")
    # What it replaces makes room for it, however full the queue is.
    assert worker.submit(Work("d", old="b"))
    assert (worker.has("b"), worker.has("d")) == (False, True)
    await worker.aclose()


async def test_a_job_cancelled_before_its_first_step_runs_no_more() -> None:
    worker = make()
    worker.submit(Work("a"))
    await asyncio.sleep(0)  # the worker has taken it, and it has not begun
    assert worker.has("a")
    worker._current.cancel()
    await until(lambda: worker._worker.done())
    assert not worker.has("a")
    assert events(worker) == {"queued": 1, "dropped": 1}


async def test_what_may_work_later_is_tried_again() -> None:
    worker = make()
    job = free("a", errors=[OverloadedError("spool"), WorkerLostError("died")])
    worker.submit(job)
    await until(lambda: events(worker).get("done") == 1)
    assert (job.runs, events(worker)["retried"]) == (3, 2)


async def test_it_is_not_tried_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, job = make(), free("a", errors=[WorkerLostError("died")] * 99)
    worker.submit(job)
    await until(lambda: events(worker).get("failed") == 1)
    assert job.runs == module.ATTEMPTS
    # What has failed rests: requests that would submit it again do not run it again.
    assert not worker.submit(free("a"))
    monkeypatch.setattr(module, "REST_S", 0.0)
    worker._resting.clear()
    assert worker.submit(free("a"))
    await until(lambda: events(worker).get("done") == 1)


async def test_under_load_only_the_deadline_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", (0.0, 0.0))
    worker = make(timeout_s=60.0)
    job = free("a", errors=[OverloadedError("full")] * 3 * module.ATTEMPTS)
    worker.submit(job)
    await until(lambda: events(worker).get("done") == 1)
    assert job.runs == 3 * module.ATTEMPTS + 1


@pytest.mark.parametrize(
    ("error", "event", "told"),
    [
        (NumericsError("nan of the secret"), "failed", "non_finite_values"),
        (ContextExpiredError("secret"), "unused", "context_expired"),
        (ValueError("secret"), "failed", "ValueError"),
    ],
)
async def test_a_failure_is_one_line_without_text_and_the_next_job_runs(
    error: Exception, event: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker = make()
    worker.submit(free("a", errors=[error]))
    worker.submit(free("b"))
    await until(lambda: events(worker).get("done") == 1)
    assert events(worker)[event] == 1
    lines = [r.getMessage() for r in caplog.records if r.name == module.__name__]
    assert lines == [f"background refine of a given up: {told}"]


async def test_a_deadline_ends_a_job() -> None:
    worker, job = make(timeout_s=0.5), Work("a")
    worker.submit(job)
    await until(lambda: events(worker).get("failed") == 1)
    assert job.cancelled


async def test_the_end_cancels_everything() -> None:
    worker, running, waiting = make(), Work("a"), Work("b")
    worker.submit(running)
    await until(lambda: running.runs == 1)
    worker.submit(waiting)
    await worker.aclose()
    assert (running.cancelled, waiting.runs) == (True, 0)
    assert events(worker) == {"queued": 2, "dropped": 2}
    assert not worker.submit(Work("c"))
    await make().aclose()
