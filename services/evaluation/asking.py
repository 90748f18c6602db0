"""In which order an example's questions are asked, and after what."""

from __future__ import annotations

from dataclasses import dataclass

from criticalkv.services.evaluation.answer import History
from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.prompt import (
    Prompt,
    Setting,
    first_prompt,
    gold_prompt,
    next_ids,
)
from criticalkv.shared.model.chat import ChatTemplate


@dataclass(frozen=True)
class Step:
    """One question.

    Attributes:
        index: among the example's questions.
        question: what is asked.
        token_ids: run after the context or the answer before, and what is pending there.
        begun: how many of the last of them begin the answer.
    """

    index: int
    question: Question
    token_ids: tuple[int, ...]
    begun: int


Steps = tuple[Step, ...]
"""Questions each of which follows the answer to the one before."""


@dataclass(frozen=True)
class Round:
    """A context and what is asked about it.

    Attributes:
        context_ids: compressed once for all of it.
        conversations: that know nothing of one another.
    """

    context_ids: tuple[int, ...]
    conversations: tuple[Steps, ...]


def rounds(chat: ChatTemplate, example: Example, setting: Setting, history: History) -> list[Round]:
    """Return an example's rounds: one for each context that is compressed.

    Questions that are compressed with the context, and independent, have one each.
    """
    questions = example.questions

    def step(index: int, token_ids: tuple[int, ...]) -> Step:
        begun = len(chat.encode_content(questions[index].answer_prefix))
        return Step(index, questions[index], token_ids, begun)

    if history == "model":
        first = first_prompt(chat, example, questions[0], setting)
        later = (step(i, next_ids(chat, question)) for i, question in enumerate(questions) if i)
        return [Round(first.context_ids, ((step(0, first.question_ids), *later),))]
    by_context: dict[tuple[int, ...], list[Steps]] = {}
    for i in range(len(questions)):
        prompt = _prompt(chat, example, i, setting, history)
        by_context.setdefault(prompt.context_ids, []).append((step(i, prompt.question_ids),))
    return [Round(ids, tuple(found)) for ids, found in by_context.items()]


def _prompt(
    chat: ChatTemplate, example: Example, index: int, setting: Setting, history: History
) -> Prompt:
    if history == "gold":
        return gold_prompt(chat, example, index, setting)
    return first_prompt(chat, example, example.questions[index], setting)
