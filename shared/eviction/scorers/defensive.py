"""DefensiveKV scorer: the worst case over the window, not its mean (arXiv 2510.13334).

Preset `official` follows the authors' code where that differs. It adds a first stage:
the entries with the highest mean attention, until 90 % of it is reached, come before all
others of their head. That stage has three defects, which live only under that preset:

1. The mass that the window itself gets, which lowers the 90 %, is measured on the
   `window` entries *before* the window.
2. The entry that crosses the threshold is not part of the stage.
3. Its size is capped by budget − window, and negative where the budget is smaller than
   the window: the code's slice then takes all entries but the last few. Here the window
   is kept whatever the budget, so nothing is left for that slice to choose from.

The authors cap the stage at each head's budget. A score knows no budget: entries of the
stage are ordered by their rank in their own head, so that every budget takes them evenly
from all heads. The choice equals the authors' where all heads' stages are at least as
long as the budget or all fit into it; in between, longer stages go on before entries of
no stage do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import LayerScores

STAGE = 0.9
"""Share of the attention that the official code's first stage collects."""


def defensive(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's entries by the highest attention that one of the window's queries pays.

    Per query head and query: pooling before the window, rescaled to the row's sum. Then
    the max over group and window, at least its mean over the entries, × the value norm as
    a share of all KV heads' at the same entry. Under a critical selector that factor is
    left out: the selector multiplies by a value norm itself. The window is forced.
    """
    width = min(policy.window, layer.n)
    before = layer.n - width
    scores = torch.zeros(layer.keys.shape[:2], device=layer.keys.device)
    if before:
        seen = _Seen.by_window(policy, layer, width)
        score = seen.peak.maximum(seen.peak.mean(-1, keepdim=True))
        if policy.selector not in ("critical", "twostage"):
            score = score * _norm_share(layer.values[:, :before], layer)
        scores[:, :before] = _first_stage(score, seen, width, policy)
    return LayerScores.of(policy, scores, layer.last(width), values=layer.values, w_o=layer.w_o)


@dataclass(frozen=True)
class _Seen:
    """What the window sees of the entries before it, fp32 [num_kv_heads, before] each.

    Attributes:
        peak: max over group and window, pooled.
        mean: mean over group and window, not pooled.
    """

    peak: Tensor
    mean: Tensor

    @classmethod
    def by_window(cls, policy: Policy, layer: ContextLayer, width: int) -> _Seen:
        """Reduce the window's attention, a block of queries at a time."""
        before = layer.n - width
        peak = torch.zeros(layer.keys.shape[0], before, device=layer.keys.device)
        total = torch.zeros_like(peak)
        for rows in layer.attention_rows(width):
            probs = rows.probs[..., :before]
            pooled = ops.pool_rows(probs, policy.kernel, policy.pooling)
            scale = probs.sum(-1) / pooled.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
            highest = (pooled * scale[..., None]).amax((0, 1))
            peak[rows.head] = peak[rows.head].maximum(highest)
            total[rows.head] += probs.sum((0, 1))
        return cls(peak, total / (layer.group_size * width))


def _norm_share(values: Tensor, layer: ContextLayer) -> Tensor:
    """‖v·W_O‖₁, mean over the group, divided by its sum over KV heads: [num_kv_heads, n]."""
    norms = ops.value_norm(values, layer.w_o, layer.group_size, "l1").mean(1)
    return F.normalize(norms, p=1.0, dim=0)


def _first_stage(score: Tensor, seen: _Seen, width: int, policy: Policy) -> Tensor:
    """Lift the entries of the official code's first stage above all scores, which are ≤ 1."""
    if policy.preset != "official":
        return score
    share = F.normalize(seen.mean, p=1.0, dim=-1)
    threshold = STAGE - seen.mean[:, -width:].sum(-1).mean()
    ordered, order = share.sort(dim=-1, descending=True, stable=True)
    # As argmax does: nothing where the threshold is never reached.
    count = (ordered.cumsum(-1) >= threshold).to(torch.int32).argmax(-1, keepdim=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return torch.where(rank < count, 3 - rank / order.shape[1], score)
