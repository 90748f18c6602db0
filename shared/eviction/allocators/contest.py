"""What an allocator decides on: the heads that compete for one tier's budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.shared.eviction.orders import Forced, Ranked, floor_of
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profile


@dataclass(frozen=True)
class Contest:
    """The heads of some layers, and the tier whose budget they share.

    Attributes:
        ranked: the score that they compete by, [layers, num_kv_heads, n].
        kept: entries [layers, num_kv_heads, n] that are kept at every tier.
        tier: kept fraction, a decimal.
        tokens: what the tier is a fraction of: n, or more after earlier steps.
        policy: with the allocator's parameters.
        layers: which of the model's layers these are.
        evictable: all layers of the model that evict, ascending.
        profile: the model's, for allocators that need one.
    """

    ranked: Ranked
    kept: Forced
    tier: str
    tokens: int
    policy: Policy
    layers: tuple[int, ...]
    evictable: tuple[int, ...]
    profile: Profile | None = None

    @property
    def forced(self) -> Tensor:
        """Entries that are kept at every tier, bool [layers, num_kv_heads, n]."""
        return self.kept.mask

    @property
    def per_head(self) -> int:
        """The uniform budget, ⌊tokens · tier⌋, at least 1."""
        return max(1, floor_of(self.tier, self.tokens))

    @property
    def heads(self) -> int:
        """KV heads per layer."""
        return self.forced.shape[1]

    @property
    def n(self) -> int:
        """Entries per head."""
        return self.forced.shape[2]

    def forced_of_all(self) -> list[int]:
        """Forced entries of all heads of all evictable layers, layer after layer.

        Allocators that know no scores decide on the whole model at once. A layer that is
        streamed alone stands for the others: their forced entries are as many.
        """
        counts = self.kept.listed
        if self.layers != self.evictable:
            counts = counts[:1] * len(self.evictable)
        return [count for row in counts for count in row]

    def uniform_of_all(self) -> list[int]:
        """The uniform budgets of the same heads."""
        budget = min(self.n, self.per_head)
        return [max(forced, budget) for forced in self.forced_of_all()]

    def importance(self) -> list[float]:
        """The profile's importance of the same heads."""
        if self.profile is None:
            raise ValueError(f"{self.policy.allocator} needs the model's profile")
        return [x for layer in self.evictable for x in self.profile.importance[layer]]

    def rows(self, budgets: Sequence[int]) -> Tensor:
        """Cut the budgets of all heads to this contest's: int64 [layers, num_kv_heads]."""
        table = torch.tensor(budgets, device=self.forced.device).view(-1, self.heads)
        return table[[self.evictable.index(layer) for layer in self.layers]]
