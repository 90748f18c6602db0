"""How close a line of code is to the right one (LongBench, metrics.py)."""

from __future__ import annotations

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.package import of_extra
from criticalkv.services.evaluation.metrics.references import closest

_NO_CODE = ("`", "#", "//")


def code_similarity(text: str, question: Question) -> float:
    """Return the edit similarity of an answer's first line of code, in hundredths.

    rapidfuzz's ratio, 1 - insertions and deletions ÷ characters of both, is what
    fuzzywuzzy's with python-Levenshtein is before it is rounded.

    Raises:
        ConfigError: if rapidfuzz is not installed.
    """
    return closest(_similarity, _first_code_line(text), question)


def _first_code_line(text: str) -> str:
    """Return the first line without a fence or a comment, else nothing."""
    lines = text.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")


def _similarity(line: str, reference: str) -> float:
    with of_extra("rapidfuzz"):
        from rapidfuzz import fuzz
    return round(fuzz.ratio(line, reference)) / 100
