"""Rows of LongBench's files: {input, context, answers, all_classes, dataset, …}."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, StrictStr

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.longbench.templates import TEMPLATES
from criticalkv.services.evaluation.metrics.number_counts import paragraph


class Row(BaseModel):
    """What is asked about a context; fields that nothing needs are left out."""

    input: StrictStr
    context: StrictStr = Field(min_length=1)
    answers: list[StrictStr] = Field(min_length=1)
    all_classes: list[StrictStr] | None = None
    dataset: StrictStr | None = None


def example(row: dict[str, Any], task: str, name: str) -> Example:
    """Return a row in its task's prompt, however long.

    Raises:
        ValueError: if it is malformed, or a row of another task.
    """
    parsed, template = Row.model_validate(row), TEMPLATES[task]
    _check(parsed, task, template.metric)
    context, question, prefix = template.render(parsed.context, parsed.input)
    asked = Question(
        question,
        tuple(parsed.answers),
        template.metric,
        template.max_tokens,
        prefix,
        tuple(parsed.all_classes or ()),
    )
    return Example(task, name, context, (asked,))


def _check(row: Row, task: str, metric: str) -> None:
    """Refuse what the metric could not judge."""
    if row.dataset is not None and row.dataset.removesuffix("_e") != task:
        raise ValueError(f"a row of {row.dataset}, not of {task}")
    if metric.startswith("classification") and not row.all_classes:
        raise ValueError("all_classes: labels are needed")
    if metric == "retrieval":
        for answer in row.answers:
            paragraph(answer)
