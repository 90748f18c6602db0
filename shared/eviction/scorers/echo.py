"""Echo scorer: the context's own queries, asked again from behind the context.

Replay (`replay`) lets the model repeat the context, because heads that copy then attend
to what comes next. They do the same for the queries of the first pass, if these are
moved, by RoPE, to positions behind the context and may see all of it: a replay without a
second forward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers.ends import ends
from criticalkv.shared.eviction.scorers.own import own_sumsq
from criticalkv.shared.eviction.scorers.rotary import Turn
from criticalkv.shared.eviction.scores import LayerScores


def echo(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's entries by what all of its queries attend to from behind.

    The context is cut into chunks of `echo_chunk` tokens. Each chunk's queries, and its keys
    once more as the echo's own, move to the positions right behind the context. A query
    sees the ancestors' entries, the whole context and, causally, its own chunk's echo;
    the softmax runs over all of it and the context's columns are scored. With
    `echo_reach` a query sees of the context only the sinks and what is that near to its
    chunk, on either side, which costs n instead of n².

    Attention is the max over queries and the group; under `relative`, which does not read
    it, it is not computed and 0. Relative scores weigh each query by
    the layer's output in the first pass; with `self_weight` λ they add λ · those of
    scorer `self`. The first `sinks` and last `recent` entries are forced. Reads n²
    attention weights, a block of queries at a time.
    """
    weight = layer.output_weight(layer.n) if policy.reads_relative else None
    echoed = _echoed(policy, layer, weight)
    sumsq, peak = echoed.get("sumsq"), echoed.get("max")
    if sumsq is not None and policy.self_weight:
        sumsq = sumsq + float(policy.self_weight) * own_sumsq(policy, layer, weight)
    return LayerScores.of(
        policy,
        # Where relative scores decide alone, nobody reads attention.
        _nothing(layer) if peak is None else peak.amax(1),
        ends(policy, layer.n, layer.keys.device),
        values=layer.values,
        w_o=layer.w_o,
        sumsq=sumsq,
    )


def _nothing(layer: ContextLayer) -> Tensor:
    return torch.zeros(layer.keys.shape[:2], device=layer.keys.device)


def echo_sumsq(policy: Policy, layer: ContextLayer, weight: Tensor) -> Tensor:
    """Return Σ_q A²/‖o_q‖² over all echoed queries, fp32 [num_kv_heads, group_size, n].

    Args:
        policy: with relative scores.
        layer: with all of its queries.
        weight: fp32 [n], 1/‖o_q‖² of all queries.
    """
    return _echoed(policy, layer, weight)["sumsq"]


def _reductions(policy: Policy) -> tuple[ops.Reduction, ...]:
    if policy.selector == "relative":
        return ("sumsq",)
    return ("max", "sumsq") if policy.reads_relative else ("max",)


def _echoed(
    policy: Policy, layer: ContextLayer, weight: Tensor | None
) -> dict[ops.Reduction, Tensor]:
    """Return max_q A and Σ_q A²/‖o_q‖², as far as they are read.

    Returns:
        fp32 [num_kv_heads, group_size, n] each.
    """
    queries = layer.asking(layer.n)
    shape = (layer.keys.shape[0], layer.group_size, layer.n)
    total = {name: queries.new_zeros(shape, dtype=torch.float32) for name in _reductions(policy)}
    for begin, turn in _chunks(policy, layer):
        here = slice(begin, begin + policy.echo_chunk)
        seen = _seen(policy, layer, begin)
        reduced = ops.attention_scores(
            turn(queries[:, here]),
            layer.keys[:, seen],
            scaling=layer.scaling,
            reductions=tuple(total),
            tail_keys=turn(layer.keys[:, here]),
            prefix_keys=layer.prefix_keys,
            prefix_cu=layer.prefix_cu,
            query_weight=None if weight is None else weight[here],
        )
        for name, more in reduced.items():
            _add(total[name], name, more, seen)
    return total


def _chunks(policy: Policy, layer: ContextLayer) -> Iterator[tuple[int, Turn]]:
    """Yield where each chunk begins and its turn to right behind the context.

    RoPE depends on differences only: a whole chunk turns by one angle.
    """
    if layer.rotation is None:
        raise ValueError("echo needs the model's rotation")
    begins = range(0, layer.n, policy.echo_chunk)
    steps = torch.arange(layer.n, 0, -policy.echo_chunk, device=layer.keys.device)
    turns = Turn.by(steps, layer.rotation)
    for begin, cos, sin in zip(begins, turns.cos, turns.sin, strict=True):
        yield begin, Turn(cos, sin)


def _seen(policy: Policy, layer: ContextLayer, begin: int) -> Tensor | slice:
    """Columns that the chunk from `begin` on sees, ascending: sinks and what is near."""
    first = begin - policy.echo_reach if policy.echo_reach else 0
    last = begin + policy.echo_chunk + policy.echo_reach if policy.echo_reach else layer.n
    if first <= policy.sinks:
        return slice(max(last, policy.sinks))
    device = layer.keys.device
    near = torch.arange(first, min(last, layer.n), device=device)
    return torch.cat([torch.arange(policy.sinks, device=device), near])


def _add(total: Tensor, name: str, more: Tensor, columns: Tensor | slice) -> None:
    if name == "max":
        total[..., columns] = torch.maximum(total[..., columns], more)
    else:
        total[..., columns] += more
