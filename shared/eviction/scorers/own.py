"""Self scorer: what the context's own far queries attend to; no second forward.

The file is not called `self`, which no reader of Python would expect to import.
"""

from __future__ import annotations

from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers.ends import ends
from criticalkv.shared.eviction.scores import LayerScores


def own(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's entries by the context's queries that are far enough away.

    Each `stride`-th query asks, and scores keys at least `distance` entries before its
    own. Attention is the max over these queries and the group, relative scores sum over
    them. Entries that no query is far from score 0. The first `sinks` and last `recent`
    entries are forced. Reads n²/stride attention weights, a block of queries at a time.
    """
    reductions: tuple[ops.Reduction, ...] = ("max",)
    if policy.reads_relative:
        reductions = ("max", "sumsq")
    reduced = _far(policy, layer, *reductions)
    return LayerScores.of(
        policy,
        reduced["max"].amax(1),
        ends(policy, layer.n, layer.keys.device),
        values=layer.values,
        w_o=layer.w_o,
        sumsq=reduced.get("sumsq"),
        real=layer.real,
    )


def own_sumsq(policy: Policy, layer: ContextLayer, weight: Tensor | None = None) -> Tensor:
    """Return Σ_q A²/‖o_q‖² over the far queries, fp32 [num_kv_heads, group_size, n].

    Estimated from each `stride`-th query.

    Args:
        policy: gives stride and distance.
        layer: with all of its queries.
        weight: fp32 [n], 1/‖o_q‖² of all queries where a caller has it; None: found here.
    """
    asked = None if weight is None else weight[:: policy.stride]
    return _far(policy, layer, "sumsq", weight=asked)["sumsq"] * policy.stride


def _far(
    policy: Policy,
    layer: ContextLayer,
    *reductions: ops.Reduction,
    weight: Tensor | None = None,
) -> dict[ops.Reduction, Tensor]:
    return layer.attention(
        layer.queries.shape[1],
        *reductions,
        min_distance=policy.distance,
        stride=policy.stride,
        weight=weight,
    )
