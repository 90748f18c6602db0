"""ROUGE-L, by the package that LongBench's own numbers come from (LongBench, metrics.py)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.package import of_extra
from criticalkv.services.evaluation.metrics.references import closest


def rouge_l(text: str, question: Question) -> float:
    """Return the summary-level ROUGE-L F1 of an answer against the closest reference.

    0 where the package fails, as in LongBench: a text without any sentence, or two
    sentences that together have about a thousand words, which is too deep for it.

    Raises:
        ConfigError: if the package is not installed.
    """
    # In a thread of its own its depth does not depend on who calls.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(closest, _f1, text, question).result()


def _f1(text: str, reference: str) -> float:
    with of_extra("rouge"):
        from rouge import Rouge
    rouge = Rouge(metrics=["rouge-l"], stats=["f"])
    try:
        return float(rouge.get_scores([text], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0
