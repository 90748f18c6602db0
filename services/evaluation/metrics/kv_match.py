"""SCBench's metric for key-value retrieval: is the value in the answer? (compute_scores.py)"""

from __future__ import annotations

from criticalkv.services.evaluation.example import Question


def kv_match(text: str, question: Question) -> float:
    """Return 1 if the one reference occurs in an answer, letter for letter."""
    (value,) = question.references
    return float(value in text)
