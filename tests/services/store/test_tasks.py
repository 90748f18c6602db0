"""Steps that repeat go on, whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging

import pytest

from criticalkv.services.store.tasks import repeat
from criticalkv.shared.errors import StoreUnavailableError


async def test_an_untyped_error_is_logged_and_the_step_repeats(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors: list[Exception] = [KeyError("what a user wrote"), StoreUnavailableError("silent")]
    done = asyncio.Event()

    async def step() -> None:
        if errors:
            raise errors.pop(0)
        done.set()

    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(repeat(0.01, step, "sweeping"))
        await asyncio.wait_for(done.wait(), 10)
    assert "sweeping failed: KeyError" in caplog.text
    assert "sweeping failed: silent" in caplog.text
    assert "what a user wrote" not in caplog.text
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
