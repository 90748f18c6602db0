"""Plan: what a policy keeps of some layers, at any tier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from criticalkv.shared.eviction.allocators import ALLOCATORS
from criticalkv.shared.eviction.orders import Ranked
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import (
    LayerScores,
    finite,
    uses_critical,
    uses_relative,
)
from criticalkv.shared.eviction.selectors import SELECTORS, Candidates


class Plan:
    """The selections of layers of equal shape under one policy; sorts each score once."""

    def __init__(self, layers: Sequence[LayerScores], policy: Policy) -> None:
        """Stack the layers' scores.

        Raises:
            NumericsError: if a score holds NaN or infinity.
        """
        self._policy = policy
        self._entries = Candidates(
            torch.stack([layer.forced.expand_as(layer.attention) for layer in layers]),
            Ranked(_stack(layers, "attention")),
            Ranked(_stack(layers, "critical")) if uses_critical(policy) else None,
            Ranked(_stack(layers, "relative")) if uses_relative(policy) else None,
        )

    @property
    def _allocation(self) -> Ranked:
        """What heads compete by: attention, unless a single other score decides alone.

        Critical-AdaKV allots by attention (Algorithm 2), and so does twostage here.
        """
        if self._policy.selector == "twostage":
            return self._entries.attention
        return self.ranking

    @property
    def ranking(self) -> Ranked:
        """What orders the entries that one tier admits."""
        return self._entries.critical or self._entries.relative or self._entries.attention

    def budgets(self, tier: str) -> Tensor:
        """Return the entries that each head keeps, int64 [layers, num_kv_heads]."""
        allocate = ALLOCATORS[self._policy.allocator]
        return allocate(self._allocation, self._entries.forced, tier, self._policy)

    def select(self, tier: str) -> Tensor:
        """Return the kept entries, bool [layers, num_kv_heads, n]."""
        select = SELECTORS[self._policy.selector]
        return select(self._entries, self.budgets(tier), self._policy)


def _stack(layers: Sequence[LayerScores], name: str) -> Tensor:
    return finite(torch.stack([layer.needed(name) for layer in layers]), f"{name} scores")
