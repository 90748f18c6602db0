"""Steps that must run to their end even if their caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

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
