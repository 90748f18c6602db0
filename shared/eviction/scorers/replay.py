"""Replay scorer: attention while the model repeats the context (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

import torch
from torch import Tensor

from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import LayerScores, finite, uses_relative


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
        if uses_relative(self._policy):
            if sumsq is None:
                raise ValueError("relative scores need the sum of squares")
            total = self._sumsq[layer]
            self._sumsq[layer] = sumsq if total is None else total + sumsq

    def add_own(self, layer: int, sumsq: Tensor) -> None:
        """Add what the context's own far queries attended to, times `self_weight`.

        Relative scores are linear in the sum of squares, so r of `replay` becomes
        r + self_weight · r of scorer `self` over the same context.

        Args:
            layer: index of the layer.
            sumsq: fp32 [num_kv_heads, group_size, n], see `own.own_sumsq`.
        """
        weighted = float(self._policy.self_weight) * sumsq
        total = self._sumsq[layer]
        self._sumsq[layer] = weighted if total is None else total + weighted

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
        index = torch.arange(attention.shape[1], device=attention.device)
        recent = index >= attention.shape[1] - self._policy.recent
        forced = (index < self._policy.sinks) | recent
        return LayerScores.of(self._policy, attention, forced, values=values, w_o=w_o, sumsq=sumsq)
