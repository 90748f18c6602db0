"""Rows become examples, from a folder or from LongBench's archive."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from tiny_models import byte_tokenizer

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.longbench import source
from criticalkv.services.evaluation.longbench.suite import TASKS, LongBench
from criticalkv.services.evaluation.metrics.registry import METRICS
from criticalkv.services.evaluation.rows import Rows
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate

ANSWERS = {
    "trec": ["City"],
    "passage_count": ["7"],
    "passage_retrieval_en": ["Paragraph 7"],
}


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer())


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(source, "hf_hub_download", offline)
    monkeypatch.delenv("CRITICALKV_DATA", raising=False)


Suite = Callable[..., LongBench]


@pytest.fixture
def suite(chat: ChatTemplate, tmp_path: Path) -> Suite:
    def make(rows: Rows | None = None, max_positions: int = 100_000, **more: Any) -> LongBench:
        options = {"data": tmp_path, "rows": rows or Rows(), **more}
        return LongBench(chat, max_positions, **options)

    return make


def row(task: str, number: int = 0, **more: Any) -> dict[str, Any]:
    """A row in LongBench's format."""
    return {
        "input": f"Question {number}?",
        "context": f"Context {number} of {task}.",
        "answers": ANSWERS.get(task, ["An answer", "Another"]),
        "length": 4,
        "dataset": task,
        "language": "en",
        "all_classes": ["City", "Food"] if task == "trec" else None,
        "_id": f"{number:048x}",
        **more,
    }


def lines(rows: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> str:
    return "".join(json.dumps(item) + "\n" for item in rows)


def test_every_dataset_is_read_and_judged(suite: Suite, tmp_path: Path) -> None:
    for task in TASKS:
        (tmp_path / f"{task}.jsonl").write_text(lines([row(task), row(task, 1)]))
    examples = list(suite().examples(TASKS, None))
    assert [e.name for e in examples] == [f"{task}-{i}" for task in TASKS for i in (0, 1)]
    for example in examples:
        (question,) = example.questions
        assert f"Context {example.name[-1]} of {example.task}." in example.context
        assert METRICS[question.metric](question.references[0], question) > 0.99


def test_an_example_is_the_row_in_its_prompt(suite: Suite, tmp_path: Path) -> None:
    given = row("trec", input="Question: What is Rome?\nType:")
    (tmp_path / "trec.jsonl").write_text(lines([given]))
    (example,) = suite().examples(["trec"], None)
    question = Question(
        "Question: What is Rome?\n",
        ("City",),
        "classification_first_line",
        64,
        "Type:",
        ("City", "Food"),
    )
    context = (
        "Please determine the type of the question below. Here are some examples of questions."
        "\n\nContext 0 of trec.\n"
    )
    assert example == Example("trec", "trec-0", context, (question,))


def test_texts_stay_as_they_are(suite: Suite, tmp_path: Path) -> None:
    text = "Passage 1: NEWLINE_CHAR  <|im_end|> é\r\n"
    (tmp_path / "multi_news.jsonl").write_text(lines([row("multi_news", context=text)]))
    (example,) = suite().examples(["multi_news"], None)
    assert text in example.context


def test_the_first_rows_of_each(suite: Suite, tmp_path: Path) -> None:
    for task in ("lcc", "qmsum"):
        (tmp_path / f"{task}.jsonl").write_text(lines(row(task, i) for i in range(5)))
    names = [example.name for example in suite().examples(["qmsum", "lcc"], 2)]
    assert names == ["qmsum-0", "qmsum-1", "lcc-0", "lcc-1"]


def test_a_file_of_a_part_of_a_dataset(suite: Suite, tmp_path: Path) -> None:
    (tmp_path / "qasper_50.jsonl").write_text(lines([row("qasper")]))
    (tmp_path / "qasper_e.jsonl").write_text(lines([row("qasper", 1)]))
    (example,) = suite().examples(["qasper"], None)
    assert "Context 0" in example.context
    (tmp_path / "qasper_100.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"qasper_100.jsonl, qasper_50.jsonl: which one is"):
        suite().examples(["qasper"], None)
    (tmp_path / "qasper.jsonl").write_text(lines([row("qasper", 2)]))
    (example,) = suite().examples(["qasper"], None)
    assert "Context 2" in example.context


def test_the_folder_of_the_environment(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lcc.jsonl").write_text(lines([row("lcc")]))
    monkeypatch.setenv("CRITICALKV_DATA", str(tmp_path))
    assert len(list(suite(data=None).examples(["lcc"], None))) == 1


def test_long_contexts_are_cut_and_told(suite: Suite, tmp_path: Path) -> None:
    (tmp_path / "lcc.jsonl").write_text(lines([row("lcc"), row("lcc", 1, context="x" * 900)]))
    told: list[str] = []
    whole, cut = suite(Rows(tell=told.append), 500).examples(["lcc"], None)
    assert "Context 0 of lcc." in whole.context
    lost = 900 + len("Please complete the code given below. \n") - len(cut.context)
    assert 400 < lost < 900
    assert told == [f"lcc-1 lost {lost} tokens from the middle of its context"]


@pytest.mark.parametrize(
    ("task", "more", "reason"),
    [
        ("qasper", {"answers": []}, "answers: List should have at least 1 item"),
        ("qasper", {"answers": [7]}, "answers.0: Input should be a valid string"),
        ("qasper", {"context": ""}, "context: String should have at least 1 character"),
        ("qasper", {"input": None}, "input: Input should be a valid string"),
        ("qasper", {"dataset": "qmsum"}, "a row of qmsum, not of qasper"),
        ("trec", {"all_classes": None}, "all_classes: labels are needed"),
        ("passage_retrieval_en", {"answers": ["7"]}, "the answer is no paragraph"),
        ("qasper", {"input": "?" * 5000}, "5000 positions leave no room for a context"),
    ],
)
def test_a_bad_row_is_named_by_its_line(
    suite: Suite, tmp_path: Path, task: str, more: dict[str, Any], reason: str
) -> None:
    path = tmp_path / f"{task}.jsonl"
    path.write_text(lines([row(task)]) + "\n" + lines([row(task, 1, **more), row(task, 2)]))
    with pytest.raises(ConfigError, match=rf"{task}.jsonl, line 3: .*{reason}"):
        list(suite(max_positions=5000).examples([task], None))
    told: list[str] = []
    rows = Rows(skip_bad=True, tell=told.append)
    examples = list(suite(rows, max_positions=5000).examples([task], None))
    assert all(f"Context {i} of" in e.context for i, e in zip((0, 2), examples, strict=True))
    assert any(line.startswith(f"skipped {task}.jsonl, line 3") for line in told)


def test_a_missing_field_is_named(suite: Suite, tmp_path: Path) -> None:
    (tmp_path / "lcc.jsonl").write_text('{"input": "", "answers": ["x"]}\n')
    with pytest.raises(ConfigError, match="line 1: context: Field required"):
        list(suite().examples(["lcc"], None))


def test_an_unknown_dataset_is_refused_at_once(suite: Suite) -> None:
    with pytest.raises(ConfigError, match="no task 'dureader'; there are narrativeqa"):
        suite().examples(["dureader"], None)


@pytest.mark.parametrize("data", ["folder", None])
def test_missing_files_are_all_named_at_once(
    suite: Suite, tmp_path: Path, data: str | None
) -> None:
    (tmp_path / "lcc.jsonl").write_text(lines([row("lcc")]))
    folder = tmp_path if data else None
    absent = "qasper.jsonl, trec.jsonl" if data else "qasper.jsonl, lcc.jsonl, trec.jsonl"
    with pytest.raises(ConfigError) as caught:
        suite(data=folder).examples(["qasper", "lcc", "trec"], None)
    assert f"put {absent} into the data folder (--data, CRITICALKV_DATA)" in str(caught.value)
    assert "no connection" in str(caught.value)


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for the Hub's archive; returns the calls that asked for it."""
    path, calls = tmp_path / "cache.zip", []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("data/qasper.jsonl", lines(row("qasper", i) for i in range(3)))
        made.writestr("data/qasper_e.jsonl", lines([row("qasper", 9)]))
        made.writestr("data/lcc.jsonl", lines([row("lcc", 5)]) + "{broken")

    def download(repository: str, name: str, **options: Any) -> str:
        calls.append({"repository": repository, "name": name, **options})
        return str(path)

    monkeypatch.setattr(source, "hf_hub_download", download)
    return calls


def test_the_archive_has_what_the_folder_lacks(
    suite: Suite, tmp_path: Path, archive: list[dict[str, Any]]
) -> None:
    (tmp_path / "lcc.jsonl").write_text(lines([row("lcc")]))
    examples = list(suite().examples(["qasper", "lcc"], None))
    assert [e.name for e in examples] == ["qasper-0", "qasper-1", "qasper-2", "lcc-0"]
    assert "Context 2 of qasper." in examples[2].context
    assert "Context 0 of lcc." in examples[3].context
    (call,) = archive
    assert call.pop("revision").isalnum()
    assert call == {
        "repository": "THUDM/LongBench",
        "name": "data.zip",
        "repo_type": "dataset",
        "local_files_only": False,
    }


def test_nothing_is_fetched_without_need(
    suite: Suite, tmp_path: Path, archive: list[dict[str, Any]]
) -> None:
    (tmp_path / "lcc.jsonl").write_text(lines([row("lcc")]))
    list(suite().examples(["lcc"], None))
    assert archive == []
    list(suite(online=False).examples(["qasper"], None))
    assert archive[0]["local_files_only"] is True


@pytest.mark.usefixtures("archive")
def test_a_bad_row_of_the_archive_is_named_too(suite: Suite) -> None:
    with pytest.raises(ConfigError, match=r"lcc.jsonl, line 2: "):
        list(suite().examples(["lcc"], None))


@pytest.mark.usefixtures("archive")
def test_a_dataset_that_the_archive_lacks(suite: Suite) -> None:
    with pytest.raises(ConfigError, match=r"put trec.jsonl into .* they are not in it"):
        suite().examples(["qasper", "trec"], None)


def test_an_archive_that_is_none(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.zip").write_bytes(b"PK no archive")
    path = str(tmp_path / "broken.zip")
    monkeypatch.setattr(source, "hf_hub_download", lambda *_, **__: path)
    with pytest.raises(ConfigError, match="BadZipFile"):
        suite().examples(["qasper"], None)


def test_a_missing_package_is_told_before_anything_runs(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qmsum.jsonl").write_text(lines([row("qmsum")]))
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(ConfigError, match="needs the package rouge"):
        suite().examples(["qmsum"], None)
