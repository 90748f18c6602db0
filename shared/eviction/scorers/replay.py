"""Replay scorer: attention while the model repeats the context (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers.echo import echo_sumsq
from criticalkv.shared.eviction.scorers.ends import ends
from criticalkv.shared.eviction.scorers.own import own_sumsq
from criticalkv.shared.eviction.scores import LayerScores, finite


class ReplayScorer:
    """Collects, layer by layer and chunk by chunk, what the replayed queries attend to.

    Attention is the max over all replay queries and the group; relative scores sum
    over them. The first `sinks` and last `recent` entries are forced.
    """

    def __init__(self, policy: Policy, num_layers: int) -> None:
        self._policy = policy
        self._max: list[Tensor | None] = [None] * num_layers
        self._sumsq: list[Tensor | None] = [None] * num_layers

    def add_chunk(self, layer: int, peak: Tensor, sumsq: Tensor | None = None) -> None:
        """Add what one layer's replay queries of one chunk attended to.

        Args:
            layer: index of the layer.
            peak: fp32 [num_kv_heads, group_size, n], max over the chunk's queries of A.
            sumsq: same shape, Σ_q A²/‖o_q‖²; only relative scores need it.

        Raises:
            NumericsError: if a score holds NaN or infinity.
        """
        highest = finite(peak.amax(1), "attention scores")
        before = self._max[layer]
        self._max[layer] = highest if before is None else torch.maximum(before, highest)
        if self._policy.reads_relative:
            if sumsq is None:
                raise ValueError("relative scores need the sum of squares")
            total = self._sumsq[layer]
            self._sumsq[layer] = sumsq if total is None else total + sumsq

    def add_first_pass(self, layer: int, sumsq: Tensor, replayed: Fraction) -> None:
        """Add what the first pass says, see `first_pass_sumsq`.

        Args:
            layer: index of the layer.
            sumsq: fp32 [num_kv_heads, group_size, n].
            replayed: part of the context that was replayed; its own sums grow to the whole.
        """
        total = self._sumsq[layer]
        self._sumsq[layer] = sumsq if total is None else sumsq + total / float(replayed)

    def layer_scores(self, layer: int, *, values: Tensor, w_o: Tensor) -> LayerScores:
        """Return a layer's scores after the last chunk.

        Args:
            layer: index of the layer.
            values: [num_kv_heads, n, head_dim], the context's own.
            w_o: [D_model, num_q_heads · head_dim].
        """
        attention, sumsq = self._max[layer], self._sumsq[layer]
        if attention is None:
            raise ValueError(f"layer {layer} saw no replay chunk")
        forced = ends(self._policy, attention.shape[1], attention.device)
        return LayerScores.of(self._policy, attention, forced, values=values, w_o=w_o, sumsq=sumsq)


def first_pass_sumsq(policy: Policy, layer: ContextLayer) -> Tensor | None:
    """Return what the context's own queries add to a replay's relative scores.

    Relative scores are linear in the sum of squares: r of `replay` becomes
    r + echo_weight · r of `echo` + self_weight · r of `self` over the same context.

    Returns:
        fp32 [num_kv_heads, group_size, n], or None if the policy adds nothing.
    """
    if not policy.echo_weight:
        return float(policy.self_weight) * own_sumsq(policy, layer) if policy.self_weight else None
    weight = layer.output_weight(layer.n)
    total = float(policy.echo_weight) * echo_sumsq(policy, layer, weight)
    if policy.self_weight:
        total += float(policy.self_weight) * own_sumsq(policy, layer, weight)
    return total


def held_bytes(policy: Policy, num_q_heads: int, num_kv_heads: int) -> int:
    """Bytes of fp32 sums that a replay holds per token of the context and layer."""
    if policy.scorer != "replay":
        return 0
    first_pass = bool(policy.echo_weight or policy.self_weight)
    return 4 * (num_kv_heads + (policy.reads_relative + first_pass) * num_q_heads)
