"""KeyDiff scorer: keys unlike the others are kept (arXiv 2504.15364)."""

from __future__ import annotations

import torch.nn.functional as F

from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import LayerScores


def keydiff(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's entries by (1 − cos(k, mean_j k_j/‖k_j‖₂)) / 2; nothing is forced.

    The method's score is −cos, in [−1, 1]. The map keeps its order and gives [0, 1],
    because a critical selector multiplies scores by the value norm.
    """
    directions = F.normalize(layer.keys.float(), dim=-1, eps=1e-12)
    real = layer.real
    own = directions if real is None else directions.where(real[..., None], 0)
    # The cosine does not see the mean's length, so the sum does as well.
    anchor = F.normalize(own.sum(1, keepdim=True), dim=-1, eps=1e-12)
    cosine = (directions * anchor).sum(-1).clamp(-1, 1)
    return LayerScores.of(
        policy,
        (1 - cosine) / 2,
        layer.last(0),
        values=layer.values,
        w_o=layer.w_o,
        real=real,
    )
