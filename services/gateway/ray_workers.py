"""The workers behind Ray Serve handles. The only module here that knows Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from criticalkv.services.gateway.workers import Event, WorkerLostError
from criticalkv.shared.errors import CancelledError, CriticalKVError, OverloadedError
from criticalkv.shared.requests import DecodeRequest, PrefillRequest, PrefillResult


class RayWorkers:
    """Workers behind Ray Serve deployment handles."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self._prefill = prefill
        self._decode = decode.options(stream=True)

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Compute and publish one node; a cancelled call stops the worker."""
        response = self._prefill.run.remote(request)
        try:
            result: PrefillResult = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            raise unwrap(error) from error
        return result

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Event, None]:
        """Generate a turn; closing the generator stops the worker."""
        response = self._decode.generate.remote(request)
        try:
            async for event in response:
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            response.cancel()
            raise
        except Exception as error:
            raise unwrap(error) from error


def unwrap(error: Exception) -> Exception:
    """Return the typed error behind what Ray raised."""
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else error
    if isinstance(cause, CriticalKVError):
        return cause
    if isinstance(error, BackPressureError):
        return OverloadedError("too many requests are queued", retry_after_s=1.0)
    if isinstance(error, (RayActorError, DeploymentUnavailableError)):
        return WorkerLostError("the worker died; retry", retry_after_s=1.0)
    if isinstance(error, TaskCancelledError):
        return CancelledError("the worker cancelled the request")
    return error
