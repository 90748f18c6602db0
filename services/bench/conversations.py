"""Conversations over documents that several of them share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from criticalkv.services.bench.load_client import Ask, Asker, Record


@dataclass(frozen=True)
class Loop:
    """How much the clients say.

    Attributes:
        clients: that talk at the same time.
        turns: of each conversation.
        conversations: of each client, one after the other.
        documents: in all; a conversation is about one of them.
        context_tokens: of a document.
        question_tokens: of each question.
        output_tokens: of each answer, at most.
        think_time_s: mean pause before a further turn, drawn from an exponential distribution.
    """

    clients: int = 4
    turns: int = 4
    conversations: int = 1
    documents: int = 2
    context_tokens: int = 1024
    question_tokens: int = 16
    output_tokens: int = 32
    think_time_s: float = 0.0

    @property
    def requests(self) -> int:
        """Of all clients."""
        return self.clients * self.conversations * self.turns


@dataclass(frozen=True)
class Conversation:
    """Questions about a document.

    Attributes:
        loop: how long its parts are.
        document: its text.
        questions: one for each turn.
        pauses_s: before each turn.
    """

    loop: Loop
    document: str
    questions: Sequence[str]
    pauses_s: Sequence[float]

    def ask(self, turn: int, before: Record | None, asker: Asker) -> Ask:
        """Return a turn's request.

        Args:
            turn: from 0 on.
            before: the answer to go on from; None = begin with the document.
        """
        question, loop = self.questions[turn], self.loop
        if before is None:
            parts = (self.document, question)
            return asker.ask(parts, 1, loop.context_tokens, loop.output_tokens)
        handle = before.handle
        body = asker.body(question, loop.output_tokens, context_id=handle)
        return Ask(body, context=handle, context_tokens=before.prompt_tokens)


def conversations(loop: Loop, asker: Asker, seed: int) -> list[list[Conversation]]:
    """Return the conversations of each client; neighbours are about different documents.

    Args:
        seed: of the pauses.
    """
    return [
        [
            _conversation(loop, asker, seed, client + loop.clients * number)
            for number in range(loop.conversations)
        ]
        for client in range(loop.clients)
    ]


def _conversation(loop: Loop, asker: Asker, seed: int, number: int) -> Conversation:
    draw, words = random.Random(f"{seed}/pauses {number}"), asker.words
    mean = loop.think_time_s
    return Conversation(
        loop=loop,
        document=words.text(f"document {number % loop.documents}", loop.context_tokens),
        questions=[
            words.text(f"question {number} {turn}", loop.question_tokens)
            for turn in range(loop.turns)
        ],
        pauses_s=[0.0, *(draw.expovariate(1.0) * mean for _ in range(loop.turns - 1))],
    )
