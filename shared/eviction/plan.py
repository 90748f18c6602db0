"""Plan: what a policy keeps of some layers, at any tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.shared.eviction.allocators import ALLOCATORS
from criticalkv.shared.eviction.allocators.contest import Contest
from criticalkv.shared.eviction.kvpress import selection as kvpress
from criticalkv.shared.eviction.orders import Forced, Ranked
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profile
from criticalkv.shared.eviction.scores import (
    LayerScores,
    finite,
)
from criticalkv.shared.eviction.selectors import SELECTORS
from criticalkv.shared.eviction.selectors.candidates import Candidates
from criticalkv.shared.eviction.selectors.twostage import first_stage


@dataclass(frozen=True)
class Place:
    """Where ranked layers are in their model.

    Attributes:
        layers: which layers these are.
        evictable: all layers of the model that evict, ascending.
        profile: the model's, for allocators that need one.
    """

    layers: tuple[int, ...]
    evictable: tuple[int, ...]
    profile: Profile | None = None

    @classmethod
    def whole(cls, num_layers: int, profile: Profile | None = None) -> Place:
        """All layers of a model in which every layer evicts."""
        every = tuple(range(num_layers))
        return cls(every, every, profile)


class Plan:
    """The selections of layers of equal shape under one policy; sorts each score once."""

    def __init__(
        self,
        layers: Sequence[LayerScores],
        policy: Policy,
        place: Place | None = None,
        *,
        tokens: int | None = None,
        real: Tensor | None = None,
    ) -> None:
        """Stack the layers' scores.

        Args:
            layers: their scores, of equal shape.
            policy: what decides.
            place: where they are in the model; None: they are all of it.
            tokens: what a tier is a fraction of; None: the entries per head.
            real: bool [num_kv_heads, n], False for padding, which is never kept and
                never takes an entry's place; None: no padding.

        Raises:
            NumericsError: if a score holds NaN or infinity.
        """
        self._policy = policy
        self._place = place or Place.whole(len(layers))
        self._real = real
        forced = torch.stack([layer.forced.expand_as(layer.attention) for layer in layers])
        self._tokens = forced.shape[-1] if tokens is None else tokens
        self._forced = Forced(forced if real is None else forced & real)
        self._entries = Candidates(
            self._forced.mask,
            self._ranked(layers, "attention"),
            self._ranked(layers, "critical") if policy.reads_critical else None,
            self._ranked(layers, "relative") if policy.reads_relative else None,
        )

    def _ranked(self, layers: Sequence[LayerScores], name: str) -> Ranked:
        score = finite(torch.stack([layer.needed(name) for layer in layers]), f"{name} scores")
        # Behind every entry, so that padding only fills what a head cannot.
        return Ranked(score if self._real is None else score.where(self._real, -torch.inf))

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
        """Return the entries that each head is given, int64 [layers, num_kv_heads]."""
        if self._policy.preset == "kvpress":
            return self.select(tier).sum(-1)
        return ALLOCATORS[self._policy.allocator](self._contest(tier))

    def _contest(self, tier: str) -> Contest:
        return Contest(
            self._allocation,
            self._forced,
            tier,
            self._tokens,
            self._policy,
            self._place.layers,
            self._place.evictable,
            self._place.profile,
        )

    def select(self, tier: str) -> Tensor:
        """Return the kept entries, bool [layers, num_kv_heads, n]."""
        if self._policy.preset == "kvpress":
            return kvpress.select(self._entries, self._contest(tier))
        select = SELECTORS[self._policy.selector]
        kept = select(self._entries, self.budgets(tier), self._policy)
        return kept if self._real is None else kept & self._real

    def first_stage(self, tier: str) -> Tensor:
        """Return what CriticalKV's first stage keeps, forced entries included.

        Returns:
            bool [layers, num_kv_heads, n].

        Raises:
            ValueError: if the policy has no such stage of ours.
        """
        if self._policy.selector != "twostage" or self._policy.preset == "kvpress":
            raise ValueError(f"{self._policy.canonical()} has no first stage")
        kept = first_stage(self._entries, self.budgets(tier), self._policy)
        return kept if self._real is None else kept & self._real
