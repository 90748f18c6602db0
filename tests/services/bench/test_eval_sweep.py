"""The sweep's figures are exact, and what it cannot run is said before anything runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import make_model
from typer.testing import CliRunner

from criticalkv.services import cli
from criticalkv.services.bench import eval_sweep
from criticalkv.services.bench.eval_sweep import MEANING, Sweep, check_presses, run
from criticalkv.services.bench.kvpress_peer import PeerAnswer, Ready
from criticalkv.services.evaluation.answer import Answer, Answers, Cell
from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.local_answerer import LocalAnswerer
from criticalkv.services.evaluation.prompt import Prompt, first_prompt
from criticalkv.shared.config import Config, ModelConfig
from criticalkv.shared.errors import ConfigError, PolicyError
from criticalkv.shared.report import Report

MODEL = make_model(num_layers=1)
CELLS = [Cell("snapkv", "0.1"), Cell("adakv-kvpress", "0.5")]
EXAMPLES = [
    Example("vt", f"vt-{n}", f"It is fact {n}.", (Question("\n\n?", ("fact",), "qa_f1", 8),))
    for n in range(3)
]
PRESSES = ("snapkv", "criticalkv", "adakv", "criticaladakv")


class World:
    """Our clock and our answers, which take 2, 4, 8 s for an example; theirs 3 s for a cell."""

    def __init__(self) -> None:
        self.at = 50.0
        self.turns: list[str] = []
        self.asked: list[tuple[Prompt, int, str, float]] = []

    def clock(self) -> float:
        return self.at

    def check(self, cells: Sequence[Cell]) -> None:
        pass

    def close(self) -> None:
        pass

    def answer(self, example: Example, cells: Iterable[Cell]) -> Iterator[tuple[Cell, Answers]]:
        """The last cell first; right in the first one only."""
        self.turns.append("ours")
        self.at += 2.0 ** (1 + EXAMPLES.index(example))
        for cell in list(cells)[::-1]:
            text = "fact" if cell == CELLS[0] else "none"
            yield cell, (Answer(text, "stop", cell.tier, 0.1, 1000),)

    def theirs(self, prompt: Prompt, max_tokens: int, press: str, kept: float) -> PeerAnswer:
        """Right in the second cell of the third example only."""
        self.turns.append(press)
        self.asked.append((prompt, max_tokens, press, kept))
        right = press == "adakv" and len(self.asked) > 4
        self.at += 1000  # of ours, nothing of this counts
        return PeerAnswer("fact" if right else "none", 3.0)


def swept(*, alone: bool = False) -> tuple[World, Report]:
    world, report = World(), Report("eval-sweep", False, dict.fromkeys(MEANING), MEANING)
    sweep = Sweep(MODEL.chat, world, CELLS, report, world.clock)
    peer: Any = None if alone else SimpleNamespace(answer=world.theirs)
    for example in EXAMPLES:
        sweep.take(example, peer)
    return world, report


def test_figures_of_a_sweep_are_exact() -> None:
    _, report = swept()
    assert report.samples["seconds"] == {"ours": [2.0, 4.0, 8.0], "kvpress": [6.0, 6.0, 6.0]}
    assert report.headline == {
        "speedup": 1.5,  # the median of 3, 1.5 and 0.75
        "cases_per_minute": 60 * 6 / 14,
        "kvpress_cases_per_minute": 60 * 6 / 18,
        "score_minus_kvpress": pytest.approx(100 * (3 - 1) / 6),
    }
    assert report.samples["scores"] == {
        "ours": {"snapkv@0.1": [100] * 3, "adakv-kvpress@0.5": [0] * 3},
        "kvpress": {"snapkv@0.1": [0] * 3, "adakv-kvpress@0.5": [0, 0, 100]},
    }
    assert report.details["scores"]["kvpress"]["adakv-kvpress@0.5"]["cases"] == 3


def test_both_take_turns_and_get_the_same_cells() -> None:
    world, _ = swept()
    theirs = ["snapkv", "adakv"]  # without what says whose rules ours has
    assert world.turns == ["ours", *theirs, *theirs, "ours", "ours", *theirs]
    first = first_prompt(MODEL.chat, EXAMPLES[0], EXAMPLES[0].questions[0], "context-only")
    assert world.asked[:2] == [(first, 8, "snapkv", 0.1), (first, 8, "adakv", 0.5)]


def test_ours_alone_is_not_compared() -> None:
    world, report = swept(alone=True)
    assert world.turns == ["ours"] * 3
    assert report.headline.pop("cases_per_minute") == 60 * 6 / 14
    assert set(report.headline.values()) == {None}


def test_presses_are_those_that_kvpress_says_it_has() -> None:
    check_presses(CELLS, PRESSES)
    check_presses([Cell("snapkv", "0.1"), Cell("snapkv", "0.5")], PRESSES)
    with pytest.raises(ConfigError, match="kvpress has no kvzip here, only snapkv, "):
        check_presses([*CELLS, Cell("kvzip", "0.1")], PRESSES)
    with pytest.raises(ConfigError, match="adakv-kvpress and adakv are one press"):
        check_presses([*CELLS, Cell("adakv", "0.1")], PRESSES)


# ---------------------------------------------------------------- the whole command


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sweep") / "tiny"
    MODEL.model.save_pretrained(folder)
    MODEL.tokenizer.save_pretrained(folder)
    return str(folder)


def measured(files: str, **more: Any) -> Report:
    given: dict[str, Any] = {
        "quick": False,
        "threads": 1,
        "kvpress_python": None,
        "tiers": "0.5",
        "examples": 1,
        "length": 1000,
        "tasks": ["niah_single_1"],
        "policies": ["snapkv"],
    }
    return run(Config(model=ModelConfig(path=files)), **given | more)


def peer_that(folder: Path, ready: Ready) -> Path:
    """An interpreter whose program is ready, and answers nothing to whatever it is asked."""
    told = json.dumps(asdict(ready)), json.dumps({"answer": "?", "seconds": 2.0})
    (folder / "peer.py").write_text(
        f"import sys\nprint({told[0]!r}, flush=True)\n"
        f"for _ in sys.stdin: print({told[1]!r}, flush=True)\n"
    )
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {folder / 'peer.py'}\n")
    python.chmod(0o755)
    return python


def test_a_report_says_what_ran_where(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[LocalAnswerer] = []
    close = LocalAnswerer.close
    monkeypatch.setattr(LocalAnswerer, "close", lambda self: closed.append(self) or close(self))
    ready = Ready(PRESSES, "cpu", "float32", {"kvpress": "0.5.5", "torch": "2"})
    parts: list[int] = []
    report = measured(
        files,
        kvpress_python=peer_that(tmp_path, ready),
        policies=["snapkv-kvpress", "window+uniform+plain:preset=kvpress", "adakv"],
        tiers="0.50,0.5, 0.2",
        tasks=["niah_single_1", "niah_single_1"],
        examples=2,
        so_far=lambda report: parts.append(len(report.samples["seconds"]["ours"])),
    )
    report.write(tmp_path / "it.json")
    details = report.details
    assert (details["model"], details["device"], details["dtype"]) == ("tiny", "cpu", "float32")
    assert details["policies"] == ["snapkv-kvpress", "adakv"]
    assert details["tiers"] == ["0.2", "0.5"]
    assert details["kvpress"]["versions"]["torch"] == "2"
    assert details["kvpress"]["dtype"] == "float32"
    assert len(set(details["examples"])) == 2
    assert report.samples["seconds"]["kvpress"] == [8.0, 8.0]  # four cells, each of them once
    assert parts == [1, 2]
    assert len(closed) == 1


def test_what_cannot_be_asked_is_refused_before_anything_is(
    files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "take", lambda *_: pytest.fail("something was asked"))
    with pytest.raises(ConfigError, match="--tiers"):
        measured(files, tiers="0.2,")
    with pytest.raises(PolicyError):
        measured(files, policies=["nonsense"])
    with pytest.raises(PolicyError, match="profile"):
        measured(files, policies=[f"window+headkv+plain:profile={'0' * 64}"])
    python = peer_that(tmp_path, Ready(("snapkv",), "cpu", "float32", {}))
    with pytest.raises(ConfigError, match="kvpress has no adakv"):
        measured(files, policies=["snapkv", "adakv"], kvpress_python=python)


def test_the_command_hands_everything_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def fake(_: Config, **given: Any) -> Report:
        asked.update(given)
        return Report("eval-sweep", False, {}, {})

    monkeypatch.setattr(eval_sweep, "run", fake)
    arguments = ["bench", "eval-sweep", "--json", str(tmp_path / "it.json")]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert (asked["tiers"], asked["kvpress_python"]) == ("0.05,0.1,0.2,0.3,0.4,0.6", None)
    assert asked["policies"] == eval_sweep.POLICIES
    more = ["--policy", "snapkv-kvpress", "--policy", "adakv", "--tiers", "0.2,", "--task", "vt"]
    assert CliRunner().invoke(cli.app, [*arguments, *more]).exit_code == 0
    assert asked["policies"] == ["snapkv-kvpress", "adakv"]
    assert (asked["tiers"], asked["tasks"]) == ("0.2,", ["vt"])
