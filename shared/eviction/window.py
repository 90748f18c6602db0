"""Window scorer: attention of the context's last queries (SnapKV, arXiv 2404.14469)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import (
    LayerScores,
    critical_score,
    finite,
    output_weight,
    relative_score,
    uses_critical,
    uses_relative,
)


def make_window_scores(
    policy: Policy,
    *,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_o: Tensor,
    scaling: float,
    output_norm: Tensor | None = None,
    prefix_keys: Tensor | None = None,
    prefix_cu: Tensor | None = None,
) -> LayerScores:
    """Score a layer's entries by its observation window, preset `paper`.

    Mean over the window's queries, mean over the group, then max-pooling (stride 1,
    same length) of what lies before the window. The window itself is forced, outside
    the pooling.

    Args:
        policy: gives window, kernel, ε, norm and which scores are needed.
        queries: [num_q_heads, ≥ min(window, n), head_dim], after RoPE, ending with the
            context's last query; surplus leading ones are ignored.
        keys: [num_kv_heads, n, head_dim], after RoPE, the node's own.
        values: [num_kv_heads, n, head_dim].
        w_o: [D_model, num_q_heads · head_dim].
        scaling: factor of the logits.
        output_norm: [as many as queries], ‖o_q‖₂; only relative scores need it.
        prefix_keys: [Σ len_h, head_dim], the parent chain's kept keys, in the softmax.
        prefix_cu: integers [num_kv_heads + 1].
    """
    n = keys.shape[1]
    width = min(policy.window, n)
    if queries.shape[1] < width:
        raise ValueError(f"{queries.shape[1]} queries for a window of {width}")
    weight = output_weight(output_norm, policy)
    reductions: list[Literal["mean", "sumsq"]] = ["mean"]
    if uses_relative(policy):
        reductions.append("sumsq")
    reduced = ops.attention_scores(
        queries[:, -width:],
        keys,
        scaling=scaling,
        reductions=reductions,
        first_query=n - width,
        prefix_keys=prefix_keys,
        prefix_cu=prefix_cu,
        query_weight=None if weight is None else weight[-width:],
    )
    attention = finite(reduced["mean"].mean(1), "attention scores")
    attention = _pool(attention, n - width, policy.kernel)
    return LayerScores(
        attention,
        torch.arange(n, device=keys.device) >= n - width,
        critical_score(attention, values, w_o, policy) if uses_critical(policy) else None,
        relative_score(reduced["sumsq"], values, w_o) if uses_relative(policy) else None,
    )


def _pool(attention: Tensor, before: int, kernel: int) -> Tensor:
    """Max-pool the first `before` columns of [num_kv_heads, n]; the rest is untouched."""
    if before == 0:
        return attention
    pooled = F.max_pool1d(attention[:, None, :before], kernel, stride=1, padding=kernel // 2)
    return torch.cat([pooled[:, 0], attention[:, before:]], dim=1)
