"""Fits a text to a length in tokens of the model's own tokenizer."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.prompt import first_prompt
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate

_STEPS = 8  # by the mean size of a unit; then the interval is halved
_KNOWN_PIECES = 100_000
_FAR = 2  # estimates are never this many times too large


def prompt_tokens(chat: ChatTemplate, example: Example) -> int:
    """Return all tokens of an example with its first question, the answer's included.

    RULER's `max_seq_length` counts the same: chat template, context, question, answer
    prefix, and the most tokens that are generated.
    """
    question = example.questions[0]
    prompt = first_prompt(chat, example, question, "context-only")
    return len(prompt.context_ids) + len(prompt.question_ids) + question.max_tokens


class TokenCounts:
    """Counts the tokens of short pieces, those that come again only once.

    What follows another piece may be cut otherwise: an estimate.
    """

    def __init__(self, chat: ChatTemplate, joiner: str) -> None:
        self._chat, self._joiner = chat, joiner
        self._count = lru_cache(_KNOWN_PIECES)(self._encode)

    def __call__(self, piece: str) -> int:
        """Return the tokens of a piece and the joiner before it, at least 1."""
        return self._count(piece)

    def _encode(self, piece: str) -> int:
        return max(1, len(self._chat.encode_content(self._joiner + piece)))


@dataclass(frozen=True)
class Fitted:
    """An example that fits into a length.

    Attributes:
        units: of its text.
        left: tokens that it leaves free.
    """

    example: Example
    units: int
    left: int


def fit(
    build: Callable[[int], Example],
    chat: ChatTemplate,
    length: int,
    sizes: Iterable[int],
    least: int = 1,
) -> Example:
    """Return the example with the most units that fits into a length: see `most`."""
    return most(build, chat, length, sizes, least).example


def most(
    build: Callable[[int], Example],
    chat: ChatTemplate,
    length: int,
    sizes: Iterable[int],
    least: int,
) -> Fitted:
    """Find the example with the most units that fits into `length` tokens.

    Args:
        build: makes the example of so many units; the same number, the same example.
        chat: counts the tokens.
        length: of prompt and answer, see `prompt_tokens`; the result is at most as long,
            and one more unit would be too long unless `sizes` ends before.
        sizes: about how many tokens the units after the first `least` add, in order and
            at least 1 each; may be endless. No more units than it has are built.
        least: units without which there is no example.

    Raises:
        ConfigError: if that is too long already, naming the least length.
    """
    made = cache(build)

    @cache
    def room(units: int) -> int:
        return length - prompt_tokens(chat, made(units))

    if room(least) < 0:
        raise ConfigError(
            f"{made(least).task} takes at least {length - room(least)} tokens, not {length}",
            param="lengths",
        )
    totals = list(_totals(sizes, _FAR * (room(least) + 1)))
    units = _most(room, least, least + len(totals) + 1, totals)
    return Fitted(made(units), units, room(units))


def _totals(sizes: Iterable[int], enough: int) -> Iterator[int]:
    """Yield the tokens of 1, 2, … units, until they are surely too many."""
    return itertools.takewhile(lambda total: total <= enough, itertools.accumulate(sizes))


def _most(room: Callable[[int], int], fits: int, fails: int, totals: list[int]) -> int:
    """Return the largest number of units with room left, between one that fits and one not.

    Starts where the estimate ends, and goes on by the mean size of a unit.
    """
    mean = totals[-1] / len(totals) if totals else 1.0
    asked = fits + bisect.bisect_right(totals, room(fits))
    tries = 0
    while fails - fits > 1:
        units = min(max(asked, fits + 1), fails - 1) if tries < _STEPS else (fits + fails) // 2
        left = room(units)
        fits, fails = (units, fails) if left >= 0 else (fits, units)
        asked, tries = units + round(left / mean), tries + 1
    return fits
