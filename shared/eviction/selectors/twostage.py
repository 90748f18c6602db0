"""CriticalKV's two stages (arXiv 2502.03805, Algorithm 1)."""

from __future__ import annotations

from torch import Tensor

from criticalkv.shared.eviction.orders import floors_of, take
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.selectors.candidates import Candidates


def twostage(entries: Candidates, budgets: Tensor, policy: Policy) -> Tensor:
    """Keep ⌊αc⌋ by attention, then the rest of c by the second stage's score.

    c is the budget outside the forced entries, which take part in neither stage. With
    model-wide budgets both stages are model-wide too, and heads get what they win.
    """
    if policy.allocator == "model":
        return _model_wide(entries, budgets.sum(), policy)
    spare = budgets - entries.forced.sum(-1)
    first = floors_of(policy.alpha, spare)
    stage1 = entries.forced | take(entries.attention.by_head, ~entries.forced, first)
    return stage1 | take(entries.needed(policy.second).by_head, ~stage1, spare - first)


def _model_wide(entries: Candidates, total: Tensor, policy: Policy) -> Tensor:
    forced = entries.forced.flatten()
    spare = total - forced.sum()
    first = floors_of(policy.alpha, spare)
    stage1 = forced | take(entries.attention.by_model, ~forced, first)
    rest = take(entries.needed(policy.second).by_model, ~stage1, spare - first)
    return (stage1 | rest).view_as(entries.forced)
