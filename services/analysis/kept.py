"""What a policy keeps of a context, as masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from criticalkv.services.local.side_by_side import SideBySide
from criticalkv.shared.eviction.plan import Place, Plan
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profile


@dataclass(frozen=True)
class Kept:
    """A policy's own selection at each tier.

    Attributes:
        layers: the model's layers that evict, ascending.
        masks: tier → bool [layers, num_kv_heads, n].
        first: the same of CriticalKV's first stage; empty if the policy has none.
    """

    layers: tuple[int, ...]
    masks: dict[str, Tensor]
    first: dict[str, Tensor]


def kept_of(
    context: SideBySide, policy: Policy, tiers: Sequence[str], profile: Profile | None = None
) -> Kept:
    """Select under a policy.

    Raises:
        PolicyError: if the policy is stepwise.
    """
    scores = [part.scores for part in context.score(policy)]
    layers = tuple(i for i, layer in enumerate(scores) if not layer.keep_all)
    plan = Plan([scores[i] for i in layers], policy, Place(layers, layers, profile))
    staged = policy.selector == "twostage" and policy.preset != "kvpress"
    return Kept(
        layers,
        {tier: plan.select(tier) for tier in tiers},
        {tier: plan.first_stage(tier) for tier in tiers} if staged else {},
    )
