"""Scores of LongBench's own metrics.py: computed by it, to the last bit."""

from __future__ import annotations

import pytest

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.registry import METRICS

LABELS = (
    "Food",
    "Individual",
    "Individual, person name",
    "Invention, book and other creative piece",
    "Other location",
    "City",
    "Country",
    "Number of something",
    "number",
    "Other",
)
NESTED = ("a", "ab", "b", "abc")


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        ("City", ("City",), 1.0),
        ("It is a City or a Country", ("City",), 0.5),
        ("city", ("City",), 0.0),
        ("", ("City",), 0.0),
        ("Other location", ("Other location",), 1.0),
        ("Other", ("Other location",), 0.0),
        ("Individual, person name", ("Individual",), 0.5),
        ("Individual, person name", ("Individual, person name",), 1.0),
        ("Food City Country Other", ("Other",), 0.25),
        ("City", ("",), 0.0),
        ("City", ("Nowhere",), 0.0),
        ("Country", ("City", "Country"), 1.0),
        ("City!Country?Food.", ("Food",), 0.3333333333333333),
        ("Ｃity", ("City",), 0.0),
    ],
)
def test_classification(text: str, references: tuple[str, ...], score: float) -> None:
    question = Question("", references, "classification", 9, classes=LABELS)
    assert METRICS["classification"](text, question) == score


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        ("abc", ("abc",), 0.5),
        ("abc", ("ab",), 0.5),
        ("ab", ("abc",), 0.0),
        ("b", ("b",), 1.0),
        ("ab", ("ab",), 1.0),
    ],
)
def test_classification_of_labels_within_labels(
    text: str, references: tuple[str, ...], score: float
) -> None:
    question = Question("", references, "classification", 9, classes=NESTED)
    assert METRICS["classification"](text, question) == score


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        ("\nCity\nQuestion: Where?\nType: Country", ("City",), 1.0),
        ("City or Country\nFood", ("City",), 0.5),
        ("Question\nCity", ("City",), 0.0),
        ("\n", ("City",), 0.0),
    ],
)
def test_classification_first_line(text: str, references: tuple[str, ...], score: float) -> None:
    question = Question("", references, "classification_first_line", 9, classes=LABELS)
    assert METRICS["classification_first_line"](text, question) == score
