"""Knorm scorer: keys of small norm get attention (arXiv 2406.11430)."""

from __future__ import annotations

import torch

from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import LayerScores, finite


def knorm(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's entries by 1 / (1 + ‖k‖₂), fp32; nothing is forced.

    The method's score is −‖k‖₂. The map keeps its order in and across heads and is
    positive: a critical selector multiplies scores by the value norm, and would drop the
    heavier of two equal values first if they were negative. Unlike exp(−‖k‖₂) it does not
    underflow to ties.
    """
    norms = torch.linalg.vector_norm(layer.keys, dim=-1, dtype=torch.float32)
    # An infinite norm would map to a harmless-looking 0.
    finite(norms, "key norms")
    return LayerScores.of(
        policy,
        1 / (1 + norms),
        layer.last(0),
        values=layer.values,
        w_o=layer.w_o,
        real=layer.real,
    )
