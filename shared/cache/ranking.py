"""Ranking: one order per head from which every tier is a prefix."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.cache.ragged import RaggedLayer
from criticalkv.shared.errors import NumericsError
from criticalkv.shared.eviction.plan import Place, Plan
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import LayerScores

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerOrder:
    """The kept entries of one layer, head after head, in rank order.

    Attributes:
        indices: int64 [Σ len_h], indices among the layer's own n entries.
        cu_seqlens: int32 [num_kv_heads + 1], cumulative head lengths, on the CPU.
    """

    indices: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True)
class Ranking:
    """What to keep of a node, in which order, and how much of it each tier reads.

    rank = (first tier whose own selection admits the entry, −score, index).

    Attributes:
        order: one LayerOrder per layer, at the highest tier.
        tiers: ascending canonical decimals; only the highest if not nested.
        tier_lens: int64 [tiers, layers, num_kv_heads], on the CPU.
        nested: whether each wanted tier's selection includes the one below.
    """

    order: tuple[LayerOrder, ...]
    tiers: tuple[str, ...]
    tier_lens: Tensor
    nested: bool


def rank_layers(
    scores: Sequence[LayerScores],
    policy: Policy | None,
    tiers: Sequence[str],
    place: Place | None = None,
) -> Ranking:
    """Rank the entries of layers, all of a model or one that is streamed alone.

    Layers with `keep_all` keep everything at every tier, in position order, and are
    outside every budget; they may differ in length. `policy` may be None (dense) if
    there are no others. `place` says where the layers are in their model; None: they are
    all of it.

    Raises:
        NumericsError: if a score holds NaN or infinity.
        ValueError: if tiers do not ascend, or layers' shapes differ.
    """
    if not tiers or any(Fraction(a) >= Fraction(b) for a, b in itertools.pairwise(tiers)):
        raise ValueError(f"tiers must ascend, got {list(tiers)}")
    evictable = [i for i, layer in enumerate(scores) if not layer.keep_all]
    if not evictable:
        return _join(scores, {}, tuple(tiers), nested=True)
    if policy is None:
        raise ValueError("a policy is needed unless every layer keeps all")
    if place is None:
        place = Place(tuple(evictable), tuple(evictable))
    plan = Plan([scores[i] for i in evictable], policy, place)
    admitted, nested = _admitted(plan, tiers)
    if not nested:
        logger.warning("tiers of %s are not nested: only %s is kept", policy.canonical(), tiers[-1])
        tiers = tiers[-1:]
        admitted, _ = _admitted(plan, tiers)
    order = ops.tier_ranks(plan.ranking.by_head, admitted, len(tiers))
    ranked = {i: (order[k], admitted[k]) for k, i in enumerate(evictable)}
    return _join(scores, ranked, tuple(tiers), nested=nested)


def join_rankings(rankings: Sequence[Ranking]) -> Ranking:
    """Join the rankings of layers that were streamed one at a time."""
    if len({ranking.tiers for ranking in rankings}) != 1:
        raise ValueError("rankings of one node must have the same tiers")
    return Ranking(
        tuple(order for ranking in rankings for order in ranking.order),
        rankings[0].tiers,
        torch.cat([ranking.tier_lens for ranking in rankings], dim=1),
        all(ranking.nested for ranking in rankings),
    )


def build_layer(
    ranking: Ranking, layer: int, keys: Tensor, values: Tensor, first_position: int
) -> RaggedLayer:
    """Gather a layer's kept entries in rank order.

    Args:
        ranking: whose `order[layer]` is used.
        layer: index into the ranking.
        keys: [num_kv_heads, n, head_dim], after RoPE.
        values: [num_kv_heads, n, head_dim].
        first_position: original position of entry 0.

    Raises:
        NumericsError: if a kept key or value holds NaN or infinity.
    """
    order = ranking.order[layer]
    kept_keys, kept_values, positions, finite = ops.pack(
        keys, values, order.indices.to(keys.device), order.cu_seqlens, first_position
    )
    if not bool(finite):
        raise NumericsError(f"keys or values of layer {layer} hold NaN or infinity")
    return RaggedLayer(kept_keys, kept_values, positions, order.cu_seqlens)


def _admitted(plan: Plan, tiers: Sequence[str]) -> tuple[Tensor, bool]:
    """Return the first tier that admits each entry, uint8 [layers, heads, n] with
    len(tiers) for none, and whether every selection includes the one before."""
    kept = plan.select(tiers[0])
    admitted = torch.full(kept.shape, len(tiers), dtype=torch.uint8, device=kept.device)
    admitted[kept] = 0
    nested = True
    for index, tier in enumerate(tiers[1:], start=1):
        wider = plan.select(tier)
        nested &= not bool((kept & ~wider).any())
        admitted.masked_fill_(wider & (admitted == len(tiers)), index)
        kept = wider
    return admitted, nested


def _join(
    scores: Sequence[LayerScores],
    ranked: dict[int, tuple[Tensor, Tensor]],
    tiers: tuple[str, ...],
    *,
    nested: bool,
) -> Ranking:
    """Cut ranked layers to their kept prefix and add the ones that keep everything."""
    orders, lens = [], []
    for i, layer in enumerate(scores):
        if i in ranked:
            order, admitted = ranked[i]
        else:
            heads, n = layer.attention.shape
            order = torch.arange(n, device=layer.attention.device).expand(heads, n)
            admitted = torch.zeros_like(order, dtype=torch.uint8)
        per_tier = torch.stack([(admitted <= t).sum(-1) for t in range(len(tiers))]).cpu()
        cu = torch.zeros(order.shape[0] + 1, dtype=torch.int32)
        cu[1:] = per_tier[-1].cumsum(0)
        kept = admitted.gather(-1, order) < len(tiers)
        orders.append(LayerOrder(order[kept], cu))
        lens.append(per_tier)
    return Ranking(tuple(orders), tiers, torch.stack(lens, dim=1), nested)
