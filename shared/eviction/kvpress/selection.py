"""What kvpress 0.5.5 keeps of scored entries: its wrappers and its masking presses.

Each of its top-k stands here with ties to the lower index; where it chooses what to drop,
the lower index is dropped.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from criticalkv.shared.eviction.allocators.contest import Contest
from criticalkv.shared.eviction.orders import order_of, take
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.selectors.candidates import Candidates


def select(entries: Candidates, contest: Contest) -> Tensor:
    """Return the kept entries, bool [layers, num_kv_heads, n]."""
    policy, ratio = contest.policy, float(1 - Fraction(contest.tier))
    if ratio == 0:
        return torch.ones_like(entries.forced)
    if policy.allocator == "duo":
        return _duo(contest, ratio)
    score = entries.attention.score
    if policy.scorer == "replay":
        return _least(score, ratio, by_layer=policy.allocator == "adakv")
    if policy.scorer == "streaming":
        score = _streaming(contest, ratio).expand_as(score)
    critical = entries.needed("critical").score if policy.selector == "twostage" else None
    if policy.allocator == "adakv":
        return _adakv(score, critical, ratio, policy)
    if critical is not None:
        return _critical(score, critical, ratio, policy)
    budgets = [per_head(contest.n, ratio)] * len(contest.layers)
    if policy.allocator == "pyramidkv":
        budgets = [_pyramid(contest, ratio, layer) for layer in contest.layers]
    return _highest(score, torch.tensor(budgets, device=score.device)[:, None])


def per_head(n: int, ratio: float) -> int:
    """Entries that a head keeps: the float product, truncated; at least one."""
    return max(1, int(n * (1 - ratio)))


def _streaming(contest: Contest, ratio: float) -> Tensor:
    """StreamingLLM: 0 for what comes after the sinks and is pruned, 1 else; fp32 [n].

    A budget of fewer than the sinks prunes past the end: no recent entry is left.
    """
    sinks, pruned = contest.policy.sinks, contest.n - int(contest.n * (1 - ratio))
    score = torch.ones(contest.n, device=contest.forced.device)
    score[sinks : sinks + pruned] = 0
    return score


def _critical(score: Tensor, critical: Tensor, ratio: float, policy: Policy) -> Tensor:
    """CriticalKV: windows and sinks take part in the first stage, and win it."""
    n = score.shape[-1]
    alpha = float(policy.alpha)
    stage1 = int((1 - ratio) * n * alpha)
    first = _highest(score, max(1, stage1) if alpha else 0)
    return _highest(critical.masked_fill(first, torch.inf), per_head(n, ratio))


def _adakv(score: Tensor, critical: Tensor | None, ratio: float, policy: Policy) -> Tensor:
    """AdaKV: the layer's best after every head's safeguard; with `critical`, Critical-AdaKV."""
    kept, alpha = per_head(score.shape[-1], ratio), float(policy.safeguard)
    safe = max(1, int(kept * alpha)) if alpha else 0
    guarded = score.masked_fill(_highest(score, safe), torch.inf)
    flat = guarded.flatten(1)
    if critical is None:
        heads, n = score.shape[1:]
        return ~_highest(-flat, heads * (n - kept)).view_as(score)
    won = _highest(flat, score.shape[1] * kept).view_as(score).sum(-1)
    first = _highest(guarded, (won * float(policy.alpha)).to(torch.int64))
    above = first | guarded.isposinf()
    return _highest(critical.masked_fill(above, torch.inf), won)


def _least(score: Tensor, ratio: float, *, by_layer: bool) -> Tensor:
    """KVzip: drop the lowest of the model, or of each layer; their number is truncated."""
    rows = score.flatten(1) if by_layer else score.flatten()
    return ~_highest(-rows, int(rows.shape[-1] * ratio)).view_as(score)


def _pyramid(contest: Contest, ratio: float, layer: int) -> int:
    """PyramidKV: a layer's budget on the line; the uniform one where the line does not fit.

    The whole budget, the window included, is spread; rounding is half to even.
    """
    n, window, layers = contest.n, contest.policy.window, len(contest.evictable)
    capacity = window + n * (1 - ratio) - window
    low = capacity / float(contest.policy.beta)
    high = 2 * capacity - low
    if high >= n - window:
        high = n - window
        low = 2 * capacity - high
    if not n >= high >= low >= window:
        return max(1, round(n * (1 - ratio)))
    step = (high - low) / max(1, layers - 1)
    return round(high - contest.evictable.index(layer) * step)


def _duo(contest: Contest, ratio: float) -> Tensor:
    """DuoAttention: the share `ratio` of heads keeps sinks and recent entries only.

    With `recent` 0, or not more entries than sinks and recent ones, nothing is masked.
    """
    policy, n = contest.policy, contest.n
    importance = [min(x, 1.0) for x in contest.importance()]
    order = sorted(range(len(importance)), key=importance.__getitem__)
    streams = torch.zeros(len(order), dtype=torch.bool)
    streams[order[: round(len(order) * ratio)]] = True
    table = streams.view(-1, contest.heads)
    mine = table[[contest.evictable.index(layer) for layer in contest.layers]]
    kept = torch.ones(*mine.shape, n, dtype=torch.bool)
    if policy.recent and n > policy.sinks + policy.recent:
        kept[..., policy.sinks : n - policy.recent] = ~mine[..., None]
    return kept.to(contest.forced.device)


def _highest(score: Tensor, count: Tensor | int) -> Tensor:
    """Mask of the `count` highest of the last dimension, ties to the lower index.

    Args:
        score: [..., n].
        count: one number, or int64 that fits [...].
    """
    counts = torch.as_tensor(count, device=score.device).expand(score.shape[:-1])
    return take(order_of(score), torch.ones_like(score, dtype=torch.bool), counts)
