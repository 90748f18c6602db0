"""Choosing one token from logits. Depends on the request's seed, never on the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from criticalkv.shared.errors import NumericsError
from criticalkv.shared.finite import is_finite
from criticalkv.shared.requests import Sampling


class Sampler:
    """Samples the tokens of one sequence."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> int:
        """Return a token id.

        Args:
            logits: fp32 [vocab], on the CPU.

        Raises:
            NumericsError: if the logits are not finite.
        """
        if not is_finite(logits):
            raise NumericsError("the model produced non-finite logits")
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        # Relative to the largest: the quotient may fall to −∞ but never overflow upwards.
        return self._draw((logits - logits.max()).double() / self._sampling.temperature)

    def _draw(self, logits: Tensor) -> int:
        order = torch.sort(logits, descending=True, stable=True)
        probs = order.values.softmax(0)
        if self._sampling.top_k:
            probs = probs[: self._sampling.top_k]
        # top_p keeps the likeliest token and every one that starts below the mass.
        below = probs.cumsum(0) - probs
        probs = probs[below < self._sampling.top_p * probs.sum()]
        mass = probs.cumsum(0)
        # One draw per token, whatever the filters left: a seed replays exactly.
        u = torch.rand((), generator=self._generator, dtype=torch.float64)
        index = int(torch.searchsorted(mass, u * mass[-1], right=True))
        return int(order.indices[min(index, probs.numel() - 1)])


def top_logprobs(
    logits: Tensor, token_id: int, count: int
) -> tuple[float, list[tuple[int, float]]]:
    """Return a token's log probability and the `count` likeliest alternatives.

    Taken from the model's own distribution, before temperature and filters.
    """
    logprobs = logits.log_softmax(0)
    top = torch.topk(logprobs, count) if count else None
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else []
    return float(logprobs[token_id]), pairs
