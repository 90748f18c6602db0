"""Was the paragraph named that was asked for? (LongBench, metrics.py)"""

from __future__ import annotations

import re

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.number_share import share_of
from criticalkv.services.evaluation.metrics.references import closest

_PARAGRAPH = re.compile(r"Paragraph (\d+)")


def paragraph(reference: str) -> str:
    """Return the number of the first paragraph that a reference names.

    Raises:
        ValueError: if it names none.
    """
    named = _PARAGRAPH.search(reference)
    if named is None:
        raise ValueError('the answer is no paragraph, such as "Paragraph 7"')
    return named[1]


def retrieval(text: str, question: Question) -> float:
    """Return the share of the right paragraph's number among an answer's numbers."""
    return closest(lambda answer, reference: share_of(paragraph(reference), answer), text, question)
