"""Teacher forcing: what a model says of the same tokens after every cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from torch import Tensor

from criticalkv.services.local.side_by_side import answer_logprobs
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.model.loader import LoadedModel

LOGIT_BYTES = 256 << 20
"""Most bytes of log probabilities of one batch; at least one cache is in it."""


def forced(
    model: LoadedModel,
    caches: Iterable[RaggedCache],
    question: Sequence[int],
    answer: Sequence[int],
) -> Iterator[Tensor]:
    """Yield each cache's log probabilities of an answer, fp32 [len(answer), vocab].

    Args:
        model: that computed the caches.
        caches: of one context; taken as they are needed, a batch at a time.
        question: at least one token, before the answer.
        answer: tokens whose predictions are wanted.
    """
    of_one = 4 * len(answer) * int(model.model.config.vocab_size)
    left, size = iter(caches), max(1, LOGIT_BYTES // of_one)
    while batch := list(islice(left, size)):
        # Copies: one that is kept does not keep the others of its batch.
        yield from (row.clone() for row in answer_logprobs(model, batch, question, answer))


def divergence(full: Tensor, other: Tensor) -> float:
    """KL(full ‖ other) of log probabilities [tokens, vocab], mean over tokens, nats."""
    return max(0.0, float((full.exp() * (full - other)).sum(-1).mean()))
