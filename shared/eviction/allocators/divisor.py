"""Webster's divisor method: whole entries for heads in proportion to weights.

Seat k of a head with weight w stands at mark (2k + 1)/w; the lowest marks win. Every
total takes a prefix of that one order, so a larger total takes from nobody: what nested
tiers need, and what the method of largest remainders does not give. Integers throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

Counts = tuple[int, ...]


@lru_cache(maxsize=256)
def spread(total: int, weights: Counts, floors: Counts, caps: Counts) -> Counts:
    """Spread a total over heads in proportion to weights, exactly.

    Each head's first `floor` seats come before everybody's others and its last is the
    `cap`-th. Heads of weight 0 share equally what no other head can take. Ties go to the
    lower index. Cached: layers that are streamed one at a time ask for the same spread.

    Args:
        total: seats; Σ floors ≤ total ≤ Σ caps, or the nearest of both.
        weights: ≥ 0, one a head.
        floors: ≤ caps.
        caps: most seats of each head.
    """
    total = min(max(total, sum(floors)), sum(caps))
    most = tuple(c if w else f for w, f, c in zip(weights, floors, caps, strict=True))
    if total > sum(most):
        weights, floors = (1,) * len(weights), most
    step = _last_step(total, weights, floors, caps)
    seats = _seats(step, weights, floors, caps)
    after = _seats(step + 1, weights, floors, caps)
    # At most one seat a head lies in between: the few that are left go by mark.
    waiting = [i for i, (now, then) in enumerate(zip(seats, after, strict=True)) if then > now]
    waiting.sort(key=lambda i: (Fraction(2 * seats[i] + 1, weights[i]), i))
    for i in waiting[: total - sum(seats)]:
        seats[i] += 1
    return tuple(seats)


def whole(weights: Sequence[Fraction]) -> Counts:
    """Return integers in the same proportion."""
    scale = math.lcm(*(w.denominator for w in weights))
    counts = [int(w * scale) for w in weights]
    common = math.gcd(*counts) or 1
    return tuple(c // common for c in counts)


def _last_step(total: int, weights: Counts, floors: Counts, caps: Counts) -> int:
    """Return the last multiple of 1/max(weights) at which no more than `total` are seated."""
    smallest = min((w for w in weights if w), default=1)
    low, high = 0, (max(caps) + 1) * max(*weights, 1) // smallest + 1
    while high - low > 1:
        middle = (low + high) // 2
        if sum(_seats(middle, weights, floors, caps)) <= total:
            low = middle
        else:
            high = middle
    return low


def _seats(step: int, weights: Counts, floors: Counts, caps: Counts) -> list[int]:
    """Seats whose mark is at most 2·step/max(weights): the quota, rounded half up, clamped."""
    unit = 2 * max(*weights, 1)
    return [
        min(max((2 * w * step + unit // 2) // unit, floor), cap)
        for w, floor, cap in zip(weights, floors, caps, strict=True)
    ]
