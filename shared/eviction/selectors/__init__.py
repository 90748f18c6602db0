"""Selectors: which entries of a head fill its budget.

Each takes the candidates and the budgets int64 [layers, num_kv_heads] and returns the
kept entries, bool [layers, num_kv_heads, n], forced ones included.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from criticalkv.shared.eviction.policy import Policy, Selector
from criticalkv.shared.eviction.selectors.candidates import Candidates
from criticalkv.shared.eviction.selectors.single import critical, plain, relative
from criticalkv.shared.eviction.selectors.twostage import twostage

SelectorFn = Callable[[Candidates, Tensor, Policy], Tensor]

SELECTORS: dict[Selector, SelectorFn] = {
    "plain": plain,
    "twostage": twostage,
    "critical": critical,
    "relative": relative,
}
