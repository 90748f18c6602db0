"""The workers behind Ray Serve handles. The only module here that knows Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve.context import _get_global_client
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)

from criticalkv.services.gateway.workers import Event
from criticalkv.shared.errors import (
    CancelledError,
    CriticalKVError,
    OverloadedError,
    StoppingError,
    WorkerLostError,
)
from criticalkv.shared.requests import DecodeRequest, PrefillRequest, PrefillResult

# How it shows that a process, or the machine under it, is gone.
LOST = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    ObjectLostError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)


POLL_S = 0.05
STOPPING = "the service is stopping"


class RayWorkers:
    """Workers behind Ray Serve deployment handles."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self._prefill = prefill
        self._decode = decode.options(stream=True)
        self._calls: set[Any] = set()
        self._background: set[Any] = set()
        self._is_draining = False

    async def drain(self, grace_s: float) -> None:
        """Begin nothing more; end what still runs after the grace, with an error.

        What nobody waits for ends at once. The last errors may still be on their way to
        clients when this returns.
        """
        self._is_draining = True
        for response in self._background:
            response.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._calls:
                    await asyncio.sleep(POLL_S)
        for response in self._calls:
            response.cancel()

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Compute and publish one node; a cancelled call stops the worker."""
        self._check_open()
        response = self._prefill.run.remote(request)
        calls = self._background if request.background else self._calls
        calls.add(response)
        try:
            result: PrefillResult = await response
        except asyncio.CancelledError as error:
            response.cancel()
            _check_cancelled(error)
            raise
        except Exception as error:
            raise unwrap(error) from error
        finally:
            calls.discard(response)
        return result

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Event, None]:
        """Generate a turn; closing the generator stops the worker."""
        self._check_open()
        response = self._decode.generate.remote(request)
        self._calls.add(response)
        try:
            async for event in response:
                yield event
        except GeneratorExit:
            response.cancel()
            raise
        except asyncio.CancelledError as error:
            response.cancel()
            _check_cancelled(error)
            raise
        except Exception as error:
            raise unwrap(error) from error
        finally:
            self._calls.discard(response)

    def _check_open(self) -> None:
        if self._is_draining:
            raise StoppingError(STOPPING, retry_after_s=1.0)


def http_host() -> str | None:
    """Return the host that Serve listens on; None if no Serve runs here."""
    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else str(client.http_config.host)


def _check_cancelled(error: asyncio.CancelledError) -> None:
    """Tell a call that `drain` cancelled from one whose caller left."""
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        raise StoppingError(STOPPING, retry_after_s=1.0) from error


def unwrap(error: Exception) -> Exception:
    """Return the typed error behind what Ray raised."""
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else error
    if isinstance(cause, CriticalKVError):
        return cause
    if isinstance(error, BackPressureError):
        return OverloadedError("too many requests are queued", retry_after_s=1.0)
    if isinstance(error, LOST):
        return WorkerLostError("the worker died; retry", retry_after_s=1.0)
    if isinstance(error, TaskCancelledError):
        return CancelledError("the worker cancelled the request")
    return error
