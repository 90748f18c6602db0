"""TOVA scorer: the last query's attention, one for all heads (arXiv 2401.06104)."""

from __future__ import annotations

import torch
from torch import Tensor

from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import LayerScores


def tova(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's tokens by the last query's attention, mean over all query heads.

    All KV heads share the scores. The last `recent` entries are forced; with the default
    of 1 that is the query's own, which the authors' code keeps in practice.
    """
    attention = layer.attention(1, "mean")["mean"].sum(1)
    total = attention.sum(0) if layer.positions is None else _by_token(attention, layer.positions)
    return LayerScores.of(
        policy,
        (total / layer.queries.shape[0]).expand(attention.shape).contiguous(),
        layer.last(policy.recent),
        values=layer.values,
        w_o=layer.w_o,
        real=layer.real,
    )


def _by_token(attention: Tensor, positions: Tensor) -> Tensor:
    """Sum [num_kv_heads, n] over the heads that still have the same token.

    Where earlier steps have left heads different entries, a column is not one token. A
    head that has evicted a token attends to it with 0, and padding has none.
    """
    tokens, which = torch.unique(positions, return_inverse=True)
    totals = attention.new_zeros(tokens.numel())
    return totals.scatter_add_(0, which.flatten(), attention.flatten())[which]
