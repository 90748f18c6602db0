"""The decode deployment: a thin Ray Serve shell around the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict

from criticalkv.services.decode.engine import DecodeEngine
from criticalkv.shared.config import Config
from criticalkv.shared.errors import CriticalKVError, DeadlineError
from criticalkv.shared.model.loader import load_model
from criticalkv.shared.model.prepack import prepack
from criticalkv.shared.requests import DecodeDelta, DecodeEnd, DecodeRequest, DecodeStart
from criticalkv.shared.store_client import StoreClient
from criticalkv.shared.telemetry import replica_name

Event = DecodeStart | DecodeDelta | DecodeEnd
MARGIN_S = 30.0  # beyond the deadline, which the engine itself keeps
RESIDENT_IDS = 512  # nodes told to routing: 32 KiB for each handle


class Decode:
    """One replica: one model, many turns at once."""

    def __init__(self, config: Config) -> None:
        self._store = StoreClient.of(config.store)
        model = load_model(config.model, config.decode.threads)
        if config.decode.prepack:
            prepack(model)
        self._engine = DecodeEngine(model, self._store, config.decode, replica_name())
        self._engine.warm_up(codecs=True)

    async def generate(self, request: DecodeRequest) -> AsyncIterator[Event]:
        """Stream a turn's events. Closing the stream cancels the turn."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | CriticalKVError] = asyncio.Queue()

        def emit(event: Event | CriticalKVError) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        sequence = self._engine.submit(request, emit)
        running = 1 + len(request.branch_seeds)
        try:
            while True:
                event = await _next(events, request.deadline_s + MARGIN_S)
                if isinstance(event, CriticalKVError):
                    raise event
                yield event
                running -= isinstance(event, DecodeEnd)
                if not running:
                    return
        finally:
            sequence.cancelled.set()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve this replica's load; `services.scaling` reads it."""
        return asdict(self._engine.load())

    async def record_routing_stats(self) -> dict[str, list[str]]:
        """Tell Serve which nodes are here; `services.routing` reads it."""
        return {"nodes": list(self._engine.resident_ids(RESIDENT_IDS))}

    def check_health(self) -> None:
        """Raise if the step thread has died, so that Serve replaces the replica."""
        self._engine.check_health()


async def _next(
    events: asyncio.Queue[Event | CriticalKVError], timeout_s: float
) -> Event | CriticalKVError:
    try:
        return await asyncio.wait_for(events.get(), timeout_s)
    except TimeoutError:
        raise DeadlineError("the decode engine gave no answer in time") from None
