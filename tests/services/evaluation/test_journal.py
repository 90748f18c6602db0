"""A journal outlives its writer, and is not taken for another run's."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from scripted_answers import said, scripted_examples

from criticalkv.services.evaluation.column import Column, columns
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.journal import Journal
from criticalkv.services.evaluation.record import Record
from criticalkv.shared.errors import ConfigError

SETTINGS = {"command": "test", "model": "abc", "seed": 0}
COLUMNS = columns(["snapkv"], "0.5")
EXAMPLES = scripted_examples()


def record(example: Example, column: Column) -> Record:
    turns = range(len(example.questions))
    return Record.of(example, column, tuple(said(example, column.cell, t) for t in turns), 1.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of four cells."""
    path = tmp_path / "folder" / "run.jsonl"
    with Journal(path, SETTINGS) as journal:
        for example in EXAMPLES[:2]:
            for column in COLUMNS:
                journal.add(record(example, column))
    return path


def test_what_was_added_is_found_again(path: Path) -> None:
    with Journal(path, SETTINGS) as journal:
        for example in EXAMPLES[:2]:
            for column in COLUMNS:
                assert journal.find(example, column) == record(example, column)
        assert journal.find(EXAMPLES[2], COLUMNS[0]) is None
        assert journal.find(EXAMPLES[0], columns(["snapkv"], "0.4")[1]) is None
        assert journal.find(EXAMPLES[0], columns(["adakv"], "0.5")[1]) is None


def test_lines_are_plain(path: Path) -> None:
    first, second, *_ = map(json.loads, path.read_text().splitlines())
    assert first == {"format": 1, **SETTINGS}
    example = EXAMPLES[0]
    answers = [dataclasses.asdict(said(example, COLUMNS[0].cell, turn)) for turn in (0, 1)]
    right = [answer["text"] == f"It is fact {turn}." for turn, answer in enumerate(answers)]
    turns = [
        {k: v for k, v in answer.items() if k != "token_ids"} | {"score": float(is_right)}
        for answer, is_right in zip(answers, right, strict=True)
    ]
    assert second.pop("digest") == record(example, COLUMNS[0]).digest
    assert second == {
        "name": "seek-100-0",
        "task": "seek",
        "length": 100,
        "depth": 0.0,
        "policy": "full",
        "canonical": "full",
        "tier": "1",
        "below": [],
        "turns": turns,
        "likelihood": None,
        "seconds": 1.5,
    }


def test_two_spellings_of_a_policy_are_one(path: Path) -> None:
    spelled = columns(["window+uniform+plain:kernel=7"], "0.50")
    assert spelled[1].cell.policy == "window+uniform+plain:kernel=7"
    with Journal(path, SETTINGS) as journal:
        assert journal.find(EXAMPLES[0], spelled[1]) is not None


@pytest.mark.parametrize("torn", [1, 40, 10_000])
def test_a_torn_last_line_is_cut_off(path: Path, torn: int) -> None:
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    before = whole[: -len(last)]
    path.write_bytes(before + last[: min(torn, len(last) - 1)])
    with Journal(path, SETTINGS) as journal:
        assert path.read_bytes() == before
        assert journal.find(EXAMPLES[1], COLUMNS[0]) is not None
        assert journal.find(EXAMPLES[1], COLUMNS[1]) is None
        journal.add(record(EXAMPLES[1], COLUMNS[1]))
    assert path.read_bytes() == whole


@pytest.mark.parametrize("left", [0, 1, 20, -1])
def test_a_torn_first_line_is_written_anew(path: Path, left: int) -> None:
    header = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(header[:left])
    Journal(path, SETTINGS).close()
    assert path.read_bytes() == header


@pytest.mark.parametrize(
    "content", [b"# Notes", b"# Notes\nof mine\n", b"[1]\n", b"{}\n", b"\xff\n"]
)
def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="notes is no journal"):
        Journal(path, SETTINGS)
    assert path.read_bytes() == content


def test_another_file_with_a_format_is_left_alone(tmp_path: Path) -> None:
    path, content = tmp_path / "report.json", b'{"format": 1, "rows": [1, 2]}\n'
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="other settings"):
        Journal(path, SETTINGS)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"seed": 1}, "seed 0 there, 1 here"),
        ({"model": "abd"}, 'model "abc" there, "abd" here'),
        ({"command": "niah", "seed": 2}, 'command "test" there, "niah" here; seed 0'),
        ({"turns": 5}, "turns null there, 5 here"),
    ],
)
def test_other_settings_are_named(path: Path, other: dict[str, object], says: str) -> None:
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"other settings \({says}.*give another --out"):
        Journal(path, SETTINGS | other)
    assert path.read_bytes() == before


def test_a_setting_that_is_gone_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match="seed 0 there, null here"):
        Journal(path, {k: v for k, v in SETTINGS.items() if k != "seed"})


@pytest.mark.parametrize("line", [b"{}\n", b"x\n", b"\n"])
def test_a_damaged_line_is_named(path: Path, line: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(ConfigError, match="line 3 is damaged"):
        Journal(path, SETTINGS)


def test_another_example_of_that_name_is_refused(path: Path) -> None:
    first = EXAMPLES[0]
    question = dataclasses.replace(first.questions[1], references=("another",))
    with Journal(path, SETTINGS) as journal:
        for other in (
            dataclasses.replace(first, context="Another."),
            dataclasses.replace(first, questions=(first.questions[0], question)),
        ):
            with pytest.raises(ConfigError, match="seek-100-0 was another text there"):
                journal.find(other, COLUMNS[0])


def test_two_writers_are_one_too_many(path: Path) -> None:
    with (
        Journal(path, SETTINGS),
        pytest.raises(ConfigError, match="another run is writing"),
    ):
        Journal(path, SETTINGS)
    Journal(path, SETTINGS).close()


def test_a_line_is_on_disk_before_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with Journal(path, SETTINGS) as journal:
        sizes = []
        for example in EXAMPLES[3:6]:
            journal.add(record(example, COLUMNS[0]))
            sizes.append(path.stat().st_size)
    assert synced == sizes


def test_a_journal_without_a_cell_is_begun_anew(tmp_path: Path) -> None:
    """Torn first cells too; but nothing else that has one line."""
    path, other = tmp_path / "run.jsonl", SETTINGS | {"seed": 1}
    Journal(path, SETTINGS).close()
    path.write_bytes(path.read_bytes() + b'{"name":"seek-1')
    with Journal(path, other) as journal:
        journal.add(record(EXAMPLES[0], COLUMNS[0]))
    header, _ = path.read_text().splitlines()
    assert json.loads(header) == {"format": 1, **other}
    with pytest.raises(ConfigError, match="other settings"):
        Journal(path, SETTINGS)


def test_quantized_values_go_with_the_tiers_below_them(tmp_path: Path) -> None:
    raw, quantized = "snapkv", "snapkv:codec=int8"
    few, more = (
        columns([raw, quantized], tiers, full=False) for tiers in ("0.1,0.5", "0.1,0.3,0.5")
    )
    assert [column.below for column in more] == [(), (), (), (), ("0.1",), ("0.1", "0.3")]
    path = tmp_path / "run.jsonl"
    with Journal(path, SETTINGS) as journal:
        for column in few:
            journal.add(record(EXAMPLES[0], column))
    with Journal(path, SETTINGS) as journal:
        known = [journal.find(EXAMPLES[0], column) is not None for column in more]
        assert known == [True, False, True, True, False, False]
        assert [journal.find(EXAMPLES[0], column) for column in few] == [
            record(EXAMPLES[0], column) for column in few
        ]
