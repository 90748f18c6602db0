"""SCBench's metrics: is the right answer in the answer? (compute_scores.py)"""

from __future__ import annotations

import re
from decimal import Decimal

from criticalkv.services.evaluation.example import Question

_NUMBER = re.compile(r"\d+\.\d+|\d+")
_INTEGER = re.compile(r"-?\d+")


def kv_match(text: str, question: Question) -> float:
    """Return 1 if the one reference occurs in an answer, letter for letter."""
    (value,) = question.references
    return float(value in text)


def number_match(text: str, question: Question) -> float:
    """Return 1 if an answer's first number is the one reference.

    Where an integer is asked for, what follows a point is left out, as in the original.
    """
    (reference,) = question.references
    found = _NUMBER.search(text)
    if found is None:
        return 0.0
    said = found.group()
    if _INTEGER.fullmatch(reference):
        said = said.partition(".")[0]
    # Unlike an int or a float, a decimal takes any number of digits.
    return float(Decimal(said) == Decimal(reference))


def answer_match(text: str, question: Question) -> float:
    """Return 1 if any of the references occurs in an answer, in any case.

    The original judges En.QA by containment, as InfiniteBench does its dialogues, and not by
    InfiniteBench's F1 for books.
    """
    said = text.strip().upper()
    return float(any(reference.upper() in said for reference in question.references))
