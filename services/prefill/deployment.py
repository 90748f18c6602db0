"""The prefill deployment: a thin Ray Serve shell around the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from criticalkv.services.prefill.engine import PrefillEngine
from criticalkv.shared.config import Config
from criticalkv.shared.errors import DeadlineError
from criticalkv.shared.model.loader import load_model
from criticalkv.shared.requests import PrefillRequest, PrefillResult
from criticalkv.shared.store_client import StoreClient
from criticalkv.shared.telemetry import replica_name


class Prefill:
    """One replica: one model, a few prefills at once, and one in the background."""

    def __init__(self, config: Config) -> None:
        self._store = StoreClient.of(config.store)
        model = load_model(config.model, config.prefill.threads)
        self._engine = PrefillEngine(
            model, self._store, config.prefill, config.eviction, replica_name()
        )
        count = config.prefill.max_ongoing
        # Not the default executor: a prefill holds its thread for seconds.
        self._threads = ThreadPoolExecutor(count + 1, thread_name_prefix="prefill")
        self._foreground, self._background = asyncio.Semaphore(count), asyncio.Semaphore(1)

    async def run(self, request: PrefillRequest) -> PrefillResult:
        """Publish a node. Cancelling the call stops before the next layer.

        Raises:
            DeadlineError: also if its place did not become free in time.
        """
        with self._engine.accepted(request):
            return await self._run(request)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve this replica's load; `services.scaling` reads it."""
        return self._engine.load()

    async def _run(self, request: PrefillRequest) -> PrefillResult:
        cancelled, arrived = threading.Event(), time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            # A background run has a place of its own: standing back, it would block others'.
            async with self._background if request.background else self._foreground:
                left = request.deadline_s - (time.monotonic() - arrived)
                if left <= 0:
                    raise DeadlineError("the prefill's deadline passed while it waited")
                begun = request.model_copy(update={"deadline_s": left})
                return await loop.run_in_executor(self._threads, self._engine.run, begun, cancelled)
        finally:
            cancelled.set()
