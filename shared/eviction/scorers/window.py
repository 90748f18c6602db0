"""Window scorer: attention of the context's last queries (SnapKV, arXiv 2404.14469)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import LayerScores


def window(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's entries by its observation window.

    Mean over the window's queries (their sum under preset `official`, as the authors' code
    has it: next to an ε that is not the same), mean over the group, then max-pooling (stride 1,
    same length) of what lies before the window. The window itself is forced, outside
    the pooling.
    """
    width = min(policy.window, layer.n)
    over: ops.Reduction = "sum" if policy.preset == "official" else "mean"
    reductions: tuple[ops.Reduction, ...] = (over,)
    if policy.reads_relative:
        reductions = (over, "sumsq")
    reduced = layer.attention(width, *reductions)
    return LayerScores.of(
        policy,
        pool(reduced[over].mean(1), layer.n - width, policy),
        layer.last(width),
        values=layer.values,
        w_o=layer.w_o,
        sumsq=reduced.get("sumsq"),
        real=layer.real,
    )


def pool(attention: Tensor, before: int, policy: Policy) -> Tensor:
    """Pool the first `before` columns of [num_kv_heads, n]; the rest is untouched."""
    if before == 0:
        return attention
    pooled = pool_rows(attention[:, None, :before], policy)
    return torch.cat([pooled[:, 0], attention[:, before:]], dim=1)


def pool_rows(rows: Tensor, policy: Policy) -> Tensor:
    """Pool each row of [a, b, n ≥ 1] over its neighbours, stride 1, same length.

    Average pooling pads with zeros, as the method's code does, so that the first
    entries lose weight.
    """
    pooling = F.max_pool1d if policy.pooling == "max" else F.avg_pool1d
    return pooling(rows, policy.kernel, stride=1, padding=policy.kernel // 2)
