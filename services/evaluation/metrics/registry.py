"""Every metric by its name."""

from __future__ import annotations

from collections.abc import Callable

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.string_match import (
    string_match_all,
    string_match_part,
)

Metric = Callable[[str, Question], float]
"""(answer, question) → 0 to 1; higher is better."""
METRICS: dict[str, Metric] = {
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
}
