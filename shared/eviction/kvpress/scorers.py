"""The scores of kvpress 0.5.5. Nothing is forced: what it protects has the highest score.

Each function takes a policy and a layer and returns LayerScores, as the ones it stands for
do. One value above a layer's scores pads the window, or the sinks, of all heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy, Scorer
from criticalkv.shared.eviction.scorers.expected import future_attention
from criticalkv.shared.eviction.scores import LayerScores, finite

ABOVE_PROBABILITIES = 2.0
"""A score that no attention reaches."""


def window(policy: Policy, layer: ContextLayer) -> LayerScores:
    """SnapKV: the mean over the window's queries, average-pooled per query head.

    Zeros pad the pooling and count, so that the first entries, the sinks, lose weight.
    """
    before = layer.n - policy.window
    if before < 1:
        return _everything(layer)
    seen = layer.attention(policy.window, "mean")["mean"][..., :before]
    width = policy.kernel
    pooled = F.avg_pool1d(seen, width, stride=1, padding=width // 2)
    return _scores(policy, layer, _padded(pooled.mean(1), (0, policy.window)))


def tova(policy: Policy, layer: ContextLayer) -> LayerScores:
    """TOVA: the last query's attention, mean over all query heads."""
    before = layer.n - 1
    if before < 1:
        return _everything(layer)
    seen = layer.attention(1, "mean")["mean"][..., :before].flatten(0, 1).mean(0)
    shared = seen.expand(layer.keys.shape[0], before)
    return _scores(policy, layer, _padded(shared, (0, 1)))


def streaming(policy: Policy, layer: ContextLayer) -> LayerScores:
    """StreamingLLM and DuoAttention: they score by the budget, see `selection`.

    Here only the order of what they keep: sinks, then the most recent.
    """
    if layer.n <= policy.sinks:
        return _everything(layer)
    recency = (layer.index + 1).float()
    order = recency.masked_fill(layer.first(policy.sinks), layer.n + 1.0)
    return _scores(policy, layer, order.expand(layer.keys.shape[:2]))


def knorm(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Knorm: −‖k‖₂, so that a larger value norm lowers a critical score."""
    norms = torch.linalg.vector_norm(layer.keys, dim=-1, dtype=torch.float32)
    return _scores(policy, layer, -norms)


def keydiff(policy: Policy, layer: ContextLayer) -> LayerScores:
    """KeyDiff: −cos(k, mean_j k_j/‖k_j‖₂)."""
    keys = layer.keys.float()
    anchor = F.normalize(keys, dim=-1, eps=1e-12).mean(1, keepdim=True)
    return _scores(policy, layer, -F.cosine_similarity(keys, anchor, dim=-1))


def expected(policy: Policy, layer: ContextLayer) -> LayerScores:
    """ExpectedAttention, × ‖v‖₂ also where a critical selector multiplies again."""
    if layer.n <= policy.sinks:
        return _everything(layer)
    seen = future_attention(policy, layer)
    if policy.vnorm:
        values = layer.values[:, policy.sinks :]
        norms = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
        seen = (seen + float(policy.offset)) * norms
    return _scores(policy, layer, _padded(seen, (policy.sinks, 0)))


def replayed(policy: Policy, peak: Tensor, values: Tensor, w_o: Tensor) -> LayerScores:
    """KVzip: the highest attention in a replay; sinks above all.

    Args:
        policy: gives `sinks`.
        peak: fp32 [num_kv_heads, n]; 0 where no replay asked, so that tokens of the
            template before the context die first.
        values: [num_kv_heads, n, head_dim].
        w_o: [D_model, num_q_heads · head_dim].
    """
    sinks = torch.arange(peak.shape[1], device=peak.device) < policy.sinks
    scores = peak.masked_fill(sinks, ABOVE_PROBABILITIES)
    return LayerScores.of(policy, scores, torch.zeros_like(sinks), values=values, w_o=w_o)


KVPRESS_SCORERS: dict[Scorer, Callable[[Policy, ContextLayer], LayerScores]] = {
    "window": window,
    "tova": tova,
    "streaming": streaming,
    "knorm": knorm,
    "keydiff": keydiff,
    "expected": expected,
}


def _padded(scores: Tensor, columns: tuple[int, int]) -> Tensor:
    """Add columns before and after [num_kv_heads, m], each one above the layer's highest."""
    # F.pad wants a number; NaN must not become one.
    above = float(finite(scores, "attention scores").max() + 1)
    return F.pad(scores, columns, value=above)


def _scores(policy: Policy, layer: ContextLayer, scores: Tensor) -> LayerScores:
    return LayerScores.of(policy, scores, layer.last(0), values=layer.values, w_o=layer.w_o)


def _everything(layer: ContextLayer) -> LayerScores:
    """Where kvpress fails by an assertion."""
    return LayerScores.everything(layer.keys.shape[0], layer.n, layer.keys.device)
