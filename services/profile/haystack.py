"""Haystacks: a fact hidden in a long text, a question about it, and the right answer.

The text is public-domain: the topics of Python's own documentation. Tokens are drawn
and placed by a seed; this module knows no model beyond its tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate, Message, Part
from criticalkv.shared.python_reference import python_reference

CITIES = ("Paris", "Lima", "Cairo", "Oslo", "Quito", "Delhi", "Seoul", "Tunis", "Rome", "Perth")
FACTS = 3
"""Needles of each haystack; one is asked for, so that heads have to look at the key."""
INTRODUCTION = "Some secret numbers are hidden in the following text.\n\n"
FACT = "The secret number of {} is"
QUESTION = "\n\nWhat is the secret number of {}?"
SHORTEST = 32
"""Tokens of text that a haystack has at least."""


@dataclass(frozen=True)
class Sample:
    """One haystack with its teacher-forced answer.

    Attributes:
        token_ids: prompt and answer.
        needle: positions of the fact's value, the tokens that are to be copied.
        answer: positions of the copy; it ends the sample.
    """

    token_ids: tuple[int, ...]
    needle: range
    answer: range


def make_samples(chat: ChatTemplate, count: int, length: int, seed: int) -> Iterator[Sample]:
    """Yield samples of `length` tokens whose needles are spread evenly over the depth.

    Raises:
        ConfigError: if a haystack of that length has no room for its needles.
    """
    draw = random.Random(seed)
    for index in range(count):
        yield _make_sample(chat, (index + 0.5) / count, length, draw)


def _make_sample(chat: ChatTemplate, depth: float, length: int, draw: random.Random) -> Sample:
    cities = draw.sample(CITIES, FACTS)
    values = [chat.encode_content(f" {draw.randrange(10**6, 10**7)}") for _ in cities]
    leads = [chat.encode_content(f"\n{FACT.format(city)}") for city in cities]
    facts = [
        lead + value + chat.encode_content(".\n") for lead, value in zip(leads, values, strict=True)
    ]
    before, after = _frame(chat, cities[0])
    room = length - len(before) - sum(map(len, facts)) - len(after) - len(values[0])
    if room < SHORTEST:
        raise ConfigError(
            f"length is {length}; haystacks need at least {length + SHORTEST - room} tokens",
            param="length",
        )
    # The fact that is asked for, then the others, anywhere.
    places = [int(depth * room), *(draw.randrange(room) for _ in facts[1:])]
    text, starts = _mix(_text(chat, room, draw), facts, places)
    begin = len(before) + starts[0] + len(leads[0])
    ids = (*before, *text, *after, *values[0])
    count = len(values[0])
    return Sample(ids, range(begin, begin + count), range(len(ids) - count, len(ids)))


def _mix(
    text: Sequence[int], facts: Sequence[list[int]], places: Sequence[int]
) -> tuple[list[int], dict[int, int]]:
    """Insert facts at places of a text; return it, and where each fact starts then."""
    out: list[int] = []
    starts: dict[int, int] = {}
    done = 0
    for k in sorted(range(len(facts)), key=lambda k: places[k]):
        out += text[done : places[k]]
        done, starts[k] = places[k], len(out)
        out += facts[k]
    return out + list(text[done:]), starts


def _frame(chat: ChatTemplate, city: str) -> tuple[list[int], list[int]]:
    """Tokens before the text, and from its end to where the answer's value begins."""
    pieces = chat.render([Message("user", (Part(" "),))], add_generation_prompt=True)
    at = next(i for i, piece in enumerate(pieces) if piece.kind == "content")
    before = [token for piece in pieces[:at] for token in piece.ids]
    after = [token for piece in pieces[at + 1 :] for token in piece.ids]
    question = chat.encode_content(QUESTION.format(city))
    lead = chat.encode_content(FACT.format(city))
    return before + chat.encode_content(INTRODUCTION), question + after + lead


def _text(chat: ChatTemplate, room: int, draw: random.Random) -> list[int]:
    """`room` tokens of text from the start of some line on."""
    corpus = python_reference()
    start = corpus.index("\n", draw.randrange(len(corpus) // 2)) + 1
    ids = chat.encode_content(corpus[start : start + 16 * room])
    while len(ids) < room:
        ids += ids
    return ids[:room]
