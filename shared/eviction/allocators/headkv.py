"""HeadKV: budgets by each head's importance for retrieval (arXiv 2410.19258)."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from torch import Tensor

from criticalkv.shared.eviction.allocators.contest import Contest
from criticalkv.shared.eviction.allocators.divisor import spread, whole


def headkv(contest: Contest) -> Tensor:
    """Pool a part of every head's budget and give it out by importance.

    With c = max(⌊n·t⌋ − forced, 0) a head keeps c − ⌊c/β⌋ and gets its share of the pool
    Σ ⌊c/β⌋; a head that is full leaves the rest to the others. The model's total is the
    uniform one; no head ends empty, for c ≥ 1 where nothing is forced, and β > 1.
    """
    forced = contest.forced_of_all()
    uniform = contest.uniform_of_all()
    top, bottom = contest.policy.beta.as_integer_ratio()
    pooled = [(u - f) * bottom // top for u, f in zip(uniform, forced, strict=True)]
    kept = [u - p for u, p in zip(uniform, pooled, strict=True)]
    won = spread(
        sum(pooled),
        _weights(tuple(contest.importance())),
        (0,) * len(kept),
        tuple(contest.n - k for k in kept),
    )
    return contest.rows([k + w for k, w in zip(kept, won, strict=True)])


@lru_cache(maxsize=16)
def _weights(importance: tuple[float, ...]) -> tuple[int, ...]:
    """Importance as the profile's file writes it: the decimals, exactly."""
    return whole([Fraction(repr(x)) for x in importance])
