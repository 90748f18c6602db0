"""Selectors: which entries of a head fill its budget.

Each takes the candidates and the budgets int64 [layers, num_kv_heads] and returns the
kept entries, bool [layers, num_kv_heads, n], forced ones included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from criticalkv.shared.eviction import policy as names
from criticalkv.shared.eviction.orders import Ranked, floors_of, take
from criticalkv.shared.eviction.policy import Policy


@dataclass(frozen=True)
class Candidates:
    """All evictable layers' entries with every score the policy uses.

    Attributes:
        forced: bool [layers, num_kv_heads, n].
        attention: always there.
        critical: only for selectors that read it.
        relative: only for selectors that read it.
    """

    forced: Tensor
    attention: Ranked
    critical: Ranked | None = None
    relative: Ranked | None = None


SelectorFn = Callable[[Candidates, Tensor, Policy], Tensor]


def plain(entries: Candidates, budgets: Tensor, policy: Policy) -> Tensor:
    """Keep the best by attention."""
    del policy
    return _best(entries.attention, entries.forced, budgets)


def twostage(entries: Candidates, budgets: Tensor, policy: Policy) -> Tensor:
    """Keep ⌊αc⌋ by attention, then the rest of c by critical score.

    CriticalKV, arXiv 2502.03805, Algorithm 1; c is the budget outside the forced
    entries, which take part in neither stage.
    """
    if entries.critical is None:
        raise ValueError("twostage needs critical scores")
    spare = budgets - entries.forced.sum(-1)
    first = floors_of(policy.alpha, spare)
    stage1 = entries.forced | take(entries.attention.by_head, ~entries.forced, first)
    return stage1 | take(entries.critical.by_head, ~stage1, spare - first)


def critical(entries: Candidates, budgets: Tensor, policy: Policy) -> Tensor:
    """Keep the best by critical score alone (α = 0)."""
    del policy
    if entries.critical is None:
        raise ValueError("critical needs critical scores")
    return _best(entries.critical, entries.forced, budgets)


def relative(entries: Candidates, budgets: Tensor, policy: Policy) -> Tensor:
    """Keep the best by share of the layer's output."""
    del policy
    if entries.relative is None:
        raise ValueError("relative needs relative scores")
    return _best(entries.relative, entries.forced, budgets)


def _best(ranked: Ranked, forced: Tensor, budgets: Tensor) -> Tensor:
    return forced | take(ranked.by_head, ~forced, budgets - forced.sum(-1))


SELECTORS: dict[names.Selector, SelectorFn] = {
    "plain": plain,
    "twostage": twostage,
    "critical": critical,
    "relative": relative,
}
