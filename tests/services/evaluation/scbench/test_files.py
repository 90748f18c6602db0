"""Rows of the benchmark's own files, and what is said about bad ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.metrics.registry import METRICS
from criticalkv.services.evaluation.rows import Rows
from criticalkv.services.evaluation.scbench.suite import SCBench
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate

ONLY = "You should answer with only one number, no other words."
LARGEST = f"{ONLY} The largest number of the list is: "
MEDIAN = f"{ONLY} The median number of the list is: "
KV = {
    "id": 0,
    "context": 'JSON data:\n{"k1": "v1", "k2": "v2"}',
    "multi_turns": [
        {"input": 'Key: "k2"\nThe value associated with the specified key is: ', "answer": "v2"},
        {"input": 'Key: "k1"\nThe value associated with the specified key is: ', "answer": "v1"},
    ],
}
MF = {
    "id": 7,
    "context": [5, 90, 41, 2],
    "multi_turns": [{"input": LARGEST, "answer": 90}, {"input": MEDIAN, "answer": 23.0}],
}
QA = {
    "id": 3,
    "context": "Call me Ishmael.",
    "multi_turns": [
        {"input": "Who tells it?", "answer": "Ishmael"},
        {"input": "Who else?", "answer": ["nobody", "no one"]},
    ],
}
KV75 = {
    "ordered_kv_records": [["k1", "v1"], ["k2", "v2"], ["k3", "v3"]],
    "key": "k2",
    "value": "v2",
}

Read = Callable[..., list[Example]]


@pytest.fixture
def read(chat: ChatTemplate, tmp_path: Path) -> Read:
    """Read examples of one task from a file with the given rows."""

    def examples(
        task: str, file: str, rows: list[Any], turns: int = 9, num: int = 9, length: int = 4000,
        reading: Rows | None = None,
    ) -> list[Example]:  # fmt: skip
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / file).write_text("\n".join(lines))
        suite = SCBench(chat, data=tmp_path, rows=reading or Rows())
        return list(suite.examples([task], [length, 100], num, turns, seed=0))

    return examples


def test_keys_and_values(read: Read) -> None:
    (example,) = read("scbench_kv", "scbench_kv.jsonl", [KV])
    assert (example.task, example.name) == ("scbench_kv", "scbench_kv-0")
    assert example.context == (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        'JSON data:\n{"k1": "v1", "k2": "v2"}\n\n'
    )
    assert [question.references for question in example.questions] == [("v2",), ("v1",)]
    asked = 'Key: "k2"\nThe value associated with the specified key is: '
    assert example.questions[0] == Question(asked, ("v2",), "kv_match", 150)


def test_numbers(read: Read) -> None:
    (example,) = read("scbench_mf", "scbench_mf.jsonl", [MF])
    assert example.context == "[5, 90, 41, 2]\n\n"
    largest = f"What is the largest number of the list?\n\n{LARGEST}"
    median = f"What is the median number of the list?\n\n{MEDIAN}"
    assert example.questions == (
        Question(largest, ("90",), "number_match", 5),
        Question(median, ("23.0",), "number_match", 5),
    )


@pytest.mark.parametrize(
    ("number", "answer"),
    [(1e-5, "0.00001"), (1e16, "10000000000000000"), (10**400, "1" + "0" * 400)],
    ids=["small", "large", "huge"],
)
def test_any_number_can_be_judged(read: Read, number: float, answer: str) -> None:
    row = {**MF, "multi_turns": [{"input": MEDIAN, "answer": number}]}
    ((question,),) = [
        example.questions for example in read("scbench_mf", "scbench_mf.jsonl", [row])
    ]
    judge = METRICS[question.metric]
    assert [judge(answer, question), judge("7" * 5000, question)] == [1.0, 0.0]


@pytest.mark.parametrize("task", ["en_qa", "scbench_qa_eng"])
@pytest.mark.parametrize("file", ["en_qa.jsonl", "scbench_qa_eng.jsonl"])
def test_a_novel(read: Read, task: str, file: str) -> None:
    (example,) = read(task, file, [QA])
    assert example.task == "en_qa"
    assert example.context == (
        "Read the book and answer the question. Be very concise in your answer.\n\n"
        "Call me Ishmael.\n\n"
    )
    assert example.questions == (
        Question("Question: Who tells it?\nAnswer:", ("Ishmael",), "answer_match", 40),
        Question("Question: Who else?\nAnswer:", ("nobody", "no one"), "answer_match", 40),
    )


def test_lost_in_the_middle(read: Read) -> None:
    (example,) = read("kv75", "kv75_60.jsonl", [KV75])
    assert example.context.endswith('\n\nJSON data:\n{"k1": "v1", "k2": "v2", "k3": "v3"}\n\n')
    (question,) = example.questions
    assert question.text == 'Key: "k2"\nThe value associated with the specified key is: '
    assert (question.references, example.depth) == (("v2",), 0.5)
    assert [example.context[slice(*span)] for span in example.needles] == ['"k2": "v2"']


def test_the_first_turns_of_the_first_rows(read: Read) -> None:
    examples = read("scbench_kv", "scbench_kv.jsonl", [KV, KV, "{not JSON"], turns=1, num=2)
    assert [example.name for example in examples] == ["scbench_kv-0", "scbench_kv-1"]
    assert [len(example.questions) for example in examples] == [1, 1]


def test_rows_that_are_too_long_are_left_out_and_told(read: Read) -> None:
    long, told = QA | {"context": "x" * 4000}, list[str]()
    examples = read("en_qa", "en_qa.jsonl", [long, QA, long], reading=Rows(tell=told.append))
    assert [example.name for example in examples] == ["en_qa-1"]
    assert len(told) == 1
    assert "(2 of them)" in told[0]
    with pytest.raises(ConfigError, match=r"en_qa: rows of 41\d\d tokens or more") as refused:
        read("en_qa", "en_qa.jsonl", [long])
    assert refused.value.param == "lengths"


BAD = [
    ("scbench_kv", {**KV, "context": [1, 2]}, "context"),
    ("scbench_kv", {"id": 1, "context": "x"}, "multi_turns"),
    ("scbench_kv", {**KV, "multi_turns": []}, "multi_turns"),
    ("scbench_kv", {**KV, "multi_turns": [{"input": "Key", "answer": 3}]}, "answer"),
    ("scbench_kv", {**KV, "multi_turns": [{"input": "Key"}]}, "answer"),
    ("scbench_mf", {**MF, "context": "1 2 3"}, "context"),
    ("scbench_mf", {**MF, "context": [1, "2"]}, "context"),
    ("scbench_mf", {**MF, "multi_turns": [{"input": MEDIAN, "answer": "3"}]}, "answer"),
    ("scbench_mf", {**MF, "multi_turns": [{"input": MEDIAN, "answer": True}]}, "answer"),
    ("scbench_mf", {**MF, "multi_turns": [{"input": MEDIAN, "answer": math.nan}]}, "finite"),
    ("scbench_mf", {**MF, "multi_turns": [{"input": MEDIAN, "answer": -math.inf}]}, "finite"),
    ("scbench_mf", {**MF, "multi_turns": [{"input": "Largest?", "answer": 3}]}, "The … is"),
    ("en_qa", {**QA, "multi_turns": [{"input": "Who?", "answer": []}]}, "answer"),
    ("kv75", {**KV75, "value": "v3"}, "none of the records"),
    ("kv75", {**KV75, "ordered_kv_records": [["k2", "v2"], ["k2", "v3"]]}, "one key"),
    ("kv75", {"ordered_kv_records": [["k2", "v2"]], "key": "k2"}, "value"),
]
FILES = {"en_qa": "en_qa.jsonl", "kv75": "kv75_60.jsonl"}
GOOD = {"scbench_kv": KV, "scbench_mf": MF, "en_qa": QA, "kv75": KV75}


@pytest.mark.parametrize(("task", "row", "named"), BAD)
def test_a_bad_row_is_named_or_skipped(
    read: Read, task: str, row: dict[str, Any], named: str
) -> None:
    file, good = FILES.get(task, f"{task}.jsonl"), GOOD[task]
    with pytest.raises(ConfigError) as refused:
        read(task, file, [good, "", row, good])
    assert refused.value.message.startswith(f"{file}, line 3: ")
    assert named in refused.value.message
    told: list[str] = []
    rest = read(task, file, [good, "", row, good], reading=Rows(True, told.append))
    assert [example.context for example in rest] == [rest[0].context] * 2
    assert len({example.name for example in rest}) == 2
    assert len(told) == 1
    assert f"{file}, line 3: " in told[0]


@pytest.mark.parametrize(
    ("task", "said"),
    [("en_qa", "scbench_qa_eng.jsonl or en_qa.jsonl"), ("kv75", "kv75_60.jsonl"), ("x", "kv75")],
)
def test_what_is_missing_is_said_at_once(
    chat: ChatTemplate, tmp_path: Path, task: str, said: str
) -> None:
    suite = SCBench(chat, data=tmp_path, rows=Rows())
    with pytest.raises(ConfigError, match=said):
        suite.examples(["retr_kv", task], [1000], 1, 1, 0)


def test_there_is_a_turn(chat: ChatTemplate, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="turns"):
        SCBench(chat, data=tmp_path, rows=Rows()).examples(["retr_kv"], [1000], 1, 0, 0)
