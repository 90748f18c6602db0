"""Only an answer's first line is judged: after few-shot examples models write more of them.

LongBench does so for trec, triviaqa and samsum (LongBench, eval.py).
"""

from __future__ import annotations

from collections.abc import Callable

from criticalkv.services.evaluation.example import Question


def first_line(
    metric: Callable[[str, Question], float],
) -> Callable[[str, Question], float]:
    """Return a metric that sees an answer up to the first line end after its text began."""

    def judge(text: str, question: Question) -> float:
        return metric(text.lstrip("\n").split("\n")[0], question)

    return judge
