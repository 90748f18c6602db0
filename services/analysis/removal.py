"""Take a span out of a compressed cache: masking, for whatever is asked afterwards."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from criticalkv.services.analysis.span import Span
from criticalkv.shared.cache.ragged import RaggedCache, RaggedLayer, cu_seqlens_of


def without_span(cache: RaggedCache, span: Span, kv_heads: Tensor | None = None) -> RaggedCache:
    """Return a cache that lacks the span's entries, at every tier.

    A query over it attends as under an additive −∞ on those entries. Entries computed after
    the span were computed with it; to have them without it, mask the forward (`masking`).

    Args:
        cache: of one context; `SideBySide.compress` makes such.
        span: original positions.
        kv_heads: bool [num_layers, num_kv_heads] that lose it; None: all.
    """
    layers, lens = [], []
    for i, layer in enumerate(cache.layers):
        heads = torch.ones(layer.lens.numel()) if kv_heads is None else kv_heads[i]
        stays = _stays(layer, span, heads.bool())
        layers.append(_only(layer, stays))
        lens.append(_counts(stays, layer, cache.tier_lens[:, i]))
    return replace(cache, layers=tuple(layers), tier_lens=torch.stack(lens, 1))


def _stays(layer: RaggedLayer, span: Span, heads: Tensor) -> Tensor:
    """Say which entries stay, bool [entries] on the CPU."""
    loses = heads.cpu().repeat_interleave(layer.lens.cpu())
    positions = layer.positions.cpu()
    return ~(loses & (positions >= span.begin) & (positions < span.end))


def _only(layer: RaggedLayer, stays: Tensor) -> RaggedLayer:
    rows = stays.nonzero()[:, 0].to(layer.keys.device)
    lens = [int(part.sum()) for part in stays.split(layer.lens.tolist())]
    keys, values, positions = (t[rows] for t in (layer.keys, layer.values, layer.positions))
    return RaggedLayer(keys, values, positions, cu_seqlens_of(lens))


def _counts(stays: Tensor, layer: RaggedLayer, lens: Tensor) -> Tensor:
    """Count what stays of each head's first `lens`, int64 [tiers, num_kv_heads]."""
    heads = stays.split(layer.lens.tolist())
    return torch.tensor(
        [
            [int(part[:n].sum()) for part, n in zip(heads, tier, strict=True)]
            for tier in lens.tolist()
        ]
    )
