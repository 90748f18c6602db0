"""Needles in a haystack: numbers hidden in essays, asked for after compression."""

from __future__ import annotations

import random
import re
from pathlib import Path

from criticalkv.services.evaluation.case import (
    ESSAYS,
    Case,
    context_ids,
    essays_text,
    question_ids,
    shorten,
)
from criticalkv.shared.model.chat import ChatTemplate

INSTRUCTION = (
    "Some special magic numbers are hidden within the following text. Memorize them. I will "
    "quiz you about them afterwards.\n\n"
)
KEYS = (
    *("Lisbon", "Nairobi", "Oslo", "Quito", "Hanoi", "Dublin", "Kyoto", "Lima"),
    *("Tunis", "Perth", "Cairo", "Bergen", "Ghent", "Turin", "Accra", "Sofia"),
)
NEEDLE_TOKENS = 25  # at most; room that the haystack leaves
FRAME_TOKENS = 60  # instruction and template


class Needles:
    """Makes cases; the same seed always makes the same one."""

    def __init__(self, chat: ChatTemplate, data: Path | None = None) -> None:
        """Read the haystack: essays in `data`, or Python's own language reference."""
        self.haystack, text = essays_text(data)
        between = "\n" if self.haystack == ESSAYS else r"\n\s*\n"
        self._chat = chat
        self._paragraphs = [p for p in re.split(between, text) if p[80:]]

    def case(self, seed: int, needles: int, tokens: int) -> Case:
        """Hide `needles` numbers in about `tokens` tokens; one of them is asked for."""
        rng = random.Random(f"{needles}-{seed}")
        room = tokens - FRAME_TOKENS - NEEDLE_TOKENS * needles
        sentences = shorten(self._sentences(rng), self._chat, room)
        keys = rng.sample(KEYS, needles)
        numbers = [str(rng.randrange(10**6, 10**7)) for _ in keys]
        for key, number in zip(keys, numbers, strict=True):
            where = rng.randrange(len(sentences) + 1)
            sentences.insert(where, f"The special magic number for {key} is: {number}.")
        asked = rng.randrange(needles)
        question, prefix = _question(keys[asked])
        return Case(
            f"niah_{'single' if needles == 1 else 'multikey'}-{seed}",
            tuple(context_ids(self._chat, INSTRUCTION + " ".join(sentences))),
            tuple(question_ids(self._chat, question, prefix)),
            tuple(self._chat.encode_content(" " + numbers[asked])),
        )

    def _sentences(self, rng: random.Random) -> list[str]:
        first = rng.randrange(len(self._paragraphs))
        paragraphs = self._paragraphs[first:] + self._paragraphs[:first]
        joined = (" ".join(p.split()) for p in paragraphs)
        return [s for p in joined for s in re.split(r"(?<=[.!?;:]) ", p) if s]


def _question(key: str) -> tuple[str, str]:
    return (
        f"What is the special magic number for {key} mentioned in the provided text?",
        f"The special magic number for {key} mentioned in the provided text is:",
    )
