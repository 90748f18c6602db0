"""Ray handles: errors unwrapped, cancellation passed on. No cluster needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError

from criticalkv.services.gateway.ray_workers import RayWorkers, unwrap
from criticalkv.services.gateway.workers import WorkerLostError
from criticalkv.shared.errors import (
    CancelledError,
    CriticalKVError,
    NodeMissingError,
    OverloadedError,
    StoreFullError,
)
from criticalkv.shared.requests import DecodeEnd

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
        self._error = error
        self._delay = delay

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Any:
        return self._run().__await__()

    async def _run(self) -> str:
        await asyncio.sleep(self._delay)
        if self._error:
            raise self._error
        return "result"

    async def __aiter__(self) -> AsyncIterator[Any]:
        for _ in range(3):
            await self._run()
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
    task = asyncio.create_task(workers.prefill(None))  # type: ignore[arg-type]
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
        await workers.prefill(None)  # type: ignore[arg-type]
    with pytest.raises(StoreFullError):
        await anext(workers.decode(None))  # type: ignore[arg-type]
