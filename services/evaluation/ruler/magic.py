"""Magic numbers and words: what RULER's needles hide, and under which keys."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from typing import Literal

from criticalkv.services.evaluation.ruler.wordlists import word_list

Kind = Literal["numbers", "words", "uuids"]


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**6, 10**7))


def _word(rng: random.Random) -> str:
    return f"{rng.choice(word_list('adjectivelist'))}-{rng.choice(word_list('nounlist'))}"


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_MAKERS: dict[Kind, Callable[[random.Random], str]] = {
    "numbers": _number,
    "words": _word,
    "uuids": _uuid,
}


def magic(rng: random.Random, kind: Kind, refused: Callable[[str], bool]) -> str:
    """Draw one until it is not refused.

    Args:
        kind: "numbers" have seven digits, "words" are an adjective and a noun such as
            "able-bear", "uuids" are of version 4.
    """
    made = _MAKERS[kind](rng)
    while refused(made):
        made = _MAKERS[kind](rng)
    return made
