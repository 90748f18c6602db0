"""SCBench's metric for En.QA: is one of the right answers in the answer? (compute_scores.py)

The original judges this task by containment, as InfiniteBench does its dialogues, and not by
InfiniteBench's F1 for books.
"""

from __future__ import annotations

from criticalkv.services.evaluation.example import Question


def answer_match(text: str, question: Question) -> float:
    """Return 1 if any of the references occurs in an answer, in any case."""
    said = text.strip().upper()
    return float(any(reference.upper() in said for reference in question.references))
