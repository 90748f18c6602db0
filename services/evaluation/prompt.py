"""An example's tokens, cut where its context ends: the same in-process and in the service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.shared.model.chat import ChatTemplate, Message, Part

Setting = Literal["context-only", "context+question"]
"""Whether the policy sees the context alone, or the first question too."""
ROLES = ("user", "assistant")
ASKS_ALL = ("string_match_all",)
"""Metrics whose references are parts of one answer, instead of alternatives."""


@dataclass(frozen=True)
class Prompt:
    """Token ids in the order in which the model runs them.

    Attributes:
        context_ids: compressed.
        question_ids: run on the compressed context; the answer follows.
    """

    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]


def first_message(example: Example, question: Question, setting: Setting) -> Message:
    """Return the user's first message, with a breakpoint where compression ends."""
    whole = setting == "context+question"
    return Message("user", (Part(example.context, not whole), Part(question.text, whole)))


def first_prompt(
    chat: ChatTemplate, example: Example, question: Question, setting: Setting
) -> Prompt:
    """Return the tokens of a context and the first question about it."""
    return _prompt(chat, [first_message(example, question, setting)], question)


def gold_answer(question: Question) -> Message:
    """Return the right answer as the assistant's message: its prefix, then the rest.

    Two parts, even where the prefix is empty: so a stored turn, whose text is one part, never
    stands for it. That one may have been computed from the context at another tier.
    """
    said = ", ".join(
        question.references if question.metric in ASKS_ALL else question.references[:1]
    )
    prefix = question.answer_prefix
    space = " " if prefix and not prefix[-1].isspace() and not said[:1].isspace() else ""
    return Message("assistant", (Part(prefix), Part(space + said)))


def gold_messages(example: Example, index: int, setting: Setting) -> list[Message]:
    """Return the conversation up to a question, its earlier ones answered right.

    Args:
        index: of the question, from 0.
    """
    first, *others = example.questions[: index + 1]
    messages = [first_message(example, first, setting)]
    for before, question in zip(example.questions, others, strict=False):
        messages += [gold_answer(before), Message("user", (Part(question.text),))]
    return messages


def gold_prompt(chat: ChatTemplate, example: Example, index: int, setting: Setting) -> Prompt:
    """Return the tokens of a context, and of the conversation up to a question after it.

    Args:
        index: of the question, from 0; 0 is `first_prompt`.
    """
    return _prompt(chat, gold_messages(example, index, setting), example.questions[index])


def _prompt(chat: ChatTemplate, messages: list[Message], question: Question) -> Prompt:
    """Cut a conversation's tokens after the breakpoint; the answer's prefix ends them."""
    pieces = chat.render(messages, add_generation_prompt=True)
    end = 1 + next(i for i, piece in enumerate(pieces) if piece.breakpoint)
    context = [token for piece in pieces[:end] for token in piece.ids]
    asked = [token for piece in pieces[end:] for token in piece.ids]
    return Prompt(tuple(context), (*asked, *chat.encode_content(question.answer_prefix)))


def next_ids(chat: ChatTemplate, question: Question) -> tuple[int, ...]:
    """Return the tokens of a further question, after an answer that the model gave.

    The answer's node says what is pending before them.
    """
    pieces = chat.continue_(ROLES, False, [Message("user", (Part(question.text),))])
    asked = [token for piece in pieces for token in piece.ids]
    return (*asked, *chat.encode_content(question.answer_prefix))
