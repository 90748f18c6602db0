"""RULER's metrics: is what was asked for in the answer? (RULER, appendix; scripts/eval)"""

from __future__ import annotations

import re

from criticalkv.services.evaluation.example import Question

_UNPRINTABLE = re.compile(r"[\x00-\x1f]")


def printable(text: str) -> str:
    """Return an answer as RULER judges it: unprintable characters are line ends."""
    return _UNPRINTABLE.sub("\n", text.strip()).strip()


def string_match_all(text: str, question: Question) -> float:
    """Return the share of the references that occur in an answer, in any case."""
    found = _found(text, question)
    return sum(found) / len(found)


def string_match_part(text: str, question: Question) -> float:
    """Return 1 if any of the references occurs in an answer, in any case."""
    return float(any(_found(text, question)))


def _found(text: str, question: Question) -> list[bool]:
    answer = printable(text).lower()
    return [reference.lower() in answer for reference in question.references]
