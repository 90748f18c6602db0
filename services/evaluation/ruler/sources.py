"""What examples are made of: the model's tokenizer and the user's texts."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from criticalkv.services.evaluation.ruler.fitting import TokenCounts
from criticalkv.services.evaluation.ruler.haystack import Haystack, Kind, essays, noise
from criticalkv.shared.model.chat import ChatTemplate


class Sources:
    """Opens what is asked for, once.

    Attributes:
        chat: template and tokenizer that lengths are counted with.
        data: folder of data files.
        own: the user's text for haystacks, or a folder of them.
    """

    def __init__(
        self, chat: ChatTemplate, data: Path | None = None, own: Path | None = None
    ) -> None:
        self.chat, self.data, self.own = chat, data, own
        self._counts: dict[str, TokenCounts] = {}

    def haystack(self, kind: Kind) -> Haystack:
        """Return RULER's noise; or the user's essays, or a text in the public domain."""
        return self._noise if kind == "noise" else self._essays

    def counts(self, joiner: str) -> TokenCounts:
        """Return the counter of pieces that follow `joiner`."""
        return self._counts.setdefault(joiner, TokenCounts(self.chat, joiner))

    @cached_property
    def _noise(self) -> Haystack:
        return noise()

    @cached_property
    def _essays(self) -> Haystack:
        return essays(self.data, self.own)
