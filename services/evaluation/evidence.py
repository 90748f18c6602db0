"""Evidence: which tokens of a context hold an answer, and which are like them but do not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from criticalkv.services.evaluation.distractors import Stretches
from criticalkv.services.evaluation.example import Example, Span
from criticalkv.services.evaluation.prompt import first_prompt
from criticalkv.services.evaluation.token_spans import TokenSpans
from criticalkv.shared.model.chat import ChatTemplate


@dataclass(frozen=True)
class Evidence:
    """Spans [start, end) of a context's token ids, as `first_prompt` makes them.

    Attributes:
        name, task: the example's.
        tokens: of the context.
        E: of each needle, in the order of the values.
        D: as many tokens each, at about the same depths: part of no needle, without any
            answer; fewer than needles where there is no room.
        values: what the needles hold.
    """

    name: str
    task: str
    tokens: int
    E: tuple[Span, ...]
    D: tuple[Span, ...]
    values: tuple[str, ...]


def evidence(example: Example, chat: ChatTemplate) -> Evidence:
    """Find an example's needles and distractors among its tokens."""
    question = example.questions[0]
    tokens = len(first_prompt(chat, example, question, "context-only").context_ids)
    spans = TokenSpans(chat, example.context)
    # The text is the last thing in a context: the template's tokens stand before it.
    before = tokens - spans.count
    return Evidence(
        name=example.name,
        task=example.task,
        tokens=tokens,
        E=_shifted(spans, example.needles, before),
        D=_shifted(spans, _distractors(example, spans), before),
        values=question.references,
    )


def write_evidence(path: Path, examples: Iterable[Example], chat: ChatTemplate) -> None:
    """Write one JSON object a line for each example: the fields of `Evidence`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as lines:
        for example in examples:
            lines.write(json.dumps(asdict(evidence(example, chat))) + "\n")


def _distractors(example: Example, spans: TokenSpans) -> tuple[Span, ...]:
    if example.distractors:
        return example.distractors
    answers = [ref for question in example.questions for ref in question.references]
    whole = (0, len(example.context))
    stretches = Stretches(spans, example.context, whole, tuple(answers))
    return stretches.like(example.needles)


def _shifted(spans: TokenSpans, characters: Sequence[Span], by: int) -> tuple[Span, ...]:
    tokens = (spans.covering(span) for span in characters)
    return tuple((first + by, end + by) for first, end in tokens)
