"""An event loop in a thread of its own, for callers without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
STOP_S = 10.0
"""Longest wait for its end."""


class LoopThread:
    """Runs coroutines until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: what it waits for must not keep a process that was told to end.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin; cancelling the future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def cancel(self) -> None:
        """Cancel what runs, and wait until it has ended."""
        self.start(_cancel_others()).result(STOP_S)

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
