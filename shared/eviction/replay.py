"""Replay scorer: attention while the model repeats the context (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

import torch
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


class ReplayScorer:
    """Collects, layer by layer and chunk by chunk, what the replayed queries attend to.

    Attention is the max over all replay queries and the group; relative scores sum
    over them. The first `sinks` and last `recent` entries are forced.
    """

    def __init__(self, policy: Policy, num_layers: int) -> None:
        self._policy = policy
        self._max: list[Tensor | None] = [None] * num_layers
        self._sumsq: list[Tensor | None] = [None] * num_layers

    def add_chunk(
        self,
        layer: int,
        *,
        queries: Tensor,
        keys: Tensor,
        tail_keys: Tensor,
        scaling: float,
        output_norm: Tensor | None = None,
        prefix_keys: Tensor | None = None,
        prefix_cu: Tensor | None = None,
    ) -> None:
        """Add one layer's attention over one replay chunk.

        Args:
            layer: index of the layer.
            queries: [num_q_heads, m, head_dim], the replay's, after RoPE.
            keys: [num_kv_heads, n, head_dim], the context's own, after RoPE.
            tail_keys: [num_kv_heads, s ≥ m, head_dim], the replay's own keys, causal;
                the queries are the last m of them.
            scaling: factor of the logits.
            output_norm: [m], ‖o_q‖₂; only relative scores need it.
            prefix_keys: [Σ len_h, head_dim], the parent chain's kept keys.
            prefix_cu: integers [num_kv_heads + 1].
        """
        reduced = ops.attention_scores(
            queries,
            keys,
            scaling=scaling,
            reductions=("max", "sumsq") if uses_relative(self._policy) else ("max",),
            tail_keys=tail_keys,
            prefix_keys=prefix_keys,
            prefix_cu=prefix_cu,
            query_weight=output_weight(output_norm, self._policy),
        )
        peak = finite(reduced["max"].amax(1), "attention scores")
        before = self._max[layer]
        self._max[layer] = peak if before is None else torch.maximum(before, peak)
        if uses_relative(self._policy):
            sumsq, total = reduced["sumsq"], self._sumsq[layer]
            self._sumsq[layer] = sumsq if total is None else total + sumsq

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
        return LayerScores(
            attention,
            (index < self._policy.sinks) | recent,
            critical_score(attention, values, w_o, self._policy)
            if uses_critical(self._policy)
            else None,
            None if sumsq is None else relative_score(sumsq, values, w_o),
        )
