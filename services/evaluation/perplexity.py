"""Perplexity: how likely a text's own continuation is after every compressed cache.

Windows are cut from a text: a context, one token that runs after it, and the tokens that
are teacher-forced. No chat template: the text goes on as it does.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from criticalkv.services.evaluation.answer import FULL_CELL, Cell
from criticalkv.services.evaluation.case import essays_text
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.forced import divergence, forced
from criticalkv.services.evaluation.likelihood import Likelihood
from criticalkv.services.evaluation.reading import EVICTION, Reading, check_cells, read_each
from criticalkv.services.local import LocalEngine
from criticalkv.services.local.memory_store import MemoryStore
from criticalkv.shared.config import DecodeConfig, EvictionConfig, PrefillConfig
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.loader import LoadedModel

CONTINUATION = 128
TASK = "perplexity"


@dataclass(frozen=True)
class Window:
    """A piece of a text.

    Attributes:
        name: task, length, number.
        context_ids: compressed.
        next_id: runs on the compressed context; it is not judged.
        answer_ids: what the text goes on with.
    """

    name: str
    context_ids: tuple[int, ...]
    next_id: int
    answer_ids: tuple[int, ...]

    def example(self, model: LoadedModel) -> Example:
        """Return it as a run's journal knows it: in text, with nothing asked."""
        ids = (*self.context_ids, self.next_id, *self.answer_ids)
        return Example(TASK, self.name, model.chat.decode(ids), (), len(self.context_ids))


class Windows:
    """Cuts a text into windows that do not overlap; the same seed gives the same ones."""

    def __init__(self, model: LoadedModel, data: Path | None = None) -> None:
        """Read the text: essays in `data`, or Python's own language reference."""
        self.source, text = essays_text(data)
        self._ids = model.chat.encode_content(text)
        self._opening = _opening(model)

    def take(
        self, num: int, length: int, *, continuation: int = CONTINUATION, seed: int = 0
    ) -> Iterator[Window]:
        """Yield `num` windows; fewer are the first of more.

        Args:
            num: windows.
            length: tokens of a context, the model's own opening token included.
            continuation: tokens that are judged after it.
            seed: of the choice among the windows.

        Raises:
            ConfigError: if the text has not so many.
        """
        own = length - len(self._opening)
        size = own + 1 + continuation
        starts = list(range(0, len(self._ids) - size + 1, size))
        if own < 1 or num > len(starts):
            raise ConfigError(
                f"{self.source} has {len(starts)} windows of {length} + {continuation} tokens, "
                f"{num} are asked for",
                param="num",
            )
        random.Random(f"{seed}-{length}-{continuation}").shuffle(starts)
        for number, start in enumerate(starts[:num]):
            ids = self._ids[start : start + size]
            context = (*self._opening, *ids[:own])
            yield Window(f"{TASK}-{length}-{number}", context, ids[own], tuple(ids[own + 1 :]))


def _opening(model: LoadedModel) -> tuple[int, ...]:
    """The token that the model's tokenizer puts before any text, if it does."""
    ids: list[int] = model.tokenizer("a")["input_ids"]
    return tuple(ids[:1]) if ids[0] == model.tokenizer.bos_token_id else ()


class Perplexity:
    """Measures cells on windows, each window's forward once. One window at a time."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        prefill: PrefillConfig | None = None,
        eviction: EvictionConfig | None = None,
    ) -> None:
        self._model = model
        self._store = MemoryStore()
        self._engine = LocalEngine(
            model,
            self._store,
            prefill=prefill,
            eviction=eviction or EVICTION,
            decode=DecodeConfig(pool_mb=1),  # nothing is decoded here
        )

    def close(self) -> None:
        """End its threads."""
        self._engine.close()

    def check(self, cells: Sequence[Cell]) -> None:
        """Refuse cells that cannot be measured; see Answerer."""
        check_cells(self._engine, cells)

    def measure(self, window: Window, cells: Collection[Cell]) -> Iterator[tuple[Cell, Likelihood]]:
        """Yield each cell's likelihood of a window's continuation.

        Raises:
            CriticalKVError: before the first, of what cannot be computed.
            NumericsError: naming a cell whose log probabilities are not finite.
        """
        every = dict.fromkeys((FULL_CELL, *cells))
        try:
            readings = read_each(self._engine, window.context_ids, every)
            caches = ((cell, readings[cell].cache(self._engine)) for cell in every)
            rows = forced(self._model, caches, [window.next_id], window.answer_ids)
            full = None
            for cell, row in rows:
                full = row if full is None else full
                if cell in cells:
                    yield cell, _likelihood(row, full, window.answer_ids, readings[cell])
        finally:
            self._store.clear()


def _likelihood(row: Tensor, full: Tensor, answer: Sequence[int], reading: Reading) -> Likelihood:
    wanted = torch.tensor(answer, device=row.device)
    return Likelihood(
        nll=-float(row.gather(1, wanted[:, None]).mean()),
        kl=divergence(full, row),
        agreement=float((row.argmax(-1) == full.argmax(-1)).float().mean()),
        tokens=len(answer),
        kept=reading.kept,
        kept_bytes=reading.kept_bytes,
    )
