"""Distractors: stretches of a context that are like its needles, without any answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from criticalkv.services.evaluation.example import Span
from criticalkv.services.evaluation.token_spans import TokenSpans


@dataclass(frozen=True)
class Stretches:
    """Where distractors may be.

    Attributes:
        tokens: of the context.
        context: its text.
        within: characters that distractors' tokens have, and no others.
        references: that none of them may contain, in any case.
    """

    tokens: TokenSpans
    context: str
    within: Span
    references: tuple[str, ...]

    def like(self, needles: Sequence[Span], avoid: Sequence[Span] = ()) -> tuple[Span, ...]:
        """Return a distractor for each needle: as many tokens, as near as there is one.

        Args:
            needles: characters that the answers are in.
            avoid: characters that no distractor has any token of; the needles too.

        Returns:
            characters; fewer than needles where there is no room.
        """
        taken = [self.tokens.covering(span) for span in (*needles, *avoid)]
        found = []
        for needle in needles:
            for stretch in self._nearest(self.tokens.covering(needle), taken):
                taken.append(stretch)
                found.append(self.tokens.characters(stretch))
                break
        return tuple(found)

    def _nearest(self, needle: Span, taken: Sequence[Span]) -> Iterator[Span]:
        """Yield stretches of tokens, the nearest first, that are free and hold no answer."""
        first, end = needle
        low, high = self.tokens.covering(self.within)
        for distance in range(1, max(first - low, high - end) + 1):
            for start in (first - distance, first + distance):
                stretch = (start, start + end - first)
                if low <= start and stretch[1] <= high and self._is_free(stretch, taken):
                    yield stretch

    def _is_free(self, stretch: Span, taken: Sequence[Span]) -> bool:
        start, end = stretch
        if any(start < other_end and other < end for other, other_end in taken):
            return False
        characters = self.tokens.characters(stretch)
        text = self.context[slice(*characters)].lower()
        inside = self.within[0] <= characters[0] and characters[1] <= self.within[1]
        exact = self.tokens.covering(characters) == stretch
        return inside and exact and not any(r.lower() in text for r in self.references)
