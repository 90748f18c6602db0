"""A run that was stopped goes on, asks only what is left, and comes to the same table."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted_answers import Scripted, scripted_examples

from criticalkv.services.evaluation.column import columns
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.journal import Journal
from criticalkv.services.evaluation.record import Record
from criticalkv.services.evaluation.results import results
from criticalkv.services.evaluation.run import run
from criticalkv.services.evaluation.table import show, table
from criticalkv.shared.errors import ConfigError, ContextLengthError, CriticalKVError, PolicyError

SETTINGS = {"command": "test"}
COLUMNS = columns(["snapkv", "criticaladakv"], "0.1,0.4")
EXAMPLES = scripted_examples()
CELLS = len(EXAMPLES) * len(COLUMNS)
SUPPORT = Path(__file__).parents[2] / "support"
KILLED = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(SUPPORT)!r})
from scripted_answers import Scripted, scripted_examples
from criticalkv.services.evaluation.column import columns
from criticalkv.services.evaluation.journal import Journal
from criticalkv.services.evaluation.run import run
with Journal(Path(sys.argv[1]), {SETTINGS}) as journal:
    asked = Scripted(after=int(sys.argv[2]))
    run(scripted_examples(), columns(["snapkv", "criticaladakv"], "0.1,0.4"), asked.answer, journal)
"""


class Stopped(Exception):
    pass


def stop() -> None:
    raise Stopped


def ask(path: Path, scripted: Scripted, **more: Any) -> list[Record]:
    with Journal(path, SETTINGS) as journal:
        return run(EXAMPLES, COLUMNS, scripted.answer, journal, **more)


def shown(records: list[Record]) -> str:
    """The table as it is printed to a file."""
    console = Console(record=True, quiet=True)
    show(console, table(results(records, COLUMNS), "score", "a run"))
    return console.export_text()


def untimed(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """Journal and table of a run that nothing stopped."""
    path = tmp_path_factory.mktemp("whole") / "run.jsonl"
    scripted = Scripted()
    records = ask(path, scripted)
    assert len(records) == len(scripted.asked) == CELLS == 60
    return untimed(path), shown(records)


@pytest.mark.parametrize("after", [0, 1, 7, 59])
def test_a_stopped_run_goes_on(
    tmp_path: Path, whole: tuple[list[dict[str, Any]], str], after: int
) -> None:
    path, before = tmp_path / "run.jsonl", Scripted(after=after, stop=stop)
    with pytest.raises(Stopped):
        ask(path, before)
    path.write_bytes(path.read_bytes() + b'{"name":"seek-1')  # torn
    rest = Scripted()
    records = ask(path, rest)
    assert len(before.asked) == after
    assert set(rest.asked).isdisjoint(before.asked)
    assert len(rest.asked) == CELLS - after
    assert untimed(path) == whole[0]
    assert shown(records) == whole[1]


def test_a_killed_process_goes_on(tmp_path: Path, whole: tuple[list[dict[str, Any]], str]) -> None:
    path = tmp_path / "run.jsonl"
    for after in (8, 17):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(path), str(after)], timeout=120, check=False
        )
        assert done.returncode == -signal.SIGKILL
    assert len(path.read_text().splitlines()) == 1 + 8 + 17
    rest = Scripted()
    records = ask(path, rest)
    assert len(rest.asked) == CELLS - 25
    assert untimed(path) == whole[0]
    assert shown(records) == whole[1]


def test_two_runs_are_alike_whatever_order_answers_come_in(
    tmp_path: Path, whole: tuple[list[dict[str, Any]], str]
) -> None:
    records = ask(tmp_path / "run.jsonl", Scripted(reverse=True))
    assert untimed(tmp_path / "run.jsonl") == whole[0]
    assert shown(records) == whole[1]


def test_lines_may_stand_in_any_order(
    tmp_path: Path, whole: tuple[list[dict[str, Any]], str]
) -> None:
    path = tmp_path / "run.jsonl"
    ask(path, Scripted())
    header, *lines = path.read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    path.write_text("".join([header, *lines]))
    nothing = Scripted()
    assert shown(ask(path, nothing)) == whole[1]
    assert nothing.asked == []


def test_answers_that_came_early_are_kept_when_it_stops(tmp_path: Path) -> None:
    """Cells whose predecessors are not answered yet wait; not beyond an error."""
    path = tmp_path / "run.jsonl"
    with pytest.raises(Stopped):
        ask(path, Scripted(reverse=True, after=8, stop=stop))
    kept = [(line["name"], line["policy"], line["tier"]) for line in untimed(path)[1:]]
    first, second = EXAMPLES[0].name, EXAMPLES[1].name
    last = [(c.cell.policy, c.cell.tier) for c in COLUMNS]
    assert kept == [(first, *cell) for cell in last] + [(second, *cell) for cell in last[2:]]


def test_policies_tiers_and_examples_may_grow(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first, grown = columns(["snapkv"], "0.4"), COLUMNS
    with Journal(path, SETTINGS) as journal:
        run(EXAMPLES[:2], first, Scripted().answer, journal)
    more = Scripted()
    with Journal(path, SETTINGS) as journal:
        records = run(EXAMPLES[:3], grown, more.answer, journal)
    assert len(more.asked) == 3 * 5 - 2 * 2
    assert [(r.name, r.policy, r.tier) for r in records] == [
        (example.name, column.cell.policy, column.cell.tier)
        for example in EXAMPLES[:3]
        for column in grown
    ]


def test_records_are_called_as_policies_are_now(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Journal(path, SETTINGS) as journal:
        run(EXAMPLES[:1], columns(["window+uniform+plain"], "0.4"), Scripted().answer, journal)
    nothing = Scripted()
    with Journal(path, SETTINGS) as journal:
        records = run(EXAMPLES[:1], columns(["snapkv"], "0.4"), nothing.answer, journal)
    assert [record.policy for record in records] == ["full", "snapkv"]
    assert nothing.asked == []


def test_progress_counts_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for after in (7, None):
        done: list[int] = []
        scripted = Scripted(after=after, stop=stop)
        if after is None:
            ask(path, scripted, advance=done.append)
            assert sum(done) == CELLS
        else:
            with pytest.raises(Stopped):
                ask(path, scripted, advance=done.append)
            assert sum(done) == after


@pytest.mark.parametrize("kind", [ContextLengthError, CriticalKVError])
def test_an_error_names_its_example(tmp_path: Path, kind: type[CriticalKVError]) -> None:
    def fail() -> None:
        raise kind("too much", param="lengths")

    with pytest.raises(kind, match=r"^seek-100-1: too much$") as caught:
        ask(tmp_path / "run.jsonl", Scripted(after=6, stop=fail))
    assert caught.value.param == "lengths"
    assert len(untimed(tmp_path / "run.jsonl")) == 1 + 6


def test_an_answer_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    with (
        Journal(tmp_path / "run.jsonl", SETTINGS) as journal,
        pytest.raises(CriticalKVError, match="seek-100-0: 5 cells have no answer"),
    ):
        run(EXAMPLES, COLUMNS, lambda _example, _cells: iter(()), journal)


def test_columns() -> None:
    def cells(*given: Any, **more: Any) -> list[tuple[str, str]]:
        return [(c.cell.policy, c.cell.tier) for c in columns(*given, **more)]

    assert cells(["snapkv"], "0.4, 0.05,.40") == [
        ("full", "1"),
        ("snapkv", "0.05"),
        ("snapkv", "0.4"),
    ]
    assert cells(["snapkv"], "1", full=False) == [("snapkv", "1")]
    assert cells(["snapkv", "full"], "1", full=False) == [("snapkv", "1"), ("full", "1")]
    # Two spellings are one; a stepwise policy has one tier.
    assert cells(["snapkv", "window+uniform+plain"], "0.1", full=False) == [("snapkv", "0.1")]
    stepwise = "criticaladakv:interval=64,keep=0.5"
    assert cells([stepwise], "0.1,0.2") == [("full", "1"), (stepwise, "1")]


@pytest.mark.parametrize("tiers", ["", "0", "1.5", "x", "0.1,,0.2", "nan"])
def test_tiers_without_sense_are_refused(tiers: str) -> None:
    with pytest.raises(CriticalKVError, match="--tiers"):
        columns(["snapkv"], tiers)


def test_policies_without_sense_are_refused() -> None:
    with pytest.raises(PolicyError):
        columns(["snapkv", "snapvk"], "0.1")


def test_names_and_depths_of_examples_stay(tmp_path: Path) -> None:
    records = ask(tmp_path / "run.jsonl", Scripted())
    by_name: dict[str, Example] = {example.name: example for example in EXAMPLES}
    for record in records:
        example = by_name[record.name]
        assert (record.task, record.length, record.depth) == (
            example.task,
            example.length,
            example.depth,
        )


def test_another_example_is_refused_before_any_is_asked(tmp_path: Path) -> None:
    path, last = tmp_path / "run.jsonl", EXAMPLES[-1]
    with Journal(path, SETTINGS) as journal:
        run([last], COLUMNS, Scripted().answer, journal)
    fewer = dataclasses.replace(last, questions=last.questions[:1])
    nothing = Scripted()
    with (
        Journal(path, SETTINGS) as journal,
        pytest.raises(ConfigError, match=f"{last.name} was another text there: .* its turns"),
    ):
        run([*EXAMPLES[:-1], fewer], COLUMNS, nothing.answer, journal)
    assert nothing.asked == []
