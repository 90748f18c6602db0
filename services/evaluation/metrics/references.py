"""Several right answers: the closest one counts."""

from __future__ import annotations

from collections.abc import Callable

from criticalkv.services.evaluation.example import Question


def closest(score: Callable[[str, str], float], text: str, question: Question) -> float:
    """Return the best score of an answer over the references, 0 without any.

    Args:
        score: (answer, reference) → 0 to 1.
    """
    return max((score(text, reference) for reference in question.references), default=0.0)
