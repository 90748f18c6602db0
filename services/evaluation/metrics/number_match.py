"""SCBench's metric for Math.Find: is the first number the right one? (compute_scores.py)"""

from __future__ import annotations

import re

from criticalkv.services.evaluation.example import Question

_NUMBER = re.compile(r"\d+\.\d+|\d+")


def number_match(text: str, question: Question) -> float:
    """Return 1 if an answer's first number is the one reference.

    Where an integer is asked for, what follows a point is left out, as in the original.
    """
    (reference,) = question.references
    found = _NUMBER.search(text)
    if found is None:
        return 0.0
    number = float(found.group())
    return float(number == float(reference) if "." in reference else int(number) == int(reference))
