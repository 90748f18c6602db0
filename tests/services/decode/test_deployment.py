"""The shell around the engine: a stream ends when every choice has ended."""

from __future__ import annotations

import threading
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from criticalkv.services.decode.deployment import Decode
from criticalkv.shared.errors import CriticalKVError, DeadlineError, NodeMissingError
from criticalkv.shared.requests import DecodeDelta, DecodeEnd, DecodeRequest, DecodeStart, Sampling


def start(choice: int) -> DecodeStart:
    return DecodeStart(
        choice=choice, replica="r", bytes_pulled=0, cached_tokens=0, tier="1",
        retained_fraction=1.0, store_ms=0.0,
    )  # fmt: skip


def end(choice: int) -> DecodeEnd:
    return DecodeEnd(
        choice=choice, finish_reason="stop", prompt_tokens=1, completion_tokens=1, node_id=None
    )


class Engine:
    """Tells its events at once."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.sequence = SimpleNamespace(cancelled=threading.Event())

    def submit(self, _: DecodeRequest, emit: Any) -> Any:
        for event in self.events:
            emit(event)
        return self.sequence


async def generate(events: list[Any], branches: int, most: int = 99) -> tuple[list[Any], Engine]:
    replica = Decode.__new__(Decode)
    replica._engine = engine = Engine(events)  # type: ignore[assignment]
    request = DecodeRequest(
        request_id="r", token_ids=(1,), salt="0" * 64, deadline_s=1.0,
        sampling=Sampling(max_tokens=9), branch_seeds=tuple(range(branches)),
    )  # fmt: skip
    told: list[Any] = []
    async with aclosing(replica.generate(request)) as stream:  # type: ignore[type-var]
        async for event in stream:
            told.append(event)
            if len(told) == most:
                break
    return told, engine


async def test_a_stream_ends_with_the_last_choices_end() -> None:
    delta = DecodeDelta(choice=2, text="x")
    events = [start(0), start(1), end(1), start(2), end(0), delta, end(2)]
    assert (await generate(events, branches=2))[0] == events


async def test_a_stream_without_branches_ends_with_its_end() -> None:
    assert (await generate([start(0), end(0), "too late"], branches=0))[0] == [start(0), end(0)]


async def test_an_error_ends_all_choices() -> None:
    events: list[Any] = [start(0), end(0), NodeMissingError("gone"), end(1)]
    with pytest.raises(CriticalKVError):
        await generate(events, branches=1)


async def test_leaving_the_stream_cancels_the_turn() -> None:
    told, engine = await generate([start(0), end(0), start(1)], branches=1, most=2)
    assert told == [start(0), end(0)]
    assert engine.sequence.cancelled.is_set()


async def test_an_engine_that_says_nothing_is_given_up_with_our_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("criticalkv.services.decode.deployment.MARGIN_S", -0.9)
    with pytest.raises(DeadlineError):
        await generate([start(0)], branches=0)
