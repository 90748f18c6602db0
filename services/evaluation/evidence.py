"""Evidence: which tokens of a context hold an answer, and which are like them but do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
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
        E: of each needle: in the order of the values where each holds one; documents in the
            order of the text.
        D: as many tokens each of the haystack, at about the same depths: part of no needle,
            asked for or not, without any answer; fewer than needles where there is no room.
        values: what the needles hold, of all questions, in their order.
    """

    name: str
    task: str
    tokens: int
    E: tuple[Span, ...]
    D: tuple[Span, ...]
    values: tuple[str, ...]


def evidence(example: Example, chat: ChatTemplate) -> Evidence:
    """Find an example's needles and distractors among its tokens."""
    prompt = first_prompt(chat, example, example.questions[0], "context-only")
    tokens = len(prompt.context_ids)
    spans = TokenSpans(chat, example.context)
    # The text is the last thing in a context: the template's tokens stand before it.
    before = tokens - spans.count
    return Evidence(
        name=example.name,
        task=example.task,
        tokens=tokens,
        E=_shifted(spans, example.needles, before),
        D=_shifted(spans, _distractors(example, spans), before),
        values=_answers(example),
    )


def write_evidence(
    path: Path, examples: Iterable[Example], chat: ChatTemplate, tell: Callable[[str], object]
) -> None:
    """Write one JSON object a line for each example with needles: the fields of `Evidence`.

    Args:
        tell: called with a line about each task that has none.
    """
    without: dict[str, None] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as lines:
        for example in examples:
            if example.needles:
                lines.write(json.dumps(asdict(evidence(example, chat))) + "\n")
            else:
                without[example.task] = None
    for task in without:
        tell(f"no evidence of {task}: no spans of its contexts are known to hold the answers")


def _distractors(example: Example, spans: TokenSpans) -> tuple[Span, ...]:
    context = example.context
    haystack = example.haystack or (0, len(context))
    stretches = Stretches(spans, context, haystack, _answers(example))
    return stretches.like(example.needles, example.decoys)


def _answers(example: Example) -> tuple[str, ...]:
    return tuple(ref for question in example.questions for ref in question.references)


def _shifted(spans: TokenSpans, characters: Sequence[Span], by: int) -> tuple[Span, ...]:
    tokens = (spans.covering(span) for span in characters)
    return tuple((first + by, end + by) for first, end in tokens)
