"""H2O scorer: accumulated attention (arXiv 2306.14048), over the last queries only."""

from __future__ import annotations

from criticalkv.kernels import ops
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import LayerScores


def h2o(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's entries by the column sums of the last queries' attention.

    Sum over the last `span` queries (fewer where there are fewer), mean over the group;
    relative scores sum over the same queries. The last `window` entries are forced. The
    full column sums cost n² attention weights; the span is how the CriticalKV paper
    (arXiv 2502.03805) runs H2O.
    """
    count = min(policy.span, layer.queries.shape[1])
    reductions: tuple[ops.Reduction, ...] = ("sum",)
    if policy.reads_relative:
        reductions = ("sum", "sumsq")
    reduced = layer.attention(count, *reductions)
    return LayerScores.of(
        policy,
        reduced["sum"].mean(1),
        layer.last(policy.window),
        values=layer.values,
        w_o=layer.w_o,
        sumsq=reduced.get("sumsq"),
        real=layer.real,
    )
