"""Rows of SCBench's own files: {id, context, multi_turns: [{input, answer}]}."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, Field, StrictFloat, StrictInt, StrictStr

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.scbench import en_qa, math_find, retr_kv

Number = StrictInt | StrictFloat


class Turn(BaseModel):
    """A question, and its right answer or answers."""

    input: StrictStr
    answer: Number | StrictStr | list[StrictStr]


class Row(BaseModel):
    """A context, as text or as a list of numbers, and the turns about it."""

    context: StrictStr | list[Number]
    multi_turns: list[Turn] = Field(min_length=1)


Reader = Callable[[Row], tuple[str, Sequence[Question]]]
"""Makes context and questions of a row; ValueError for one of another task."""


def example(row: dict[str, Any], task: str, name: str, turns: int) -> Example:
    """Return the example of a row.

    Args:
        row: as its file has it.
        task: one of `READERS`.
        name: of the example.
        turns: most turns; the first ones.

    Raises:
        ValueError: if it is malformed, or a row of another task.
    """
    context, questions = READERS[task](Row.model_validate(row))
    return Example(task, name, context, tuple(questions[:turns]))


def _retr_kv(row: Row) -> tuple[str, Sequence[Question]]:
    context = f"{retr_kv.INSTRUCTION}{_text(row)}\n\n"
    return context, [retr_kv.ask(turn.input, _said(turn)) for turn in row.multi_turns]


def _math_find(row: Row) -> tuple[str, Sequence[Question]]:
    if isinstance(row.context, str):
        raise ValueError("context: a list of numbers is needed")
    questions = [math_find.ask(turn.input, _number(turn)) for turn in row.multi_turns]
    return math_find.in_context(row.context), questions


def _en_qa(row: Row) -> tuple[str, Sequence[Question]]:
    context = f"{en_qa.INSTRUCTION}{_text(row)}\n\n"
    return context, [en_qa.ask(turn.input, _answers(turn)) for turn in row.multi_turns]


READERS: dict[str, Reader] = {
    "scbench_kv": _retr_kv,
    "scbench_mf": _math_find,
    en_qa.TASK: _en_qa,
}


def _text(row: Row) -> str:
    if not isinstance(row.context, str):
        raise ValueError("context: a text is needed")
    return row.context


def _said(turn: Turn) -> str:
    if not isinstance(turn.answer, str):
        raise ValueError("answer: a text is needed")
    return turn.answer


def _number(turn: Turn) -> float:
    if isinstance(turn.answer, str | list):
        raise ValueError("answer: a number is needed")
    if isinstance(turn.answer, float) and not math.isfinite(turn.answer):
        raise ValueError("answer: a finite number is needed")
    return turn.answer


def _answers(turn: Turn) -> tuple[str, ...]:
    if isinstance(turn.answer, list) and turn.answer:
        return tuple(turn.answer)
    return (_said(turn),)
