"""Needle in a haystack: one needle in essays, at each length and each depth."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.ruler.fitting import TokenCounts
from criticalkv.services.evaluation.ruler.needle import Needles
from criticalkv.services.evaluation.ruler.needle_text import NeedleText, Place
from criticalkv.services.evaluation.ruler.passage import Passage
from criticalkv.services.evaluation.ruler.sources import Sources
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate

TASK = "niah"
DEPTHS = tuple(i / 10 for i in range(11))
"""From the haystack's start to its end."""


class Niah:
    """Makes the grid: one needle in one text, moved from depth to depth."""

    def __init__(
        self, chat: ChatTemplate, *, data: Path | None = None, essays: Path | None = None
    ) -> None:
        """Take what lengths are counted with, and where texts are.

        Args:
            chat: the model's template and tokenizer.
            data: folder of data files.
            essays: the user's text for haystacks, or a folder of `*.txt`.
        """
        self._sources = Sources(chat, data, essays)

    def examples(
        self, lengths: Iterable[int], num: int, seed: int, depths: Sequence[float] = DEPTHS
    ) -> Iterator[Example]:
        """Yield `num` examples for each length and depth, when they are asked for.

        Each depends on its length, depth, number and `seed` alone; those that differ in
        depth alone hide the same needle in the same text.

        Args:
            lengths: in tokens, prompt and answer together.
            depths: shares of the haystack's tokens that are before the needle, 0 to 1.

        Raises:
            ConfigError: at once for a depth outside of 0 to 1; for a length that is too
                short, naming the least.
        """
        outside = [depth for depth in depths if not 0 <= depth <= 1]
        if outside:
            raise ConfigError(f"depth {outside[0]:g} is not from 0 to 1", param="depths")
        cells = itertools.product(lengths, depths, range(num))
        return (self._example(length, depth, number, seed) for length, depth, number in cells)

    def _example(self, length: int, depth: float, number: int, seed: int) -> Example:
        rng = random.Random(f"{TASK}-{seed}-{length}-{number}")
        haystack = self._sources.haystack("essay")
        needle, *_ = Needles(rng, "words", "numbers", haystack.mentions).hide(1)
        counts = self._sources.counts(haystack.joiner)
        text = NeedleText(
            task=TASK,
            name=f"{TASK}-{length}-{depth:g}-{number}",
            length=length,
            needles=(needle,),
            depths=(depth,),
            asked=(needle.key,),
            passage=Passage(haystack.pieces(rng), by_words=True),
            joiner=haystack.joiner,
            place=_by_tokens(counts),
        )
        return text.fitted(self._sources.chat, counts)


def _by_tokens(counts: TokenCounts) -> Place:
    def place(sentences: Sequence[str], depth: float) -> int:
        before = [0, *itertools.accumulate(map(counts, sentences))]
        return min(range(len(before)), key=lambda i: abs(before[i] - depth * before[-1]))

    return place
