"""Metrics give what SCBench's own scorer gives: values of its code for the same answers."""

from __future__ import annotations

import pytest

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.registry import METRICS

GOLDEN = {
    "kv_match": [
        ("The value is: d1ff29be-4e2a.", ["d1ff29be-4e2a"], 1),
        ("D1FF29BE-4E2A", ["d1ff29be-4e2a"], 0),
        ("d1ff29be 4e2a", ["d1ff29be-4e2a"], 0),
        ("", ["d1"], 0),
    ],
    "number_match": [
        ("97", ["97"], 1),
        ("The 2nd largest number is 97.", ["97"], 0),
        ("97.9 of them", ["97"], 1),
        ("197", ["97"], 0),
        ("-97", ["97"], 1),
        ("1,097", ["97"], 0),
        ("none", ["97"], 0),
        ("7.", ["7"], 1),
        ("48.50", ["48.5"], 1),
        ("48", ["48.5"], 0),
        ("48", ["48.0"], 1),
        ("48.5", ["48.0"], 0),
    ],
    "answer_match": [
        ("It was in PARIS, of course", ["London", "Paris"], 1),
        ("a Parisian", ["Paris"], 1),
        ("Pari", ["Paris"], 0),
        ("Strasse", ["Straße"], 1),
        (" Paris", [" Paris"], 0),
        ("", ["x"], 0),
    ],
}
CASES = [(name, *case) for name, cases in GOLDEN.items() for case in cases]


@pytest.mark.parametrize(("metric", "answer", "references", "score"), CASES)
def test_golden(metric: str, answer: str, references: list[str], score: int) -> None:
    question = Question("", tuple(references), metric, 1)
    assert METRICS[metric](answer, question) == score
