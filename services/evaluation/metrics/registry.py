"""Every metric by its name."""

from __future__ import annotations

from collections.abc import Callable

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.classification import classification
from criticalkv.services.evaluation.metrics.code_line import code_similarity
from criticalkv.services.evaluation.metrics.first_line import first_line
from criticalkv.services.evaluation.metrics.number_counts import count, retrieval
from criticalkv.services.evaluation.metrics.qa_f1 import qa_f1
from criticalkv.services.evaluation.metrics.rouge import rouge_l
from criticalkv.services.evaluation.metrics.scbench import answer_match, kv_match, number_match
from criticalkv.services.evaluation.metrics.string_match import (
    string_match_all,
    string_match_part,
)

Metric = Callable[[str, Question], float]
"""(answer, question) → 0 to 1; higher is better."""
METRICS: dict[str, Metric] = {
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    "kv_match": kv_match,
    "number_match": number_match,
    "answer_match": answer_match,
    "qa_f1": qa_f1,
    "qa_f1_first_line": first_line(qa_f1),
    "rouge_l": rouge_l,
    "rouge_l_first_line": first_line(rouge_l),
    "classification": classification,
    "classification_first_line": first_line(classification),
    "count": count,
    "retrieval": retrieval,
    "code_similarity": code_similarity,
}
