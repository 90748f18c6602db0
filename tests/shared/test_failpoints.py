"""Failpoints: off they are nothing; on they do what they say, the same for the same seed."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from criticalkv.shared import failpoints
from criticalkv.shared.errors import ConfigError, DeadlineError, StoreUnavailableError
from criticalkv.shared.failpoints import PLACES, VARIABLE, Failpoints

ROOT = Path(__file__).resolve().parents[2]
DATA = bytes(range(256))
CALLS = {"hit", "passed", "through"}


def places_in_code() -> Iterator[str]:
    """Yield the places that the code passes, by the syntax tree."""
    for path in [*ROOT.glob("services/**/*.py"), *ROOT.glob("shared/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            if name in CALLS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def test_every_place_is_in_the_code_and_every_one_there_is_known() -> None:
    assert set(places_in_code()) == set(PLACES)


def turn_on(monkeypatch: pytest.MonkeyPatch, text: str) -> Failpoints:
    made = Failpoints.parse(text)
    assert made is not None
    monkeypatch.setattr(failpoints, "_active", made)
    return made


def test_off_nothing_happens() -> None:
    code = """
import asyncio
from criticalkv.shared import failpoints
assert failpoints._active is None
for name in failpoints.PLACES:
    failpoints.hit(name)
    asyncio.run(failpoints.passed(name))
data = bytes(9)
assert failpoints.through("store.segment.read", data) is data
"""
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_environment_turns_them_on() -> None:
    code = "from criticalkv.shared import failpoints; failpoints.hit('client.call')"
    environment = {**os.environ, VARIABLE: "client.call=error:1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "StoreUnavailableError: failpoint client.call" in done.stderr


def test_a_place_without_a_fault_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_on(monkeypatch, "client.call=error:1")
    failpoints.hit("decode.step")
    assert failpoints.through("store.segment.read", DATA) is DATA


def test_error_raises_the_type_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_on(monkeypatch, "client.call=error:1;store.segment.read=error")
    with pytest.raises(StoreUnavailableError, match=r"client\.call"):
        failpoints.hit("client.call")
    with pytest.raises(DeadlineError):
        failpoints.hit("client.call", DeadlineError)
    with pytest.raises(StoreUnavailableError):
        asyncio.run(failpoints.passed("client.call"))
    with pytest.raises(StoreUnavailableError):
        failpoints.through("store.segment.read", DATA)


def test_delay_waits_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_on(monkeypatch, "client.call=delay:1:0.05;store.segment.read=delay:1:0.05")
    before = time.monotonic()
    failpoints.hit("client.call")
    asyncio.run(failpoints.passed("client.call"))
    assert failpoints.through("store.segment.read", DATA) == DATA
    assert time.monotonic() - before >= 0.15


def test_flip_changes_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_on(monkeypatch, "store.segment.read=flip:1;seed=3")
    for _ in range(20):
        out = failpoints.through("store.segment.read", DATA)
        differing = int.from_bytes(out, "big") ^ int.from_bytes(DATA, "big")
        assert len(out) == len(DATA)
        assert differing.bit_count() == 1


def test_truncate_cuts_in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_on(monkeypatch, "client.get.frame=truncate:1")
    assert failpoints.through("client.get.frame", DATA) == DATA[:128]
    assert failpoints.through("client.get.frame", b"") == b""


def test_exit_is_a_kill_that_the_journal_knows(tmp_path: Path) -> None:
    journal = tmp_path / "faults.jsonl"
    code = "from criticalkv.shared import failpoints; failpoints.hit('prefill.layer')"
    environment = {**os.environ, VARIABLE: f"prefill.layer=exit:1;journal={journal}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment)
    assert done.returncode == -signal.SIGKILL
    (line,) = map(json.loads, journal.read_text().splitlines())
    assert (line["place"], line["kind"]) == ("prefill.layer", "exit")


def drawn(text: str, count: int = 400) -> list[str | None]:
    made = Failpoints.parse(text)
    assert made is not None
    return [fault and fault.kind for fault in (made.draw("client.call") for _ in range(count))]


def test_one_seed_draws_the_same_and_another_does_not() -> None:
    text = "client.call=delay:0.3:0"
    assert drawn(f"{text};seed=5") == drawn(f"{text};seed=5")
    assert drawn(f"{text};seed=5") != drawn(f"{text};seed=6")


def test_several_faults_of_a_place_share_its_draws() -> None:
    kinds = drawn("client.call=delay:0.2:0;client.call=error:0.3;seed=1", 4000)
    assert 0.15 < kinds.count("delay") / 4000 < 0.25
    assert 0.25 < kinds.count("error") / 4000 < 0.35


def test_counts_tell_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    made = turn_on(monkeypatch, "client.call=delay:1:0;decode.step=delay:0:0")
    for _ in range(3):
        failpoints.hit("client.call")
        failpoints.hit("decode.step")
    assert made.counts == {"client.call": 3}


@pytest.mark.parametrize("text", ["", " ", ";;", "seed=4", "journal=/nowhere"])
def test_without_a_fault_they_are_off(text: str) -> None:
    assert Failpoints.parse(text) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere=error:1", "no such failpoint"),
        ("client.call=burn:1", "kind must be one of"),
        ("client.call=error:2", "probability must be"),
        ("client.call=error:-1", "probability must be"),
        ("client.call=error:nan", "probability must be"),
        ("client.call=error:x", "could not convert"),
        ("client.call=delay:1:inf", "argument not negative"),
        ("client.call=delay:1:1:1", "expected kind"),
        ("client.call=flip:1", "no data pass there"),
        ("prefill.layer=truncate:1", "no data pass there"),
        ("client.call", "kind must be one of"),
        ("client.call=error:0.6;client.call=delay:0.6", "more than 1"),
        ("seed=x", "invalid literal"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Failpoints.parse(text)
    assert caught.value.param == VARIABLE
