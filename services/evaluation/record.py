"""A record: one example under one cell, as a line of a journal."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from criticalkv.services.evaluation.answer import Answer, Answers
from criticalkv.services.evaluation.column import Column
from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.likelihood import Likelihood
from criticalkv.services.evaluation.metrics.registry import METRICS

Outcome = Answers | Likelihood
"""What came of an example under one cell."""
Key = tuple[str, str, str, tuple[str, ...]]
"""(example, canonical policy, tier, tiers below that its values depend on)."""


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Turn(_Line):
    """One answer and how good it is; the fields that `Answer` has mean the same.

    Attributes:
        score: of the question's metric, 0 to 1.
    """

    text: str
    score: float
    finish_reason: str
    tier: str
    kept: float
    kept_bytes: int
    kl: float | None = None

    @classmethod
    def of(cls, answer: Answer, question: Question) -> Turn:
        """Judge an answer."""
        return cls(
            text=answer.text,
            score=METRICS[question.metric](answer.text, question),
            finish_reason=answer.finish_reason,
            tier=answer.tier,
            kept=answer.kept,
            kept_bytes=answer.kept_bytes,
            kl=answer.kl,
        )


class Record(_Line):
    """What an example came to under one cell.

    Attributes:
        name: of the example.
        digest: sha256 of its texts: another example is not taken for it.
        policy: as its user spelled it, or "full".
        canonical: its full textual form.
        below: see `Column`.
        turns: one for each question; none where a text's likelihood was measured.
        likelihood: of that text.
        seconds: from the example's begin until it was finished.
    """

    name: str
    task: str
    length: int | None
    depth: float | None
    digest: str
    policy: str
    canonical: str
    tier: str
    below: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()
    likelihood: Likelihood | None = None
    seconds: float

    @classmethod
    def of(cls, example: Example, column: Column, outcome: Outcome, seconds: float) -> Record:
        """Judge an example's answers, or take down its likelihood."""
        return cls(
            name=example.name,
            task=example.task,
            length=example.length,
            depth=example.depth,
            digest=digest(example),
            policy=column.cell.policy,
            canonical=column.canonical,
            tier=column.cell.tier,
            below=column.below,
            **_outcome(example, outcome),
            seconds=round(seconds, 3),
        )

    @property
    def reads(self) -> tuple[Turn | Likelihood, ...]:
        """What says how a context was read."""
        return (self.likelihood,) if self.likelihood else self.turns

    @property
    def key(self) -> Key:
        """What makes it the only one of its journal."""
        return self.name, self.canonical, self.tier, self.below


def _outcome(example: Example, outcome: Outcome) -> dict[str, Any]:
    if not isinstance(outcome, tuple):
        return {"likelihood": outcome}
    pairs = zip(outcome, example.questions, strict=True)
    return {"turns": tuple(Turn.of(answer, question) for answer, question in pairs)}


def digest(example: Example) -> str:
    """Return the sha256 of an example's context and questions, hex."""
    texts = [example.context, [dataclasses.asdict(question) for question in example.questions]]
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
