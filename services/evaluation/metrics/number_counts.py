"""Shares of a right number among an answer's numbers (LongBench, metrics.py)."""

from __future__ import annotations

import re

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.references import closest

_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")


def count(text: str, question: Question) -> float:
    """Return the share of the number that was to be counted."""
    return closest(_share, text, question)


def retrieval(text: str, question: Question) -> float:
    """Return the share of the number of the paragraph that was asked for."""
    return closest(lambda answer, reference: _share(answer, paragraph(reference)), text, question)


def paragraph(reference: str) -> str:
    """Return the number of the first paragraph that a reference names.

    Raises:
        ValueError: if it names none.
    """
    named = _PARAGRAPH.search(reference)
    if named is None:
        raise ValueError('the answer is no paragraph, such as "Paragraph 7"')
    return named[1]


def _share(text: str, right: str) -> float:
    """Return the share of `right` among the numbers in a text, 0 without any.

    Numbers are compared as they are written: "07" is not "7".
    """
    numbers = _NUMBER.findall(text)
    return numbers.count(right) / len(numbers) if numbers else 0.0
