"""The canary's figures, against loops over queries, heads and entries in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from naive_layer import DIM, SCALING, WIDTH
from torch import Tensor

from criticalkv.shared.cache.quality import TierQuality
from criticalkv.shared.cache.ragged import RaggedLayer, cu_seqlens_of
from criticalkv.shared.errors import NumericsError
from criticalkv.shared.eviction.canary import Canary

Figures = list[tuple[float, float, float, float]]


class Case:
    """Random tensors of one layer over n tokens, ranked at random, under a ragged parent."""

    def __init__(self, n: int, heads: int, group: int, above: tuple[int, ...], seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.n, self.heads, self.group = n, heads, group
        self.queries = self.random(heads * group, n, DIM)
        self.keys, self.values = self.random(heads, n, DIM), self.random(heads, n, DIM)
        self.w_o = self.random(WIDTH, heads * group * DIM) / 8
        parts = self.random(2, sum(above), DIM)
        self.above = RaggedLayer(*parts, torch.zeros(sum(above)), cu_seqlens_of(above))
        self.ranks = [torch.randperm(n, generator=self.draw).tolist() for _ in range(heads)]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw)

    def lens(self, *shares: float) -> list[list[int]]:
        """Entries per tier and head; heads differ."""
        return [
            [min(self.n, max(1, int(share * self.n) + h)) for h in range(self.heads)]
            for share in shares
        ]

    def add_to(self, canary: Canary, lens: list[list[int]]) -> None:
        kept = torch.tensor([i for h in range(self.heads) for i in self.ranks[h][: lens[-1][h]]])
        asked = canary.ask(self.queries, SCALING, self.above, self.w_o)
        canary.add(asked, self.keys, self.values, self.w_o, kept, torch.tensor(lens))

    def size(self, value: Tensor, q_head: int) -> float:
        columns = self.w_o[:, q_head * DIM : (q_head + 1) * DIM].double()
        return float((columns @ value.double()).norm())

    def sigma_theta(self, q_head: int, place: int, kept: list[int]) -> tuple[float, float]:
        """σ and θ ÷ C of one query, by the theorem's own formula."""
        kv = q_head // self.group
        keys, values, _ = self.above.head(kv)
        columns = [*zip(keys, values, [True] * len(keys), strict=True)]
        columns += [(self.keys[kv, i], self.values[kv, i], i in kept) for i in range(place + 1)]
        query = self.queries[q_head, place].double()
        weights = [math.exp(SCALING * float(query @ k.double())) for k, _, _ in columns]
        share = [w / sum(weights) for w in weights]
        sizes = [a * self.size(v, q_head) for a, (_, v, _) in zip(share, columns, strict=True)]
        held = [is_kept for _, _, is_kept in columns]
        sigma = sum(a for a, is_kept in zip(share, held, strict=True) if is_kept)
        part = sum(s for s, is_kept in zip(sizes, held, strict=True) if is_kept)
        return sigma, 1.0 if sigma == 0 else 1 - (2 - 1 / sigma) * part / sum(sizes)


def oracle(cases: list[Case], places: list[list[int]], lens: list[list[list[int]]]) -> Figures:
    """Per tier: mean σ, lowest head's σ, share of heads with σ ≤ 0.5, mean θ ÷ C."""
    figures = []
    for tier in range(len(lens[0])):
        masses, thetas = [], []
        for case, asked, table in zip(cases, places, lens, strict=True):
            for q_head in range(case.heads * case.group):
                kv = q_head // case.group
                kept = case.ranks[kv][: table[tier][kv]]
                found = [case.sigma_theta(q_head, place, kept) for place in asked]
                masses.append(sum(sigma for sigma, _ in found) / len(found))
                thetas += [theta for _, theta in found]
        low = sum(mass <= 0.5 for mass in masses) / len(masses)
        mean, bound = sum(masses) / len(masses), sum(thetas) / len(thetas)
        figures.append((mean, min(masses), low, bound))
    return figures


def rows(tiers: tuple[TierQuality, ...]) -> Figures:
    return [(t.retained_mass, t.lowest_mass, t.low_mass_share, t.theta) for t in tiers]


@pytest.mark.parametrize(
    ("n", "heads", "group", "above", "places"),
    [
        (37, 2, 3, (5, 0), [27, 30, 33, 36]),  # window 11: its quarters' ends
        (37, 3, 1, (0, 0, 0), [27, 30, 33, 36]),
        (41, 1, 4, (7,), [31, 34, 37, 40]),
        (3, 2, 2, (1, 2), [0, 1, 2]),  # fewer tokens than queries
        (1, 1, 2, (0,), [0]),
    ],
)
def test_against_loops(
    n: int, heads: int, group: int, above: tuple[int, ...], places: list[int]
) -> None:
    cases = [Case(n, heads, group, above, seed) for seed in (1, 2)]
    canary = Canary(4, 11)
    lens = [case.lens(0.1, 0.35, 0.8) for case in cases]
    for case, table in zip(cases, lens, strict=True):
        case.add_to(canary, table)
    expected = oracle(cases, [places] * 2, lens)
    assert len(canary.tiers()) == 3
    for got, want in zip(rows(canary.tiers()), expected, strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_what_keeps_everything_keeps_all_mass_and_moves_nothing() -> None:
    case = Case(53, 2, 2, (9, 3), 5)
    canary = Canary(3, 32)
    case.add_to(canary, [*case.lens(0.2), [53, 53]])
    part, whole = canary.tiers()
    assert rows((whole,)) == [(1.0, 1.0, 0.0, 0.0)]
    assert part.retained_mass < 1
    assert part.theta > 0


def test_what_nobody_sees_is_no_loss() -> None:
    """Entries after the only query: their σ and θ are those of what it sees."""
    case = Case(8, 1, 1, (0,), 7)
    case.ranks = [[7, *range(7)]]
    canary = Canary(1, 1)
    case.keys[0, :7] = -100 * case.queries[0, 7]  # only its own entry holds mass
    case.add_to(canary, [[1]])
    assert rows(canary.tiers()) == [(1.0, 1.0, 0.0, pytest.approx(0, abs=1e-6))]


def test_mass_that_vanishes_is_a_bound_of_one() -> None:
    """σ = 0: nothing of what counts is kept, and θ = C."""
    case = Case(6, 1, 1, (0,), 8)
    case.ranks = [[0, 1, 2, 3, 4, 5]]
    case.keys[0, 0] = -1e4 * case.queries[0, 5]
    case.keys[0, 1:] = case.queries[0, 5]
    canary = Canary(1, 6)
    case.add_to(canary, [[1]])
    assert rows(canary.tiers()) == [(0.0, 0.0, 1.0, 1.0)]


def test_without_a_layer_there_are_no_figures() -> None:
    assert Canary(4, 32).tiers() == ()


def test_what_is_not_finite_is_refused() -> None:
    case = Case(12, 2, 2, (2, 0), 3)
    case.keys[1, 3, 0] = torch.nan
    canary = Canary(4, 8)
    case.add_to(canary, case.lens(0.5))
    with pytest.raises(NumericsError, match="last queries"):
        canary.tiers()
