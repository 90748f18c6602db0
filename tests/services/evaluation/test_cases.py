"""Cases are what they say, and the same on every machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import byte_tokenizer

from criticalkv.services.evaluation.case import context_ids, data_file, question_ids, shorten
from criticalkv.services.evaluation.needles import Needles
from criticalkv.services.evaluation.news import news
from criticalkv.services.evaluation.statistics import Estimate
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer())


@pytest.mark.parametrize("needles", [1, 4])
@pytest.mark.parametrize("seed", [0, 7, 1234])
def test_needles_are_hidden_once_and_asked_for(chat: ChatTemplate, needles: int, seed: int) -> None:
    case = Needles(chat).case(seed, needles, 3000)
    text = chat.decode(case.context_ids)
    number = chat.decode(case.answer_ids).strip()
    assert text.count("The special magic number for ") == needles
    assert text.count(number) == 1
    key = chat.decode(case.question_ids).partition("magic number for ")[2].split()[0]
    assert f"The special magic number for {key} is: {number}." in text
    assert chat.decode(case.question_ids).endswith(f"for {key} mentioned in the provided text is:")
    assert number not in chat.decode(case.question_ids)
    assert 2000 < len(case.context_ids) <= 3400  # bytes: needles and frame are longer here


def test_a_seed_is_a_case(chat: ChatTemplate) -> None:
    assert Needles(chat).case(3, 4, 800) == Needles(chat).case(3, 4, 800)
    cases = {Needles(chat).case(seed, 1, 800).answer_ids for seed in range(20)}
    assert len(cases) == 20


def test_the_users_essays_are_the_haystack(chat: ChatTemplate, tmp_path: Path) -> None:
    line = "Blue herons wade at dawn. They wait. " * 4
    (tmp_path / "inaugural.txt").write_text("\n".join([line] * 9))
    needles = Needles(chat, tmp_path)
    assert needles.haystack == "inaugural.txt"
    assert "Blue herons wade" in chat.decode(needles.case(0, 1, 600).context_ids)


def test_news_rows_that_fit(chat: ChatTemplate, tmp_path: Path) -> None:
    rows = [
        {"context": "x" * n + "NEWLINE_CHAR y", "answers": ["A summary."]} for n in (20, 500, 900)
    ]
    (tmp_path / "multi_news_50.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = list(news(chat, tmp_path, 700))
    assert [case.name for case in found] == ["multi_news-1"]
    assert "NEWLINE_CHAR" not in chat.decode(found[0].context_ids)
    assert chat.decode(found[0].question_ids).count("Write a short summary") == 1
    assert chat.decode(found[0].answer_ids) == "A summary."
    assert list(news(chat, None, 700)) == []


def test_a_data_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        data_file("x", tmp_path / "absent")
    assert data_file("x", tmp_path) is None


def test_data_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("")
    monkeypatch.setenv("CRITICALKV_DATA", str(tmp_path))
    assert data_file("x", None) == tmp_path / "x"


def test_context_and_question_make_the_whole_prompt(chat: ChatTemplate) -> None:
    ids = [*context_ids(chat, "A text."), *question_ids(chat, "Why?", "Since")]
    raw = chat.encode_template(
        "<|im_start|>user\nA text.\n\nWhy?<|im_end|>\n<|im_start|>assistant\nSince"
    )
    assert ids == raw


def test_shorten_stops_before_the_limit(chat: ChatTemplate) -> None:
    assert shorten(["abc", "de", "f"], chat, 7) == ["abc", "de"]
    assert shorten(["abc"], chat, 3) == []


def test_estimate() -> None:
    estimate = Estimate.of([0.0, 1.0] * 50)
    assert estimate == Estimate.of([0.0, 1.0] * 50)
    assert estimate.mean == 0.5
    assert 0.38 < estimate.low < 0.42 < 0.58 < estimate.high < 0.62
    assert Estimate.of([2.0]) == Estimate(2.0, 2.0, 2.0, 1)
