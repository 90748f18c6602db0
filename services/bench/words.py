"""Texts of an exact number of tokens, made of words that are one token each."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Sequence
from functools import cache
from pydoc_data.topics import topics

from criticalkv.shared.errors import ConfigError

MIN_WORDS = 16
PROBE_WORDS = 2048


class Words:
    """A tokenizer's one-token words, and texts that are drawn from them.

    Args:
        encode: text to token ids, as in a content part of a prompt.
        seed: another one gives other texts.

    Raises:
        ConfigError: if the tokenizer has too few such words.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], seed: int) -> None:
        self._seed = seed
        self._words, self.extra = _one_token_words(encode)

    def text(self, name: str, tokens: int) -> str:
        """Return the text of this name; of two lengths the shorter begins the longer.

        Args:
            name: what tells texts apart.
            tokens: of it in the middle of a text; a tokenizer that puts something before
                each text has `extra` more in a whole one.
        """
        draw = random.Random(f"{self._seed}/{name}")
        return "".join(draw.choices(self._words, k=tokens))


def _one_token_words(encode: Callable[[str], Sequence[int]]) -> tuple[list[str], int]:
    """Return words, and how many tokens there are before the first one of a text."""
    for candidates in (_english(), tuple(string.ascii_lowercase)):
        for extra in (0, 1):
            words = [word for word in candidates if len(encode(word)) == extra + 1]
            if len(words) >= MIN_WORDS and _add_up(encode, words, extra):
                return words, extra
    raise ConfigError(
        "the tokenizer has too few words of one token to make texts of", param="model"
    )


def _add_up(encode: Callable[[str], Sequence[int]], words: Sequence[str], extra: int) -> bool:
    """Whether words stay one token each when they follow one another."""
    text = "".join(random.Random(0).choices(words, k=PROBE_WORDS))
    return len(encode(text)) == PROBE_WORDS + extra


@cache
def _english() -> tuple[str, ...]:
    """Words of Python's own language reference, with the space before them."""
    words = set(re.findall(r"\b[a-z]{2,}\b", " ".join(topics.values())))
    return tuple(f" {word}" for word in sorted(words))
