"""Numbers in an answer: those that are right over all there are (LongBench, metrics.py)."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\d+")


def share_of(right: str, text: str) -> float:
    """Return the share of `right` among the numbers in a text, 0 without any.

    Numbers are compared as they are written: "07" is not "7".
    """
    numbers = _NUMBER.findall(text)
    return numbers.count(right) / len(numbers) if numbers else 0.0
