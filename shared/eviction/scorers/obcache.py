"""OBCache scorer: second-order change of the attention output (arXiv 2510.07651), joint form."""

from __future__ import annotations

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import LayerScores


def obcache(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's entries by what losing key and value does to the window's outputs.

    S_j = Σ_i A²‖v_j‖² + (A z)²‖v_j − o_i‖² + 2A² z (‖v_j‖² − v_j·o_i) over the window's
    queries i, z being the scaled logits and o_i the head's output before W_O; mean over
    the group, then pooling before the window, which is forced.
    """
    width = min(policy.window, layer.n)
    heads, n, dim = layer.keys.shape
    total = torch.zeros(heads, layer.group_size, n, device=layer.keys.device)
    blocks = layer.attention_rows(width)
    outputs = layer.out[:, -width:].reshape(heads, layer.group_size, width, dim)
    for rows in blocks:
        queries = slice(rows.begin, rows.begin + rows.probs.shape[1])
        change = _change(rows, layer.values[rows.head].float(), outputs[rows.head, :, queries])
        total[rows.head] += change.sum(1)
    return LayerScores.of(
        policy,
        ops.pool(total.mean(1), n - width, policy.kernel, policy.pooling),
        layer.last(width),
        values=layer.values,
        w_o=layer.w_o,
    )


def _change(rows: ops.AttentionRows, values: Tensor, outputs: Tensor) -> Tensor:
    """Return A²·‖(1 + z) v_j − z o_i‖², the summand of S_j, [group_size, queries, n].

    The three terms of the formula are this square, multiplied out: it is never negative.

    Args:
        rows: [group_size, queries, n] of one KV head.
        values: fp32 [n, head_dim].
        outputs: [group_size, queries, head_dim].
    """
    z = rows.logits.masked_fill(rows.logits == -torch.inf, 0)
    outputs = outputs.float()
    square = (1 + z).square() * values.square().sum(-1)
    square -= 2 * z * (1 + z) * (outputs @ values.T)
    square += z.square() * outputs.square().sum(-1, keepdim=True)
    return rows.probs.square() * square.clamp_min(0)
