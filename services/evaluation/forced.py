"""Teacher forcing: what a model says of the same tokens after every cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from torch import Tensor

from criticalkv.services.evaluation.answer import Cell
from criticalkv.services.local.side_by_side import answer_logprobs
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.errors import NumericsError
from criticalkv.shared.model.loader import LoadedModel

LOGIT_BYTES = 256 << 20
"""Most bytes of log probabilities of one batch; at least one cache is in it."""


def forced(
    model: LoadedModel,
    caches: Iterable[tuple[Cell, RaggedCache]],
    question: Sequence[int],
    answer: Sequence[int],
) -> Iterator[tuple[Cell, Tensor]]:
    """Yield each cell's log probabilities of an answer, fp32 [len(answer), vocab], finite.

    Args:
        model: that computed the caches.
        caches: what each cell reads of one context; taken a batch at a time, when needed.
        question: at least one token, before the answer.
        answer: tokens whose predictions are wanted.

    Raises:
        NumericsError: naming the cell whose log probabilities hold NaN or infinity.
    """
    of_one = 4 * len(answer) * int(model.model.config.vocab_size)
    left, size = iter(caches), max(1, LOGIT_BYTES // of_one)
    while batch := list(islice(left, size)):
        rows = answer_logprobs(model, [cache for _, cache in batch], question, answer)
        for (cell, _), row in zip(batch, rows, strict=True):
            _check(cell, row)
            yield cell, row.clone()  # one that is kept does not keep the others of its batch


def _check(cell: Cell, row: Tensor) -> None:
    if not row.isfinite().all():
        raise NumericsError(
            f"{cell.policy} at tier {cell.tier}: log probabilities hold NaN or infinity"
        )


def divergence(full: Tensor, other: Tensor) -> float:
    """KL(full ‖ other) of finite log probabilities [tokens, vocab], mean over tokens, nats."""
    return max(0.0, float((full.exp() * (full - other)).sum(-1).mean()))
