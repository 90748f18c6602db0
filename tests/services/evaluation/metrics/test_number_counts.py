"""Scores of LongBench's own metrics.py: computed by it, to the last bit."""

from __future__ import annotations

import pytest

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.registry import METRICS


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        ("7", ("7",), 1.0),
        ("", ("7",), 0.0),
        ("seven", ("7",), 0.0),
        ("7 of 12", ("7",), 0.5),
        ("17", ("7",), 0.0),
        ("07", ("7",), 0.0),
        ("7.0", ("7",), 0.5),
        ("7 7 8", ("7",), 0.6666666666666666),
        ("There are 7", ("8", "7"), 1.0),
        ("1,007", ("7",), 0.0),
        ("-7", ("7",), 1.0),
        ("７", ("7",), 0.0),
        ("7", ("",), 0.0),
        ("", ("",), 0.0),
    ],
)
def test_count(text: str, references: tuple[str, ...], score: float) -> None:
    question = Question("", references, "count", 9)
    assert METRICS["count"](text, question) == score


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        ("Paragraph 5", ("Paragraph 5",), 1.0),
        ("paragraph 5", ("Paragraph 5",), 1.0),
        ("5", ("Paragraph 5",), 1.0),
        ("", ("Paragraph 5",), 0.0),
        ("Paragraph 15", ("Paragraph 5",), 0.0),
        ("Paragraph 5 or Paragraph 6", ("Paragraph 5",), 0.5),
        ("Paragraph 5, page 5 of 30", ("Paragraph 5",), 0.6666666666666666),
        ("the fifth", ("Paragraph 5",), 0.0),
        ("Paragraph 6", ("Paragraph 5", "Paragraph 6"), 1.0),
        ("Paragraph 12", ("see Paragraph 12 and Paragraph 3",), 1.0),
        ("Paragraph 05", ("Paragraph 5",), 0.0),
        ("Paragraph5", ("Paragraph 5",), 1.0),
    ],
)
def test_retrieval(text: str, references: tuple[str, ...], score: float) -> None:
    question = Question("", references, "retrieval", 9)
    assert METRICS["retrieval"](text, question) == score
