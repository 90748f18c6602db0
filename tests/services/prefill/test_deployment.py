"""The shell around the engine: who waits for a place has its deadline, too."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from criticalkv.services.prefill.deployment import Prefill
from criticalkv.services.prefill.waiting import Waiting
from criticalkv.shared.errors import DeadlineError
from criticalkv.shared.requests import PrefillRequest


class Engine:
    """Runs until it is let go; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[PrefillRequest] = []
        self.go = threading.Event()
        self.waiting = Waiting()

    def accepted(self, request: PrefillRequest) -> Any:
        return self.waiting.accepted(len(request.token_ids))

    def load(self) -> dict[str, float]:
        return dict(zip(("waiting", "waiting_tokens"), self.waiting.numbers(), strict=True))

    def run(self, request: PrefillRequest, _: threading.Event) -> Any:
        self.asked.append(request)
        assert self.go.wait(60)
        return request


@pytest.fixture
def replica() -> Prefill:
    made = Prefill.__new__(Prefill)
    made._engine = Engine()  # type: ignore[assignment]
    made._threads = ThreadPoolExecutor(2)
    made._foreground, made._background = asyncio.Semaphore(1), asyncio.Semaphore(1)
    return made


def asking(deadline_s: float) -> PrefillRequest:
    return PrefillRequest(
        node_id="1" * 64,
        token_ids=(1,),
        policy="dense",
        store_tier="1",
        salt="2" * 64,
        deadline_s=deadline_s,
    )


async def test_the_wait_for_a_place_counts(replica: Prefill) -> None:
    engine: Any = replica._engine
    first = asyncio.create_task(replica.run(asking(60.0)))
    while not engine.asked:
        await asyncio.sleep(0.01)
    late = asyncio.create_task(replica.run(asking(0.05)))
    in_time = asyncio.create_task(replica.run(asking(60.0)))
    await asyncio.sleep(0.2)
    engine.go.set()
    with pytest.raises(DeadlineError):
        await late
    await asyncio.gather(first, in_time)
    assert len(engine.asked) == 2
    assert engine.asked[1].deadline_s < 60.0 - 0.1


async def test_who_waits_for_a_place_is_told_to_scaling_and_who_left_is_not(
    replica: Prefill,
) -> None:
    engine: Any = replica._engine
    assert await replica.record_autoscaling_stats() == {"waiting": 0, "waiting_tokens": 0}
    running = [asyncio.create_task(replica.run(asking(60.0))) for _ in range(3)]
    while not engine.asked:
        await asyncio.sleep(0.01)
    assert await replica.record_autoscaling_stats() == {"waiting": 3, "waiting_tokens": 3}
    running[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await running[2]
    assert await replica.record_autoscaling_stats() == {"waiting": 2, "waiting_tokens": 2}
    engine.go.set()
    await asyncio.gather(*running[:2])
    assert await replica.record_autoscaling_stats() == {"waiting": 0, "waiting_tokens": 0}
