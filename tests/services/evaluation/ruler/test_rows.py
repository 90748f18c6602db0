"""RULER's own files: what is written as RULER writes it is read back as it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import essays
import pytest
from question_files import write_hotpot, write_squad

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.rows import Rows
from criticalkv.services.evaluation.ruler.rows import found_tasks, ruler_rows
from criticalkv.services.evaluation.ruler.suite import TASKS, Ruler
from criticalkv.shared.errors import ConfigError

VT = {
    "index": 4,
    "input": (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        "Here we go. There and back again.\n VAR ABCDE = 12345 Here we go.\n"
        "Question: Find all variables that are assigned the value 12345 in the text above."
    ),
    "outputs": ["ABCDE"],
    "length": 99,
    "length_w_model_temp": 99,
    "answer_prefix": " Answer: According to it, they are: ",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Example]]:
    data = write_hotpot(write_squad(tmp_path_factory.mktemp("data")))
    ruler = Ruler(essays.chat("bytes"), data=data)
    return {task: list(ruler.examples([task], [3400], 2, 5)) for task in TASKS}


def row_of(index: int, example: Example) -> dict[str, Any]:
    (question,) = example.questions
    return {
        "index": index,
        "input": example.context + question.text,
        "outputs": list(question.references),
        "length": example.length,
        "answer_prefix": question.answer_prefix,
    }


def without_field(row: dict[str, Any]) -> dict[str, Any]:
    """As older files are: the answer's prefix ends the input."""
    return {k: v for k, v in row.items() if k != "answer_prefix"} | {
        "input": row["input"] + row["answer_prefix"]
    }


def write(path: Path, rows: Sequence[object]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(folder: Path, task: str, rows: Rows = Rows()) -> list[Example]:  # noqa: B008
    return list(ruler_rows(folder, [task], rows))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("field", [True, False])
@pytest.mark.parametrize("layout", ["{}/validation.jsonl", "{}.jsonl"])
def test_written_and_read_back(
    task: str, field: bool, layout: str, made: dict[str, list[Example]], tmp_path: Path
) -> None:
    rows = [row_of(i, example) for i, example in enumerate(made[task], 7)]
    write(tmp_path / layout.format(task), rows if field else [*map(without_field, rows)])
    found = read(tmp_path, task)
    for number, (got, want) in enumerate(zip(found, made[task], strict=True), 7):
        assert (got.task, got.name, got.length) == (task, f"{task}-{number}", None)
        assert (got.context, got.questions) == (want.context, want.questions)


@pytest.mark.parametrize("task", TASKS)
def test_without_line_ends(task: str, made: dict[str, list[Example]], tmp_path: Path) -> None:
    row = without_field(row_of(0, made[task][0]))
    write(tmp_path / f"{task}.jsonl", [row | {"input": " ".join(row["input"].split())}])
    (got,), (want, _) = read(tmp_path, task), made[task]
    (asked,), (wanted,) = got.questions, want.questions
    assert asked.text == " " + " ".join(wanted.text.split())
    assert asked.answer_prefix == wanted.answer_prefix.rstrip()
    assert got.context == " ".join(want.context.split())


def test_a_row_as_ruler_writes_it(tmp_path: Path) -> None:
    write(tmp_path / "vt" / "validation.jsonl", [VT])
    (example,) = read(tmp_path, "vt")
    context, question = VT["input"].rsplit("\nQuestion", 1)  # type: ignore[attr-defined]
    assert example.context == context
    assert example.questions == (
        Question(
            "\nQuestion" + question,
            ("ABCDE",),
            "string_match_all",
            30,
            answer_prefix=" Answer: According to it, they are: ",
        ),
    )


def test_an_answer_without_any_prefix(tmp_path: Path) -> None:
    write(tmp_path / "vt.jsonl", [{k: v for k, v in VT.items() if k != "answer_prefix"}])
    (example,) = read(tmp_path, "vt")
    assert example.questions[0].answer_prefix == ""
    assert example.questions[0].text.endswith("12345 in the text above.")


BAD = {
    "not JSON": "{",
    "no object": [1],
    "no outputs": {k: v for k, v in VT.items() if k != "outputs"},
    "empty outputs": VT | {"outputs": []},
    "outputs of another type": VT | {"outputs": "ABCDE"},
    "index that is a text": VT | {"index": "4"},
    "another task": VT | {"input": "Below is a numbered list of words."},
    "cut off": VT | {"input": str(VT["input"])[:-10]},
    "a chat template": VT | {"input": f"[INST] {VT['input']} [/INST]"},
    "text before": VT | {"input": f"Well. {VT['input']}"},
    "two prefixes": VT
    | {
        "input": f"{VT['input']} Answer: According to the chain(s) of variable assignment in the "
        "text above, 1 variables are assgined the value 12345, they are: "
    },
    "text behind": VT
    | {
        "input": f"{VT['input']} Answer: According to the chain(s) of variable assignment in the "
        "text above, 1 variables are assgined the value 12345, they are: ABCDE"
    },
    "index twice": VT | {"index": 1},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_malformed_row_is_named_or_left_out(bad: object, tmp_path: Path) -> None:
    lines = [json.dumps(VT | {"index": 1}), "", bad if bad == "{" else json.dumps(bad)]
    (tmp_path / "vt.jsonl").write_text("\n".join([*lines, json.dumps(VT | {"index": 9})]))
    with pytest.raises(ConfigError, match=r"vt\.jsonl, line 3: .*--skip-bad") as caught:
        read(tmp_path, "vt")
    assert "ABCDE" not in caught.value.message  # no text of a row
    told: list[str] = []
    found = read(tmp_path, "vt", Rows(skip_bad=True, tell=told.append))
    assert [example.name for example in found] == ["vt-1", "vt-9"]
    assert len(told) == 1
    assert told[0].startswith("skipped vt.jsonl, line 3: ")


def test_missing_files_and_the_number_of_rows(tmp_path: Path) -> None:
    write(tmp_path / "vt.jsonl", [VT | {"index": i} for i in range(5)])
    assert len(list(ruler_rows(tmp_path, ["vt"], Rows(), num=3))) == 3
    with pytest.raises(ConfigError, match=r"neither cwe/validation\.jsonl nor cwe\.jsonl"):
        ruler_rows(tmp_path, ["vt", "cwe"], Rows())
    with pytest.raises(ConfigError, match="RULER has no task nope"):
        ruler_rows(tmp_path, ["nope"], Rows())


def test_tasks_that_a_folder_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no TASK\.jsonl"):
        found_tasks(tmp_path, TASKS)
    write(tmp_path / "fwe.jsonl", [])
    write(tmp_path / "vt" / "validation.jsonl", [])
    assert found_tasks(tmp_path, TASKS) == ["vt", "fwe"]
