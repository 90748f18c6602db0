"""Allocators: how a tier's budget is spread over heads.

Each takes the allocation scores and the forced entries of all evictable layers
[layers, num_kv_heads, n] and a tier, and returns int64 [layers, num_kv_heads]: the
entries each head keeps, forced ones included. Every allocator grows monotonically
with the tier, which nested tiers need.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from criticalkv.shared.eviction import policy as names
from criticalkv.shared.eviction.orders import Ranked, floor_of, floors_of, take
from criticalkv.shared.eviction.policy import Policy

AllocatorFn = Callable[[Ranked, Tensor, str, Policy], Tensor]


def uniform(ranked: Ranked, forced: Tensor, tier: str, policy: Policy) -> Tensor:
    """Give every head ⌊n·t⌋ entries, at least one, and never fewer than are forced."""
    del ranked, policy
    n = forced.shape[-1]
    return forced.sum(-1).clamp_min(min(n, max(1, floor_of(tier, n))))


def adakv(ranked: Ranked, forced: Tensor, tier: str, policy: Policy) -> Tensor:
    """Spread each layer's uniform total over its heads by one top-k (AdaKV, 2407.11550).

    Outside the forced entries every head has c = max(⌊n·t⌋ − forced, 0). It keeps its
    own best ⌊safeguard·c⌋; what remains of the layer's Σ c goes to the layer's best
    remaining entries, wherever they are. The total is exact, no head ends empty.
    """
    forced_count = forced.sum(-1)
    spare = uniform(ranked, forced, tier, policy) - forced_count
    floors = floors_of(policy.safeguard, spare)
    floors = torch.where(forced_count == 0, floors.clamp_min(1).minimum(spare), floors)
    guarded = take(ranked.by_head, ~forced, floors)
    rest = take(
        ranked.by_layer,
        ~(forced | guarded).flatten(1),
        (spare - floors).sum(-1),
    ).view_as(forced)
    return (forced | guarded | rest).sum(-1)


def model(ranked: Ranked, forced: Tensor, tier: str, policy: Policy) -> Tensor:
    """Spread ⌊layers·heads·n·t⌋ entries by one top-k over the model (as KVzip does).

    Forced entries come first and count. A head may end empty.
    """
    del policy
    spare = (floor_of(tier, forced.numel()) - forced.sum()).clamp_min(0)
    best = take(ranked.by_model, ~forced.flatten(), spare).view_as(forced)
    return (forced | best).sum(-1)


ALLOCATORS: dict[names.Allocator, AllocatorFn] = {
    "uniform": uniform,
    "adakv": adakv,
    "model": model,
}
