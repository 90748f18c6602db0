"""Common words: ten of a numbered list's words are more often in it (RULER, section 3).

Numbers and texts are those of RULER's `common_words_extraction.py` and `constants.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.ruler.fitting import TokenCounts, most
from criticalkv.services.evaluation.ruler.order import Order
from criticalkv.services.evaluation.ruler.sources import Sources
from criticalkv.services.evaluation.ruler.wordlists import List, word_list
from criticalkv.shared.errors import ConfigError

TASK = "cwe"
INSTRUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
PREFIX = " Answer: The top 10 words that appear most often in the list are:"
METRIC = "string_match_all"
MAX_TOKENS = 120
LISTS: tuple[List, ...] = ("nounlist", "adjectivelist", "verblist")
COMMON = 10
SHORT = 4096  # tokens below which lists are shorter


@dataclass(frozen=True)
class Repeats:
    """How often each common and each other word is in a list."""

    common: int
    other: int


@dataclass(frozen=True)
class Plan:
    """The solved example and the list that is asked about.

    Attributes:
        shown_words: different words of the example, the common ones included.
    """

    shown_words: int
    shown: Repeats
    asked: Repeats


SHORT_PLAN = Plan(20, Repeats(3, 1), Repeats(6, 1))
PLAN = Plan(40, Repeats(10, 3), Repeats(30, 3))


@dataclass(frozen=True)
class WordList:
    """Words, some of them often.

    Attributes:
        words: different ones; the first ten are the common ones.
        shuffle: seed of the order in which they are listed.
    """

    words: Sequence[str]
    repeats: Repeats
    shuffle: int

    @property
    def common(self) -> Sequence[str]:
        """The words that are asked for."""
        return self.words[:COMMON]

    def text(self, others: int) -> str:
        """Return the numbered list with so many other words."""
        other = self.words[COMMON : COMMON + others]
        listed = [*self.common] * self.repeats.common + [*other] * self.repeats.other
        random.Random(self.shuffle).shuffle(listed)
        return _numbered(listed)


def common_words(sources: Sources, order: Order) -> Example:
    """Make an example of the task.

    Raises:
        ConfigError: if the length is too short, naming the least; or if there are too few
            words for it.
    """
    rng = order.rng()
    words = rng.sample(all_words(), len(all_words()))
    plan = SHORT_PLAN if order.length < SHORT else PLAN
    shuffles = rng.getrandbits(64), rng.getrandbits(64)
    shown = WordList(words[: plan.shown_words], plan.shown, shuffles[0])
    asked = WordList(words[plan.shown_words :], plan.asked, shuffles[1])
    build = partial(_example, order, _solved(shown), asked)
    sizes = _sizes(asked, sources.counts(" "))
    made = most(build, sources.chat, order.length, sizes, 1)
    if made.units > len(sizes) and made.left >= max(sizes):
        raise ConfigError(
            f"{TASK}: so long a list needs more words than there are", param="lengths"
        )
    return made.example


@cache
def all_words() -> tuple[str, ...]:
    """Return the words that are drawn from, sorted."""
    return tuple(sorted({word for name in LISTS for word in word_list(name)}))


def _sizes(asked: WordList, count: TokenCounts) -> list[int]:
    """Return about the tokens of each other word after the first."""
    number = count("1000.")
    return [asked.repeats.other * (number + count(word)) for word in asked.words[COMMON + 1 :]]


def _example(order: Order, head: str, asked: WordList, others: int) -> Example:
    context = head + INSTRUCTION + asked.text(others)
    question = Question(QUESTION, tuple(asked.common), METRIC, MAX_TOKENS, PREFIX)
    return Example(TASK, order.name, context, (question,), order.length)


def _solved(shown: WordList) -> str:
    text = INSTRUCTION + shown.text(len(shown.words) - COMMON)
    return f"{text}{QUESTION}{PREFIX} {_numbered(shown.common)}\n"


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
