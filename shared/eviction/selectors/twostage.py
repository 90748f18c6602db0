"""CriticalKV's two stages (arXiv 2502.03805, Algorithm 1)."""

from __future__ import annotations

from torch import Tensor

from criticalkv.shared.eviction.orders import Ranked, floors_of, take
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.selectors.candidates import Candidates


def twostage(entries: Candidates, budgets: Tensor, policy: Policy) -> Tensor:
    """Keep ⌊αc⌋ by attention, then the rest of c by the second stage's score.

    c is the budget outside the forced entries, which take part in neither stage. With
    model-wide budgets both stages are model-wide too, and heads get what they win.
    """
    stage1 = first_stage(entries, budgets, policy)
    rest = _together(budgets - stage1.sum(-1), policy)
    return _grown(stage1, entries.needed(policy.second), rest)


def first_stage(entries: Candidates, budgets: Tensor, policy: Policy) -> Tensor:
    """Return what the first stage keeps, forced entries included."""
    spare = _together(budgets - entries.forced.sum(-1), policy)
    return _grown(entries.forced, entries.attention, floors_of(policy.alpha, spare))


def _together(counts: Tensor, policy: Policy) -> Tensor:
    """Entries that are to be taken by head, or of all heads, int64 []."""
    return counts.sum() if policy.allocator == "model" else counts


def _grown(kept: Tensor, ranked: Ranked, count: Tensor) -> Tensor:
    """Add the best `count` others, int64 [layers, num_kv_heads] or [] for all heads together."""
    if count.dim() == 0:
        return kept | take(ranked.by_model, ~kept.flatten(), count).view_as(kept)
    return kept | take(ranked.by_head, ~kept, count)
