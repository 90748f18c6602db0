"""Tasks beside the calls: steps that must run to their end, and steps that repeat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from criticalkv.shared.errors import CriticalKVError

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Background:
    """Keeps such steps alive, and waits for them at the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def whole(self, steps: Coroutine[Any, Any, _T]) -> _T:
        """Run `steps` as a task; a cancelled caller leaves it running."""
        task = asyncio.get_running_loop().create_task(steps)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def drain(self, timeout_s: float) -> None:
        """Wait for what still runs, at most `timeout_s` seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)


async def repeat(interval_s: float, step: Callable[[], Awaitable[None]], what: str) -> None:
    """Run `step` every `interval_s` seconds until cancelled; log its errors."""
    task = asyncio.current_task()
    assert task is not None
    while True:
        await asyncio.sleep(interval_s)
        try:
            await step()
        except CriticalKVError as error:
            log.warning("%s failed: %s", what, error)
        except Exception as error:  # its text may repeat what is stored
            log.error("%s failed: %s", what, type(error).__name__)
        # redis-py may turn a cancellation into an error of its own.
        if task.cancelling():
            raise asyncio.CancelledError
