"""Was the number found that was to be counted? (LongBench, metrics.py)"""

from __future__ import annotations

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.number_share import share_of
from criticalkv.services.evaluation.metrics.references import closest


def count(text: str, question: Question) -> float:
    """Return the share of the right number among an answer's numbers."""
    return closest(lambda answer, reference: share_of(reference, answer), text, question)
