"""F1 over an answer's words, as SQuAD defines it (LongBench, metrics.py)."""

from __future__ import annotations

import re
import string
from collections import Counter

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.references import closest

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return text in lower case without ASCII punctuation, articles and extra spaces."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def qa_f1(text: str, question: Question) -> float:
    """Return the F1 of an answer's words against the closest reference's."""
    return closest(_f1, text, question)


def _f1(text: str, reference: str) -> float:
    said, right = normalize_answer(text).split(), normalize_answer(reference).split()
    shared = (Counter(said) & Counter(right)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(said), shared / len(right)
    return 2 * precision * recall / (precision + recall)
