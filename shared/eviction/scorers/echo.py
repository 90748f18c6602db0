"""Echo scorer: the context's own queries, asked again from behind the context.

Replay (`replay`) lets the model repeat the context, because heads that copy then attend
to what comes next. They do the same for the queries of the first pass, if these are
moved, by RoPE, to positions behind the context and may see all of it: a replay without a
second forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers.own import own_sumsq
from criticalkv.shared.eviction.scorers.rotary import rotate
from criticalkv.shared.eviction.scores import LayerScores, uses_relative


def echo(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's entries by what all of its queries attend to from behind.

    The context is cut into chunks of `echo_chunk` tokens. Each chunk's queries, and its keys
    once more as the echo's own, move to the positions right behind the context. A query
    sees the ancestors' entries, the whole context and, causally, its own chunk's echo;
    the softmax runs over all of it and the context's columns are scored. With
    `echo_reach` a query sees of the context only the sinks and what is that near to its
    chunk, on either side, which costs n instead of n².

    Attention is the max over queries and the group. Relative scores weigh each query by
    the layer's output in the first pass; with `self_weight` λ they add λ · those of
    scorer `self`. The first `sinks` and last `recent` entries are forced. Reads n²
    attention weights, a block of queries at a time.
    """
    echoed = _echoed(policy, layer)
    sumsq = echoed.get("sumsq")
    if sumsq is not None and policy.self_weight:
        sumsq = sumsq + float(policy.self_weight) * own_sumsq(policy, layer)
    return LayerScores.of(
        policy,
        # Nobody reads attention where relative scores decide alone.
        next(iter(echoed.values())).amax(1),
        layer.first(policy.sinks) | layer.last(policy.recent),
        values=layer.values,
        w_o=layer.w_o,
        sumsq=sumsq,
    )


def echo_sumsq(policy: Policy, layer: ContextLayer) -> Tensor:
    """Return Σ_q A²/‖o_q‖² over all echoed queries, fp32 [num_kv_heads, group_size, n]."""
    return _echoed(policy, layer)["sumsq"]


def _reductions(policy: Policy) -> tuple[ops.Reduction, ...]:
    if policy.selector == "relative":
        return ("sumsq",)
    return ("max", "sumsq") if uses_relative(policy) else ("max",)


def _echoed(policy: Policy, layer: ContextLayer) -> dict[ops.Reduction, Tensor]:
    """Return max_q A and Σ_q A²/‖o_q‖², as far as they are read.

    Returns:
        fp32 [num_kv_heads, group_size, n] each.
    """
    if layer.rotation is None:
        raise ValueError("echo needs the model's rotation")
    queries = layer.asking(layer.n)
    weight = layer.output_weight(layer.n) if uses_relative(policy) else None
    shape = (layer.keys.shape[0], layer.group_size, layer.n)
    total = {name: queries.new_zeros(shape, dtype=torch.float32) for name in _reductions(policy)}
    for begin in range(0, layer.n, policy.echo_chunk):
        here = slice(begin, begin + policy.echo_chunk)
        seen = _seen(policy, layer, begin)
        # RoPE depends on differences only: the whole chunk turns by one angle.
        behind = layer.n - begin
        reduced = ops.attention_scores(
            rotate(queries[:, here], behind, layer.rotation),
            layer.keys if seen is None else layer.keys[:, seen],
            scaling=layer.scaling,
            reductions=tuple(total),
            tail_keys=rotate(layer.keys[:, here], behind, layer.rotation),
            prefix_keys=layer.prefix_keys,
            prefix_cu=layer.prefix_cu,
            query_weight=None if weight is None else weight[here],
        )
        for name, more in reduced.items():
            _add(total[name], name, more, slice(None) if seen is None else seen)
    return total


def _seen(policy: Policy, layer: ContextLayer, begin: int) -> Tensor | None:
    """Columns that the chunk from `begin` on sees, ascending; None: all of them."""
    first = begin - policy.echo_reach
    last = begin + policy.echo_chunk + policy.echo_reach
    if not policy.echo_reach or (first <= policy.sinks and last >= layer.n):
        return None
    index = layer.index
    return index[(index < policy.sinks) | ((index >= first) & (index < last))]


def _add(total: Tensor, name: str, more: Tensor, columns: Tensor | slice) -> None:
    if name == "max":
        total[..., columns] = torch.maximum(total[..., columns], more)
    else:
        total[..., columns] += more
