"""Scores of LongBench's own metrics.py: computed by it, to the last bit."""

from __future__ import annotations

import pytest

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.registry import METRICS


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        ("The Eiffel Tower.", ("Eiffel Tower",), 1.0),
        ("It is the Eiffel Tower in Paris, France", ("Eiffel Tower",), 0.4444444444444445),
        ("", ("Eiffel Tower",), 0.0),
        ("Eiffel Tower", ("",), 0.0),
        ("", ("",), 0.0),
        ("the a an", ("the",), 0.0),
        ("don't — stop!", ("dont stop",), 0.8),
        ("CAFÉ au lait", ("café",), 0.5),
        ("Straße", ("STRASSE",), 0.0),
        ("new york new york", ("new york city",), 0.5714285714285715),
        ("yes", ("no", "Yes, it is", "YES."), 1.0),
        ("1,000 metres", ("1000 meters", "1000"), 0.6666666666666666),
        ("anthem theatre a", ("the anthem",), 0.6666666666666666),
        ("well-known author", ("well known author",), 0.4),
        ("东京 tower", ("东京 Tower",), 1.0),
        ("unanswerable\n\nQuestion: what", ("Unanswerable",), 0.5),
    ],
)
def test_qa_f1(text: str, references: tuple[str, ...], score: float) -> None:
    question = Question("", references, "qa_f1", 9)
    assert METRICS["qa_f1"](text, question) == score


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        ("\n\nParis\nPassage: Paris is big", ("Paris",), 1.0),
        (" Paris\nParis", ("Paris, France",), 0.6666666666666666),
        ("Passage:\nParis", ("Paris",), 0.0),
        (" \nParis", ("Paris",), 0.0),
        ("", ("Paris",), 0.0),
        ("Paris\r\nRome", ("Paris",), 1.0),
        ("in Paris", ("London", "Paris"), 0.6666666666666666),
        ("\n", ("\n",), 0.0),
    ],
)
def test_qa_f1_first_line(text: str, references: tuple[str, ...], score: float) -> None:
    question = Question("", references, "qa_f1_first_line", 9)
    assert METRICS["qa_f1_first_line"](text, question) == score
