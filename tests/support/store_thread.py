"""A store within the test's own process, for tests that change its constants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from criticalkv.services.store.server import running
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.store_client import StoreClient


@contextmanager
def store_on(url: str, timeout_s: float = 10.0, **options: object) -> Iterator[StoreClient]:
    """Run a store on a Redis in a thread; yield a client of it."""
    config = StoreConfig(
        address="127.0.0.1:0", redis_url=url, memory_limit_mb=16, **options  # type: ignore[arg-type]
    )  # fmt: skip
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    context = running(config)
    try:
        store = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(30)
        try:
            own = config.model_copy(update={"address": store.address})
            with StoreClient.of(own, timeout_s) as client:
                yield client
        finally:
            leaving = context.__aexit__(None, None, None)
            asyncio.run_coroutine_threadsafe(leaving, loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
