"""Ray handles: errors unwrapped, cancellation passed on. No cluster needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    OwnerDiedError,
    RayTaskError,
    TaskCancelledError,
)
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError

from criticalkv.services.gateway.ray_workers import RayWorkers, unwrap
from criticalkv.shared.errors import (
    CancelledError,
    CriticalKVError,
    NodeMissingError,
    OverloadedError,
    StoppingError,
    StoreFullError,
    WorkerLostError,
)
from criticalkv.shared.requests import DecodeEnd

REQUEST = SimpleNamespace(background=False)
END = DecodeEnd(finish_reason="stop", prompt_tokens=1, completion_tokens=1, node_id=None)


def wrapped(cause: Exception) -> Exception:
    error: Exception = RayTaskError("run", "traceback", cause).as_instanceof_cause()
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (wrapped(StoreFullError("full", param="p", retry_after_s=3)), StoreFullError),
        (wrapped(NodeMissingError.of("a" * 64, "gone")), NodeMissingError),
        (StoreFullError("full"), StoreFullError),
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), OverloadedError),
        (ActorDiedError(), WorkerLostError),
        (NodeDiedError("gone"), WorkerLostError),
        (OwnerDiedError("00" * 28, None, "who"), WorkerLostError),
        (ReplicaUnavailableError("r"), WorkerLostError),
        (wrapped(WorkerLostError("the decode worker is stopping")), WorkerLostError),
        (TaskCancelledError(), CancelledError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_rays_errors_become_ours(error: Exception, expected: type[CriticalKVError]) -> None:
    found = unwrap(error)
    assert type(found) is expected


def test_a_wrapped_error_keeps_its_fields() -> None:
    found = unwrap(wrapped(StoreFullError("full", param="p", retry_after_s=3)))
    assert isinstance(found, StoreFullError)
    assert (found.message, found.param, found.retry_after_s) == ("full", "p", 3)


def test_other_errors_stay_what_they_are() -> None:
    error = wrapped(ValueError("x"))
    assert unwrap(error) is error


class Response:
    """A DeploymentResponse, streaming or not."""

    def __init__(self, error: Exception | None = None, delay: float = 0.0) -> None:
        self.cancelled = False
        self.runs: list[asyncio.Future[Any]] = []
        self._error = error
        self._delay = delay

    def cancel(self) -> None:
        self.cancelled = True
        for run in self.runs:
            run.cancel()

    def __await__(self) -> Any:
        self.runs.append(asyncio.ensure_future(self._run()))
        return self.runs[-1].__await__()

    async def _run(self) -> str:
        await asyncio.sleep(self._delay)
        if self._error:
            raise self._error
        return "result"

    async def __aiter__(self) -> AsyncIterator[Any]:
        for _ in range(3):
            # As Ray's: another task than the reader's, which a cancellation ends.
            self.runs.append(asyncio.ensure_future(self._run()))
            await self.runs[-1]
            yield END


class Handle:
    """A DeploymentHandle that gives one response."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self.streaming = False

    def options(self, *, stream: bool) -> Handle:
        self.streaming = stream
        return self

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, _: Any) -> Response:
        return self._response


async def test_a_cancelled_prefill_cancels_the_worker() -> None:
    response = Response(delay=10)
    workers = RayWorkers(Handle(response), Handle(Response()))
    task = asyncio.create_task(workers.prefill(REQUEST))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert response.cancelled


async def test_closing_the_events_cancels_decode() -> None:
    response = Response()
    handle = Handle(response)
    workers = RayWorkers(Handle(Response()), handle)
    async with aclosing(workers.decode(None)) as events:  # type: ignore[arg-type]
        assert await anext(events) == END
    assert handle.streaming
    assert response.cancelled


async def test_errors_come_out_typed() -> None:
    failing = Response(wrapped(StoreFullError("full")))
    workers = RayWorkers(Handle(failing), Handle(failing))
    with pytest.raises(StoreFullError):
        await workers.prefill(REQUEST)  # type: ignore[arg-type]
    with pytest.raises(StoreFullError):
        await anext(workers.decode(None))  # type: ignore[arg-type]


async def test_draining_waits_then_ends_what_runs_with_an_error_and_begins_nothing() -> None:
    quick, slow = Response(delay=0.1), Response(delay=60)

    async def read(workers: RayWorkers) -> list[Any]:
        return [event async for event in workers.decode(None)]  # type: ignore[arg-type]

    ends = []
    for response in (quick, slow):
        workers = RayWorkers(Handle(Response()), Handle(response))
        reading = asyncio.create_task(read(workers))
        await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()
        await workers.drain(1.0 if response is slow else 60.0)
        assert asyncio.get_running_loop().time() - began < 30
        with pytest.raises(StoppingError):
            await workers.prefill(REQUEST)  # type: ignore[arg-type]
        with pytest.raises(StoppingError):
            await anext(workers.decode(None))  # type: ignore[arg-type]
        ends += await asyncio.gather(reading, return_exceptions=True)
    assert ends[0] == [END] * 3
    assert isinstance(ends[1], StoppingError)  # a 503: trying again helps
    assert ends[1].retry_after_s
    assert (quick.cancelled, slow.cancelled) == (False, True)


async def test_a_reader_that_is_cancelled_is_not_told_that_the_service_stops() -> None:
    workers = RayWorkers(Handle(Response()), Handle(Response(delay=60)))

    async def read() -> None:
        async for _ in workers.decode(None):  # type: ignore[arg-type]
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await workers.drain(60.0)


async def test_draining_waits_for_prefills_and_then_ends_them() -> None:
    slow = Response(delay=60)
    workers = RayWorkers(Handle(slow), Handle(Response()))
    running = asyncio.create_task(workers.prefill(REQUEST))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    await workers.drain(0.1)
    with pytest.raises(StoppingError):
        await running
    assert slow.cancelled


async def test_draining_does_not_wait_for_what_nobody_waits_for() -> None:
    slow = Response(delay=60)
    workers = RayWorkers(Handle(slow), Handle(Response()))
    running = asyncio.create_task(
        workers.prefill(SimpleNamespace(background=True))  # type: ignore[arg-type]
    )
    await asyncio.sleep(0.01)
    async with asyncio.timeout(30.0):
        await workers.drain(60.0)
    with pytest.raises(StoppingError):
        await running
    assert slow.cancelled
