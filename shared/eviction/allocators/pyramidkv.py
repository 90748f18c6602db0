"""PyramidKV: budgets that fall with depth (arXiv 2406.02069)."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from torch import Tensor

from criticalkv.shared.eviction.allocators.contest import Contest
from criticalkv.shared.eviction.allocators.divisor import spread, whole


def pyramidkv(contest: Contest) -> Tensor:
    """Let the heads' budgets fall linearly from the first layer to the last.

    With c = max(⌊n·t⌋ − forced, 0) the last of L layers gets c/β, the first 2c − c/β, in
    proportion: a head that is full leaves the rest to the others, and the model's total is
    the uniform one. No head ends empty.
    """
    forced = contest.forced_of_all()
    spare = [u - f for u, f in zip(contest.uniform_of_all(), forced, strict=True)]
    budgets = spread(
        sum(spare),
        _line(contest.policy.beta.as_integer_ratio(), len(contest.evictable), contest.heads),
        # Where nothing is forced the uniform budget is at least 1, and so is every other.
        tuple(int(f == 0) for f in forced),
        tuple(contest.n - f for f in forced),
    )
    return contest.rows([b + f for b, f in zip(budgets, forced, strict=True)])


@lru_cache(maxsize=16)
def _line(beta: tuple[int, int], layers: int, heads: int) -> tuple[int, ...]:
    """Weights of all heads, layer after layer."""
    last = 1 / Fraction(*beta)
    first = 2 - last
    steps = max(layers - 1, 1)
    line = [first - layer * (first - last) / steps for layer in range(layers)]
    return whole([w for w in line for _ in range(heads)])
