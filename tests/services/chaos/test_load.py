"""The load's rules: how much, how fast, whose handles, and the same for the same seed."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from criticalkv.services.chaos.call import Caller
from criticalkv.services.chaos.history import History, Record
from criticalkv.services.chaos.load import Budget, Client, Over
from criticalkv.services.chaos.world import POLICIES, Held, World, document


def spent(budget: Budget) -> int:
    count = 0
    while True:
        try:
            budget.take()
        except Over:
            return count
        count += 1


def test_no_more_requests_than_asked_by_all_together() -> None:
    budget, counts = Budget(300, None), list[int]()
    threads = [threading.Thread(target=lambda: counts.append(spent(budget))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == 300


def test_the_time_ends_it_too() -> None:
    assert spent(Budget(None, time.monotonic() - 1)) == 0
    stopped = Budget(None, None)
    stopped.take()
    stopped.stop()
    assert spent(stopped) == 0


def test_a_pace_is_kept() -> None:
    begun = time.monotonic()
    assert spent(Budget(6, None, pace_s=0.05)) == 6
    assert time.monotonic() - begun >= 0.25


def test_handles_are_a_tenants_own() -> None:
    world, drawn = World("m", [document(1)], POLICIES), random.Random(1)
    assert world.foreign("north", drawn) is None
    held = Held("ctx_1", 3.0)
    world.hold("south", 0, POLICIES[0], held)
    assert world.held("north", 0, POLICIES[0]) is None
    assert world.held("south", 0, POLICIES[0]) == held
    assert world.foreign("north", drawn) == held
    assert world.foreign("south", drawn) is None
    world.forget("south", 0, POLICIES[0], Held("ctx_2", 4.0))
    assert world.held("south", 0, POLICIES[0]) == held
    world.forget("south", 0, POLICIES[0], held)
    assert world.held("south", 0, POLICIES[0]) is None


class Echo(Caller):
    """Answers everything at once, the same way."""

    def __init__(self, sent: list[Any]) -> None:
        self._sent = sent

    def send(
        self, record: Record, method: str, path: str, body: Any = None, **more: Any
    ) -> tuple[Record, dict[str, Any]]:
        self._sent.append((record.tenant, method, path, body, more))
        stream = isinstance(body, dict) and bool(body.get("stream"))
        answer: dict[str, Any] = {"text": "abc", "tier": "0.4", "handle": "resp_1"}
        return (
            Record(
                **{
                    **record.__dict__,
                    **answer,
                    "status": 200,
                    "complete": not stream,
                    "done": stream,
                    "finish": "length",
                    "published": True,
                }
            ),
            {"id": "ctx_1"},
        )


def drawn(folder: Path, seed: int, number: int = 0) -> list[Any]:
    sent: list[Any] = []
    callers: dict[str, Caller] = {name: Echo(sent) for name in ("north", "south")}
    world = World("m", [document(n) for n in range(3)], POLICIES)
    history = History(folder / f"{seed}-{number}-{random.random()}.jsonl")
    client = Client(
        number, "north", callers, Echo(sent), world, history, Budget(400, None), seed, lambda: 0.0
    )
    # Threads of one client may change places: this one sends nothing at once.
    client._at_once = lambda *_: None  # type: ignore[method-assign]
    client.run()
    history.close()
    return sent


def test_one_seed_is_one_load(tmp_path: Path) -> None:
    assert drawn(tmp_path, 1) == drawn(tmp_path, 1)
    assert drawn(tmp_path, 1) != drawn(tmp_path, 2)
    assert drawn(tmp_path, 1) != drawn(tmp_path, 1, number=1)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/contexts"),
        ("GET", "/v1/contexts"),
        ("DELETE", "/v1/contexts/ctx_1"),
        ("POST", "/v1/contexts/ctx_1/pin"),
    ],
)
def test_every_route_is_used(tmp_path: Path, method: str, path: str) -> None:
    assert any(sent[1:3] == (method, path) for sent in drawn(tmp_path, 1))


def test_the_load_is_mixed(tmp_path: Path) -> None:
    bodies = [body for *_, body, _ in drawn(tmp_path, 1) if isinstance(body, dict)]
    extensions = [body.get("criticalkv", {}) for body in bodies]
    assert {bool(body.get("stream")) for body in bodies} == {True, False}
    assert len({extension.get("read_tier") for extension in extensions}) >= 6
    assert {*POLICIES} <= {extension.get("policy") for extension in extensions}
    assert any("seed" in body for body in bodies)
    assert any("stop" in body for body in bodies)
    assert any(body.get("previous_response_id") for body in bodies)
    assert any(len(body.get("messages", ())) >= 3 for body in bodies)
