"""Which tokens of a context cover which of its characters."""

from __future__ import annotations

import bisect

from criticalkv.services.evaluation.example import Span
from criticalkv.shared.model.chat import ChatTemplate


class TokenSpans:
    """The tokens of a context's text, without the chat template's.

    Attributes:
        count: of tokens.
    """

    def __init__(self, chat: ChatTemplate, context: str) -> None:
        offsets = chat.content_offsets(context)
        self._starts = [start for start, _ in offsets]
        self._ends = [end for _, end in offsets]
        self.count = len(offsets)

    def covering(self, span: Span) -> Span:
        """Return the tokens [first, end) that have any of the characters."""
        start, end = span
        return bisect.bisect_right(self._ends, start), bisect.bisect_left(self._starts, end)

    def characters(self, tokens: Span) -> Span:
        """Return the characters of the tokens [first, end); at least one token."""
        first, end = tokens
        return self._starts[first], self._ends[end - 1]
