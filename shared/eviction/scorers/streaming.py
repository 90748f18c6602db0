"""StreamingLLM scorer: the first and the most recent tokens (arXiv 2309.17453)."""

from __future__ import annotations

from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import LayerScores


def streaming(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's entries by position: 1 for the node's first token, 2, 3, …

    Exact in fp32 for 2^24 tokens. The first `sinks` entries are forced. No attention is
    computed, so there is nothing for critical selectors to multiply; `Policy` refuses
    them (CriticalKV, arXiv 2502.03805, appendix D.3, leaves the method out too).
    """
    token = layer.index
    if layer.positions is not None:
        token = layer.positions - layer.first_position
    elif layer.padding is not None:
        token = token - layer.padding[:, None]
    return LayerScores.of(
        policy,
        (token + 1).expand(layer.keys.shape[:2]).float(),
        layer.first(policy.sinks),
        values=layer.values,
        w_o=layer.w_o,
        real=layer.real,
    )
