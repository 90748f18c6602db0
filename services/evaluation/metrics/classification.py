"""Is the right label in the answer, and how many others are? (LongBench, metrics.py)"""

from __future__ import annotations

from functools import partial

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.references import closest


def classification(text: str, question: Question) -> float:
    """Return 1 ÷ the labels in an answer, 0 without the right one among them."""
    return closest(partial(_share, question.classes), text, question)


def _share(classes: tuple[str, ...], text: str, reference: str) -> float:
    found = _found(classes, text, reference)
    return 1 / len(found) if reference in found else 0.0


def _found(classes: tuple[str, ...], text: str, reference: str) -> list[str]:
    """Return the labels in a text, less those that are only a piece of the right one."""
    found = [label for label in classes if label in text]
    place = 0
    while place < len(found):
        if found[place] in reference and found[place] != reference:
            # The label that moves up is not looked at: published scores come from that.
            found.remove(found[place])
        place += 1
    return found
