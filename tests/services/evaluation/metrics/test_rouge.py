"""Scores of LongBench's own metrics.py: computed by it, to the last bit."""

from __future__ import annotations

import pytest

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.registry import METRICS


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        ("The cat sat on the mat.", ("The cat sat on the mat.",), 0.999999995),
        ("The cat sat.", ("the cat sat.",), 0.6666666616666668),
        ("", ("The cat sat on the mat.",), 0.0),
        ("The cat sat on the mat.", ("",), 0.0),
        ("...", ("The cat.",), 0.0),
        (" ", ("The cat.",), 0.0),
        ("the the the cat cat", ("the cat",), 0.999999995),
        (
            "The agency spent $1.5 million. It plans more.",
            ("The agency spent 1.5 million dollars. More is planned.",),
            0.5263157844875347,
        ),
        ("the mat the cat on sat", ("the cat sat on the mat",), 0.5999999950000001),
        ("One. Two. Three.", ("Three. Two. One.",), 0.999999995),
        ("naïve café, Größe\tund\nmehr", ("naïve café Größe und mehr",), 0.7999999950000002),
        (
            "A report on U.S. aid",
            ("Nothing shared here", "A report about U.S. aid"),
            0.8333333283333335,
        ),
        ("no words in common", ("entirely different",), 0.0),
    ],
)
def test_rouge_l(text: str, references: tuple[str, ...], score: float) -> None:
    question = Question("", references, "rouge_l", 9)
    assert METRICS["rouge_l"](text, question) == score


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        (
            "\nAnn will call Bob.\nDialogue: Ann: hi",
            ("Ann will call Bob later.",),
            0.8888888839506174,
        ),
        ("Ann will call.\n\nBob will wait.", ("Ann will call. Bob will wait.",), 0.7499999953125),
        ("\n\n", ("Ann.",), 0.0),
        (" \nAnn.", ("Ann.",), 0.0),
        ("", ("",), 0.0),
        ("Bob is late", ("Ann is early", "Bob is late today"), 0.8571428522448981),
        ("Ann\rBob", ("Ann Bob",), 0.999999995),
        ("Summary: Ann.", ("Ann.",), 0.6666666622222223),
    ],
)
def test_rouge_l_first_line(text: str, references: tuple[str, ...], score: float) -> None:
    question = Question("", references, "rouge_l_first_line", 9)
    assert METRICS["rouge_l_first_line"](text, question) == score


def words(count: int) -> str:
    return " ".join(f"a{i}" for i in range(count))


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        (words(900), ("a0.",), 0.002219755804686124),
        (words(1100), ("a0.",), 0.0),
        ("a0.", (words(1100),), 0.0),
        (words(1100) + ". a0", ("a0.",), 0.0),
        ("a0.", (words(1100), "a0 b"), 0.6666666622222223),
    ],
    ids=["deep", "too deep", "too deep a reference", "one is too deep", "of two"],
)
def test_sentences_of_many_words(text: str, references: tuple[str, ...], score: float) -> None:
    question = Question("", references, "rouge_l", 9)
    assert METRICS["rouge_l"](text, question) == score


def test_a_score_does_not_depend_on_who_asks() -> None:
    question = Question("", ("a0.",), "rouge_l", 9)

    def ask(depth: int) -> float:
        return ask(depth - 1) if depth else METRICS["rouge_l"](words(900), question)

    assert ask(300) == ask(0) > 0
