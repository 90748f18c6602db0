"""Math.Find: extremes and median of a list of numbers (SCBench, section 3; InfiniteBench).

The original puts the first question before the list too. Here the list comes alone, for it
is compressed before any question is known; every question has the original's later form.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.ruler.fitting import fit
from criticalkv.services.evaluation.ruler.order import Order
from criticalkv.services.evaluation.ruler.sources import Sources
from criticalkv.shared.errors import ConfigError

TASK = "math_find"
RANKS = (
    *("largest number", "second largest number", "third largest number"),
    *("smallest number", "second smallest number", "third smallest number"),
    "median number",
)
INPUT = "You should answer with only one number, no other words. The {rank} of the list is: "
MAX_TOKENS = 5
SPARE_TOKENS = 3  # more than the digits: the original allows 5 tokens for two digits
FEWEST = 7
"""Numbers enough for every rank to be another one."""
_ASKED = re.compile(r"The .+ is")


def ask(text: str, answer: float, max_tokens: int = MAX_TOKENS) -> Question:
    """Return a question as the benchmark puts and judges it.

    Args:
        text: "… The largest number of the list is: ".
        answer: an integer, or a median between two.
        max_tokens: most tokens of an answer.

    Raises:
        ValueError: if the text does not say which number is asked for.
    """
    found = _ASKED.search(text)
    if found is None:
        raise ValueError('the question has no "The … is"')
    which = found.group().lower().removesuffix(" is")
    return Question(f"What is {which}?\n\n{text}", (str(answer),), "number_match", max_tokens)


def in_context(numbers: Sequence[float]) -> str:
    """Return the context of a list."""
    return f"{list(numbers)}\n\n"


def math_find(sources: Sources, order: Order, turns: int) -> Example:
    """Make an example of different numbers; its context is the same for any number of turns.

    Context, first question and answer take the order's length: at most, and less than two
    numbers less. The original draws from 0 to 99, many times each; here no two are the same,
    so they have more digits. Their count is odd: the median is one of them.

    Args:
        sources: count the tokens.
        order: which example.
        turns: ranks that are asked for, one after another, all different.

    Raises:
        ConfigError: if there are not so many ranks, or not even seven numbers fit.
    """
    if turns > len(RANKS):
        raise ConfigError(f"{TASK} has no more than {len(RANKS)} turns", param="turns")
    rng, digits = order.rng(), len(str(order.length))
    ranks = rng.sample(RANKS, len(RANKS))[:turns]
    # A number and its comma are two tokens or more.
    pool = rng.sample(range(10**digits), max(FEWEST, order.length // 2))

    def build(pairs: int) -> Example:
        numbers = pool[: 2 * pairs + 1]
        asked = tuple(_question(rank, numbers, digits + SPARE_TOKENS) for rank in ranks)
        return Example(TASK, order.name, in_context(numbers), asked, length=order.length)

    each, least = sources.counts(", ")(f"{pool[0]}, {pool[1]}"), FEWEST // 2
    sizes = itertools.repeat(each, (len(pool) - 1) // 2 - least)
    return fit(build, sources.chat, order.length, sizes, least)


def _question(rank: str, numbers: Sequence[int], max_tokens: int) -> Question:
    ascending = sorted(numbers)
    middle = ascending[len(ascending) // 2]
    ranked = (*ascending[:-4:-1], *ascending[:3], middle)
    return ask(INPUT.format(rank=rank), ranked[RANKS.index(rank)], max_tokens)
