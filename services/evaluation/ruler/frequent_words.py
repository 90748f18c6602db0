"""Frequent words: the three most frequent of a coded text (RULER, section 3).

Numbers and texts are those of RULER's `freq_words_extraction.py` and `constants.py`.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, repeat

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.ruler.fitting import fit
from criticalkv.services.evaluation.ruler.order import Order
from criticalkv.services.evaluation.ruler.sources import Sources

TASK = "fwe"
INSTRUCTION = (
    "Read the following coded text and track the frequency of each coded word. Find the three "
    "most frequently appeared coded words. "
)
QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
METRIC = "string_match_all"
MAX_TOKENS = 50
ASKED = 3
DOTS = "..."  # more frequent than any word, and to be ignored
ALPHA = 2.0
ZETA = math.pi**2 / 6  # ζ(ALPHA)
LETTERS = 6
TOKENS_PER_WORD = 50  # of the length: so many different words there are
LEAST = 53  # from here on the fourth word is always more frequent than the fifth


def frequent_words(sources: Sources, order: Order) -> Example:
    """Make an example of the task.

    Raises:
        ConfigError: if the length is too short, naming the least.
    """
    rng = order.rng()
    words = _draw(rng, max(ASKED + 2, order.length // TOKENS_PER_WORD))
    build = partial(_example, order, words, rng.getrandbits(64))
    count = sources.counts(" ")
    size = sum(count(word) * _share(k) for k, word in enumerate(words, 1))
    return fit(build, sources.chat, order.length, _whole(size), LEAST)


def coded_text(words: Sequence[str], total: int, shuffle: int) -> str:
    """Return a text in which words are as often as their rank says.

    Args:
        words: by rank k = 1, 2, …; each is ⌊total · k^-α ÷ ζ(α)⌋ times in the text.
        total: words of a text that had all ranks.
        shuffle: seed of the words' order.
    """
    text = [word for k, word in enumerate(words, 1) for _ in range(int(total * _share(k)))]
    random.Random(shuffle).shuffle(text)
    return " ".join(text)


def _example(order: Order, words: Sequence[str], shuffle: int, total: int) -> Example:
    context = INSTRUCTION + coded_text(words, total, shuffle)
    asked = tuple(words[1 : 1 + ASKED])
    question = Question(QUESTION, asked, METRIC, MAX_TOKENS, PREFIX)
    return Example(TASK, order.name, context, (question,), order.length)


def _share(rank: int) -> float:
    return float(rank**-ALPHA / ZETA)


def _whole(size: float) -> Iterator[int]:
    """Yield whole numbers, at least 1 each, of the mean `size`."""
    ends = accumulate(repeat(size))
    return (max(1, int(end) - int(end - size)) for end in ends)


def _draw(rng: random.Random, count: int) -> list[str]:
    """Return the dots and different words of six letters, `count` in all."""
    words: dict[str, None] = {DOTS: None}
    while len(words) < count:
        words["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
    return list(words)
