"""A passage of a haystack that can be made longer, unit by unit."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator


class Passage:
    """Sentences from one place of a haystack on, as many as are asked for.

    A unit is a word of an essay, whose last sentence may be cut short as in RULER, and a
    whole sentence of everything else.
    """

    def __init__(self, sentences: Iterator[str], by_words: bool) -> None:
        """Take the sentences, endless; they are read when they are needed."""
        self._source, self._by_words = sentences, by_words
        self._read: list[str] = []
        self._ends: list[int] = []

    def cut(self, units: int) -> list[str]:
        """Return the sentences of the first `units` units."""
        while not self._ends or self._ends[-1] < units:
            self._more()
        whole = bisect.bisect_right(self._ends, units)
        rest = units - (self._ends[whole - 1] if whole else 0)
        return self._read[:whole] + ([" ".join(self._units(whole)[:rest])] if rest else [])

    def sizes(self, count: Callable[[str], int], first: int) -> Iterator[int]:
        """Yield the tokens of each unit from number `first` on, without end."""
        return (count(unit) for unit in itertools.islice(self._all(), first, None))

    def _all(self) -> Iterator[str]:
        for index in itertools.count():
            while index >= len(self._read):
                self._more()
            yield from self._units(index)

    def _units(self, index: int) -> list[str]:
        sentence = self._read[index]
        return sentence.split(" ") if self._by_words else [sentence]

    def _more(self) -> None:
        self._read.append(next(self._source))
        end = self._ends[-1] if self._ends else 0
        self._ends.append(end + len(self._units(len(self._read) - 1)))
