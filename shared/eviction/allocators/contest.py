"""What an allocator decides on: the heads that compete for one tier's budget."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from criticalkv.shared.eviction.orders import Ranked, floor_of
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profile


@dataclass(frozen=True)
class Contest:
    """The heads of some layers, and the tier whose budget they share.

    Attributes:
        ranked: the score that they compete by, [layers, num_kv_heads, n].
        forced: bool [layers, num_kv_heads, n], entries that are kept at every tier.
        tier: kept fraction, a decimal.
        tokens: what the tier is a fraction of: n, or more after earlier steps.
        policy: with the allocator's parameters.
        layers: which of the model's layers these are.
        evictable: all layers of the model that evict, ascending.
        profile: the model's, for allocators that need one.
    """

    ranked: Ranked
    forced: Tensor
    tier: str
    tokens: int
    policy: Policy
    layers: tuple[int, ...]
    evictable: tuple[int, ...]
    profile: Profile | None = None

    @property
    def per_head(self) -> int:
        """The uniform budget, ⌊tokens · tier⌋, at least 1."""
        return max(1, floor_of(self.tier, self.tokens))
