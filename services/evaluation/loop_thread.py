"""An event loop in a thread of its own, for callers without one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")
STOP_S = 10.0
"""Longest wait for each step of its end."""
log = logging.getLogger(__name__)


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

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what runs, do one thing more, and end the thread.

        What does not end in time is left to the thread: an error of its own would hide the
        one for which it is closed.
        """
        try:
            self._finish(_cancel_others())
            self._finish(last)
        finally:
            self._stop()

    def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        future = self.start(work)
        if wait((future,), STOP_S).done:
            future.result()
        else:
            log.warning("a request to the service did not end within %g s", STOP_S)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
