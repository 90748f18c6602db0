"""Exact counts and deterministic top-k: what allocators and selectors are made of.

Ties go to the lower index, always; counts are integers from exact fractions.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

EXACT = 1 << 20
"""Factors below it keep the product with any count of entries, < 2^42, within int64."""


class Ranked:
    """A score matrix [layers, num_kv_heads, n] with its sort orders, each made once."""

    def __init__(self, score: Tensor) -> None:
        self.score = score

    @cached_property
    def by_head(self) -> Tensor:
        """Entries of each head by (−score, index): int64 [layers, num_kv_heads, n]."""
        return order_of(self.score)

    @cached_property
    def by_layer(self) -> Tensor:
        """Entries of each layer, (head, index) flattened: int64 [layers, num_kv_heads · n]."""
        return order_of(self.score.flatten(1))

    @cached_property
    def by_model(self) -> Tensor:
        """Entries of the model, (layer, head, index) flattened: int64 [all]."""
        return order_of(self.score.flatten())


class Forced:
    """A mask of entries kept at every tier, with its counts, each made once."""

    def __init__(self, mask: Tensor) -> None:
        """Take bool [layers, num_kv_heads, n]."""
        self.mask = mask

    @cached_property
    def counts(self) -> Tensor:
        """Forced entries of each head, int64 [layers, num_kv_heads]."""
        return self.mask.sum(-1)

    @cached_property
    def listed(self) -> tuple[tuple[int, ...], ...]:
        """The same as numbers, layer by layer."""
        return tuple(tuple(int(c) for c in row) for row in self.counts.tolist())


def order_of(score: Tensor) -> Tensor:
    """Return the indices of the last dimension by (−score, index), int64."""
    return torch.sort(score, dim=-1, descending=True, stable=True).indices


def take(order: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """Return the mask of the first `count` candidates in an order.

    Args:
        order: int64 [..., n], a permutation of the last dimension.
        candidates: bool [..., n].
        count: int64 [...].
    """
    waiting = candidates.gather(-1, order)
    taken = waiting & (waiting.cumsum(-1) <= count.unsqueeze(-1))
    return torch.zeros_like(candidates).scatter_(-1, order, taken)


def floor_of(share: Decimal | str, count: int) -> int:
    """Return ⌊share · count⌋ exactly."""
    fraction = Fraction(share)
    return fraction.numerator * count // fraction.denominator


def floors_of(share: Decimal, counts: Tensor) -> Tensor:
    """Return ⌊share · c⌋ of each of a few int64 counts ≥ 0, exactly."""
    fraction = Fraction(share)
    if fraction.numerator < EXACT and fraction.denominator < 1 << 62:
        return counts * fraction.numerator // fraction.denominator
    floors = [floor_of(share, c) for c in counts.flatten().tolist()]
    return torch.tensor(floors, dtype=torch.int64, device=counts.device).view_as(counts)
