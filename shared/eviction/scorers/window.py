"""Window scorer: attention of the context's last queries (SnapKV, arXiv 2404.14469)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import LayerScores

Over = Literal["mean", "sum"]


def window(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's entries by its observation window.

    Mean over the window's queries (their sum under preset `official`, as the authors' code
    has it: next to an ε that is not the same), mean over the group, then max-pooling (stride 1,
    same length) of what lies before the window. The window itself is forced, outside
    the pooling.
    """
    width = min(policy.window, layer.n)
    over: Over = "sum" if policy.preset == "official" else "mean"
    attention, sumsq = _reduced(policy, layer, width, over)
    return LayerScores.of(
        policy,
        attention,
        layer.last(width),
        values=layer.values,
        w_o=layer.w_o,
        sumsq=sumsq,
        real=layer.real,
    )


def _reduced(
    policy: Policy, layer: ContextLayer, width: int, over: Over
) -> tuple[Tensor, Tensor | None]:
    """Return the pooled attention fp32 [num_kv_heads, n] and, if it is read, Σ_q A²/‖o_q‖²."""
    if layer.padding is None and not policy.reads_relative:
        return layer.window_scores(width, policy.kernel, policy.pooling, over), None
    reduced = layer.attention(width, over, *(("sumsq",) if policy.reads_relative else ()))
    attention = reduced[over].mean(1)
    pooled = ops.pool(attention, layer.n - width, policy.kernel, policy.pooling)
    return pooled, reduced.get("sumsq")
