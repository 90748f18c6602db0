"""The gateway as a Ray Serve deployment: a thin shell around the core."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import FastAPI

from criticalkv.services.gateway.app import build_app
from criticalkv.services.gateway.core import GatewayCore
from criticalkv.services.gateway.ray_workers import POLL_S, RayWorkers, http_host
from criticalkv.shared.config import Config
from criticalkv.shared.model.spec import load_spec, load_tokenizer
from criticalkv.shared.store_client import StoreClient

LAST_WORDS_S = 2.0


class Gateway:
    """Wires the core to Ray handles. Wrapped with `serve.ingress()` and `serve.deployment`.

    Args:
        config: all of it.
        prefill: handle of the prefill deployment.
        decode: handle of the decode deployment.
    """

    def __init__(self, config: Config, prefill: Any, decode: Any) -> None:
        config = _as_served(config)
        spec = load_spec(config.model, check_device=False)
        self._workers = RayWorkers(prefill, decode)
        self._core = GatewayCore(
            config, spec, load_tokenizer(spec), StoreClient.of(config.store), self._workers
        )

    async def drain(self, grace_s: float) -> None:
        """Begin no more answers; end those that run after `grace_s` with an error event.

        Called before the application is deleted: after that nobody could tell the clients.
        """
        await self._workers.drain(grace_s)
        with suppress(TimeoutError):  # the last words are on their way to the clients
            async with asyncio.timeout(LAST_WORDS_S):
                while self._core.metrics.in_progress:
                    await asyncio.sleep(POLL_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve in the replica, after the constructor."""
        return build_app(self._core)


def _as_served(config: Config) -> Config:
    """Return the configuration with the host that Serve listens on, whoever started it.

    Without API keys that has to be a loopback address: it is not for `gateway.host` to say.
    """
    host = http_host()
    if host is None:
        return config
    gateway = config.gateway.model_copy(update={"host": host})
    return config.model_copy(update={"gateway": gateway})
