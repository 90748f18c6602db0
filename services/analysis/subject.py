"""What an intervention is tried on: a model, a text, and the heads and queries of interest."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from criticalkv.services.analysis.chosen_heads import chosen_heads
from criticalkv.services.analysis.span import Span
from criticalkv.services.analysis.wanted import Wanted
from criticalkv.services.evaluation.case import context_ids
from criticalkv.shared.config import load_config
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.loader import LoadedModel, load_model


@dataclass(frozen=True)
class Subject:
    """A model with one sequence.

    Attributes:
        model: that runs.
        ids: the text as an open user message.
        first: the first token whose query counts; at least half of the tokens are before it.
        heads: bool [num_layers, num_q_heads], those of interest.
    """

    model: LoadedModel
    ids: tuple[int, ...]
    first: int
    heads: Tensor

    def first_after(self, span: Span) -> int:
        """Return the first token after a span whose query counts.

        Raises:
            ConfigError: if no token follows the span.
        """
        span.check_within(len(self.ids) - 1)
        return max(self.first, span.end)

    def words(self, span: Span) -> str:
        """Return a span's text."""
        return self.model.chat.decode(self.ids[span.begin : span.end])


def subject_of(wanted: Wanted) -> Subject:
    """Load the model, and read the text.

    Raises:
        ConfigError: if a layer or head is not the model's, or the text is too short.
    """
    given = {} if wanted.model is None else {"model": {"path": wanted.model}}
    config = load_config(str(wanted.config) if wanted.config else None, given)
    numbers = [numbered(x) for x in (wanted.layers, wanted.heads, wanted.kv_heads)]
    model = load_model(config.model, wanted.threads)
    heads = chosen_heads(model.spec, *numbers)
    text = wanted.text.read_text(encoding="utf-8", errors="replace")
    ids = tuple(context_ids(model.chat, text))[: min(wanted.tokens, model.spec.max_positions)]
    if len(ids) < 2:
        raise ConfigError("the text has fewer than two tokens", param="text")
    return Subject(model, ids, max(len(ids) - wanted.queries, len(ids) // 2), heads)


def numbered(text: str | None) -> list[int] | None:
    """Read numbers and ranges, such as "0,3-5".

    Raises:
        ConfigError: if the text is not of this form.
    """
    if text is None:
        return None
    found: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", item)
        if match is None:
            raise ConfigError(f"{text!r} is not numbers and ranges such as 0,3-5", param="layers")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found
