"""Needles: a value under a key, in one sentence."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from criticalkv.services.evaluation.ruler.magic import Kind, magic


@dataclass(frozen=True)
class Needle:
    """What is hidden.

    Attributes:
        kind: of the value.
    """

    key: str
    value: str
    kind: Kind

    @property
    def sentence(self) -> str:
        """As RULER writes it."""
        return f"One of the special magic {self.kind} for {self.key} is: {self.value}."


class Needles:
    """Draws needles that no other text, and no other needle, mentions."""

    def __init__(
        self, rng: random.Random, keys: Kind, values: Kind, mentioned: Callable[[str], bool]
    ) -> None:
        """Take where randomness comes from, and kinds.

        Args:
            mentioned: whether the haystack has a word already.
        """
        self._rng, self._keys, self._values = rng, keys, values
        self._mentioned = mentioned
        self._hidden: list[str] = []
        self._taken: set[str] = set()

    def hide(self, values: int) -> list[Needle]:
        """Draw a key that will be asked for, perhaps, and its needles."""
        key = self._fresh(self._keys)
        self._hidden.append(key.lower())
        return [Needle(key, self._fresh(self._values), self._values) for _ in range(values)]

    def distract(self) -> Iterator[str]:
        """Yield sentences of other needles, without end."""
        while True:
            key, value = self._fresh(self._keys), self._fresh(self._values)
            yield Needle(key, value, self._values).sentence

    def _fresh(self, kind: Kind) -> str:
        drawn = magic(self._rng, kind, self._refused)
        self._taken.add(drawn.lower())
        return drawn

    def _refused(self, drawn: str) -> bool:
        """Whether it was drawn before, is part of a hidden key, or the other way round."""
        low = drawn.lower()
        parts = any(low in key or key in low for key in self._hidden)
        return parts or low in self._taken or self._mentioned(drawn)
