"""Selectors by one score: plain, critical, relative."""

from __future__ import annotations

from torch import Tensor

from criticalkv.shared.eviction.orders import Ranked, take
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.selectors.candidates import Candidates


def plain(entries: Candidates, budgets: Tensor, policy: Policy) -> Tensor:
    """Keep the best by attention."""
    del policy
    return _best(entries.attention, entries.forced, budgets)


def critical(entries: Candidates, budgets: Tensor, policy: Policy) -> Tensor:
    """Keep the best by critical score alone (α = 0)."""
    del policy
    return _best(entries.needed("critical"), entries.forced, budgets)


def relative(entries: Candidates, budgets: Tensor, policy: Policy) -> Tensor:
    """Keep the best by share of the layer's output."""
    del policy
    return _best(entries.needed("relative"), entries.forced, budgets)


def _best(ranked: Ranked, forced: Tensor, budgets: Tensor) -> Tensor:
    return forced | take(ranked.by_head, ~forced, budgets - forced.sum(-1))
