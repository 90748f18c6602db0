"""String match, as RULER's scripts/eval define it."""

from __future__ import annotations

import pytest

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.registry import METRICS
from criticalkv.services.evaluation.metrics.string_match import printable

# Answer, references, and the scores of "all" and "part".
GOLDEN = [
    (" 7154321.", ("7154321",), 1.0, 1.0),
    ("The numbers are 7154321 and 9991234", ("7154321", "9991234", "1112223"), 2 / 3, 1.0),
    ("ABCDE fghij KLMNO", ("abcde", "FGHIJ", "KLMNO", "PQRST", "UVWXY"), 3 / 5, 1.0),
    ("1. able 2. bear", ("able", "bear"), 1.0, 1.0),
    ("I do not know", ("Saint Bernadette Soubirous",), 0.0, 0.0),
    ("", ("308",), 0.0, 0.0),
    ("3081 points", ("308",), 1.0, 1.0),  # part of a word counts
    ("1 and 2", ("12",), 0.0, 0.0),
    ("Denver\tBroncos", ("Denver Broncos",), 0.0, 0.0),  # a tab is a line end
    ("Denver\x00Broncos", ("denver\nbroncos",), 1.0, 1.0),
    ("Ärzte", ("äRZTE",), 1.0, 1.0),
    ("bear", ("bear", "bear", "able"), 2 / 3, 1.0),
]


@pytest.mark.parametrize(("text", "references", "every", "part"), GOLDEN)
def test_golden(text: str, references: tuple[str, ...], every: float, part: float) -> None:
    question = Question("?", references, "string_match_all", 1)
    assert METRICS["string_match_all"](text, question) == pytest.approx(every, abs=1e-12)
    assert METRICS["string_match_part"](text, question) == part


def test_unprintable_characters_are_line_ends() -> None:
    assert printable(" \x00a\x1fb\tc\n\n") == "a\nb\nc"
    assert printable("ä 北\x7f") == "ä 北\x7f"
