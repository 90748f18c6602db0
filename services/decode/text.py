"""Tokens to text, safely: whole characters only, and never a piece of a stop string."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
"""What bytes that are no whole character decode to."""


@dataclass(frozen=True)
class StopMatch:
    """Where a stop string cut the text.

    Attributes:
        kept_tokens: tokens that end before the match.
        leftover: text between the last kept token and the match.
    """

    kept_tokens: int
    leftover: str


class TextStream:
    """Turns the tokens of one turn into text that may be shown.

    Args:
        tokenizer: of the model.
        stop: strings that end the text.
        before: tokens whose text this one goes on after. Without any, decoders like
            SentencePiece's take the space before the first word away. An unfinished
            character at their end is lost.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: tuple[str, ...],
        before: Sequence[int] = (),
    ) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(self._whole(before), skip_special_tokens=True)
        self._stop = stop
        self._text = ""
        self._shown = 0
        # Per token, the length of the text after it. A token inside an unfinished
        # character gets its length when the character is complete.
        self._ends: list[int] = []
        self._open = 0

    def _whole(self, before: Sequence[int]) -> list[int]:
        """Return tokens of the same text up to its last replacement characters.

        A stream that begins with one takes all of it for unfinished, and says it again.
        """
        text = self._backend.decode(list(before), skip_special_tokens=True)
        whole = text.rstrip(REPLACEMENT)
        if whole == text:
            return list(before)
        return list(self._backend.encode(whole, add_special_tokens=False).ids)

    def push(self, token_id: int) -> StopMatch | None:
        """Add a token; return the match if a stop string is now complete."""
        piece = self._step(token_id)
        self._open += 1
        if piece is None:
            return None
        self._text += piece
        self._ends += [len(self._text)] * self._open
        self._open = 0
        return self._match(len(piece))

    def take(self, *, final: bool = False) -> str:
        """Return text that may be shown now; with `final`, all that is left.

        Bytes of a character that never became complete are dropped.
        """
        end = len(self._text) - (0 if final else self._held())
        out = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return out

    @property
    def settled_tokens(self) -> int:
        """Tokens whose whole text has been shown."""
        return bisect_right(self._ends, self._shown)

    def _step(self, token_id: int) -> str | None:
        try:
            return self._stream.step(self._backend, token_id)
        except Exception:
            # The decoder found bytes that can never become a character; it says so with a
            # bare Exception. What it held back is lost; the text goes on from here.
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._backend, token_id)

    def _match(self, added: int) -> StopMatch | None:
        hits = []
        for stop in self._stop:
            start = max(0, len(self._text) - added - len(stop) + 1)
            at = self._text.find(stop, start)
            if at >= 0:
                hits.append(at)
        if not hits:
            return None
        cut = min(hits)
        kept = bisect_right(self._ends, cut)
        leftover = self._text[self._ends[kept - 1] if kept else 0 : cut]
        self._text = self._text[:cut]
        return StopMatch(kept, leftover)

    def _held(self) -> int:
        # The longest end of the text that may still grow into a stop string.
        return max(
            (
                n
                for stop in self._stop
                for n in range(1, len(stop))
                if self._text.endswith(stop[:n])
            ),
            default=0,
        )
