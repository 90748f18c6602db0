"""An example: a context in text, and what is asked about it, once or turn after turn."""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]
"""Characters [start, end) of a context."""


@dataclass(frozen=True)
class Question:
    """What is asked, and how the answer is judged.

    Attributes:
        text: follows the context in the same user message, its separator included; in a
            later turn it is a user message of its own.
        references: right answers; for tasks with several parts, the parts.
        metric: name in `metrics.METRICS`.
        max_tokens: most tokens of an answer.
        answer_prefix: how the assistant's answer begins; the model goes on after it.
        classes: every label there is, for classification.
    """

    text: str
    references: tuple[str, ...]
    metric: str
    max_tokens: int
    answer_prefix: str = ""
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """One row of a task.

    Attributes:
        task: name as the field spells it, such as "niah_single_1".
        name: unique within a run: task, length, number.
        context: compressed before the questions are known; shared by all of them.
        questions: turns of one conversation, or independent requests.
        length: tokens that were asked for; None for rows from files.
        depth: where the needle is, 0 = start, 1 = end; None without one place.
        needles: spans of the context that hold the answer.
        decoys: spans that are like needles, but are not asked for.
        haystack: span in which needles are hidden; None without one.
    """

    task: str
    name: str
    context: str
    questions: tuple[Question, ...]
    length: int | None = None
    depth: float | None = None
    needles: tuple[Span, ...] = ()
    decoys: tuple[Span, ...] = ()
    haystack: Span | None = None
