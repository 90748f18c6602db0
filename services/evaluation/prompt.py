"""An example's tokens, cut where its context ends: the same in-process and in the service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.shared.model.chat import ChatTemplate, Message, Part

Setting = Literal["context-only", "context+question"]
"""Whether the policy sees the context alone, or the first question too."""
ROLES = ("user", "assistant")


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
    pieces = chat.render([first_message(example, question, setting)], add_generation_prompt=True)
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
