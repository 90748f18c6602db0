"""Haystacks: text in which something is hidden."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from criticalkv.services.evaluation.case import essays_text, read_text
from criticalkv.shared.errors import ConfigError

Kind = Literal["noise", "essay"]
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's noise, one line of it."""
_ENDS = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
_FEWEST_WORDS = 4  # headings and rules are no sentences


@dataclass(frozen=True)
class Haystack:
    """Sentences that follow each other, again and again.

    Attributes:
        kind: "noise" repeats one line; "essay" goes through long texts.
        sentences: without line ends.
        joiner: stands between two of them.
    """

    kind: Kind
    sentences: tuple[str, ...]
    joiner: str

    def pieces(self, rng: random.Random) -> Iterator[str]:
        """Yield sentences without end, from a place that `rng` chooses."""
        first = rng.randrange(len(self.sentences))
        return itertools.chain(self.sentences[first:], itertools.cycle(self.sentences))

    def mentions(self, word: str) -> bool:
        """Return whether a word, or a number, is part of the text, in any case."""
        return word.lower() in self._text

    @cached_property
    def _text(self) -> str:
        return self.joiner.join(self.sentences).lower()


def noise() -> Haystack:
    """Return RULER's noise: one line of five sentences."""
    return Haystack("noise", (NOISE,), "\n")


def essays(data: Path | None = None, own: Path | None = None) -> Haystack:
    """Return the user's essays, or a text in the public domain.

    Args:
        data: folder of data files, for its `inaugural.txt`.
        own: the user's text, or a folder of them, `*.txt`; instead of `data`.

    Raises:
        ConfigError: if there is no such text, or no sentence in it.
    """
    if own is not None:
        return _haystack("\n\n".join(map(read_text, _texts(own))), own.name)
    name, text = essays_text(data)
    return _haystack(text, name)


def _haystack(text: str, source: str) -> Haystack:
    sentences = (" ".join(piece.split()) for piece in _ENDS.split(text))
    kept = tuple(s for s in sentences if len(s.split()) >= _FEWEST_WORDS)
    if not kept:
        raise ConfigError(f"{source} has no sentences (--essays)", param="essays")
    return Haystack("essay", kept, " ")


def _texts(own: Path) -> list[Path]:
    return sorted(own.glob("*.txt")) if own.is_dir() else [own]
