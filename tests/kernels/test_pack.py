"""Ranking by tier and packing, against sorted() and loops over entries."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from criticalkv.kernels import ops

torch.set_num_threads(1)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1, 2), (2, 7, 64), (3, 41, 80), (2, 33, 128)]  # heads, n, D


def kept_of(heads: int, n: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Random orders of some entries per head, and lengths [tiers, heads] that ascend."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(n, generator=generator).tolist() for _ in range(heads)]
    lens = torch.randint(0, n + 1, (3, heads), generator=generator).sort(0).values
    lens[:, 0] = torch.tensor([0, 0, n])  # tiers that add nothing, and all of a head
    lens = lens.tolist()
    return [order[:n] for order, n in zip(orders, lens[-1], strict=True)], lens


def joined(kept: list[list[int]]) -> tuple[Tensor, Tensor]:
    """(indices, cu_seqlens) of entries per head."""
    lens = [0, *(len(head) for head in kept)]
    indices = torch.tensor([i for head in kept for i in head], dtype=torch.int64)
    return indices, torch.tensor(lens).cumsum(0).to(torch.int32)


def entries(kept: list[list[int]], lens: list[list[int]] | None) -> list[tuple[int, int]]:
    """(head, entry) of each row of the output."""
    if lens is None:
        return [(h, i) for h, head in enumerate(kept) for i in head]
    bounds = itertools.pairwise([[0] * len(kept), *lens])
    return [
        (h, i)
        for below, upto in bounds
        for h, head in enumerate(kept)
        for i in head[below[h] : upto[h]]
    ]


@pytest.mark.parametrize("tier_major", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_equals_a_loop(
    shape: tuple[int, int, int], dtype: torch.dtype, tier_major: bool
) -> None:
    keys, values = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    kept, lens = kept_of(*shape[:2], seed=1)
    tier_lens = torch.tensor(lens) if tier_major else None
    packed = ops.pack(keys, values, *joined(kept), 1000, tier_lens)
    rows = entries(kept, lens if tier_major else None)
    assert packed[0].shape == packed[1].shape == (len(rows), shape[2])
    for row, (h, i) in enumerate(rows):
        assert torch.equal(packed[0][row], keys[h, i])
        assert torch.equal(packed[1][row], values[h, i])
    assert packed[2].tolist() == [1000 + i for _, i in rows]
    assert [x.dtype for x in packed] == [dtype, dtype, torch.int32, torch.bool]
    assert bool(packed[3])


def test_rows_may_lie_apart() -> None:
    """Values as a projection leaves them: token after token, the heads side by side."""
    kept, _ = kept_of(2, 9, seed=3)
    keys, values = torch.randn(9, 2, 8).transpose(0, 1), torch.randn(2, 14, 16)[:, 5:, ::2]
    packed = ops.pack(keys, values, *joined(kept), 0)
    whole = ops.pack(keys.contiguous(), values.contiguous(), *joined(kept), 0)
    assert all(torch.equal(a, b) for a, b in zip(packed, whole, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_only_what_is_kept_must_be_finite(which: int, bad: float) -> None:
    kv = torch.full((2, 2, 5, 4), torch.finfo(torch.float32).max)
    kv[which, 1, 3, 2] = bad
    dropped, kept = joined([[0, 3], [4, 0]]), joined([[0, 3], [4, 3]])
    assert bool(ops.pack(*kv, *dropped, 0)[3])
    assert not bool(ops.pack(*kv, *kept, 0)[3])


def test_opposite_infinities_do_not_cancel() -> None:
    keys = torch.tensor([[[torch.inf, -torch.inf]]])
    assert not bool(ops.pack(keys, torch.zeros_like(keys), *joined([[0]]), 0)[3])


def test_nothing_may_be_kept() -> None:
    packed = ops.pack(torch.randn(2, 5, 4), torch.randn(2, 5, 4), *joined([[], []]), 0)
    assert [x.shape for x in packed] == [(0, 4), (0, 4), (0,), ()]
    assert bool(packed[3])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3),
    n=st.integers(1, 70),
    tiers=st.integers(1, 32),
    seed=st.integers(0, 2**30),
)
def test_tier_ranks_are_a_stable_sort(rows: int, n: int, tiers: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    by_score = torch.rand(2, rows, n, generator=generator).argsort(-1)
    admitted = torch.randint(0, tiers + 1, (2, rows, n), generator=generator, dtype=torch.uint8)
    got = ops.tier_ranks(by_score, admitted, tiers)
    assert got.dtype == torch.int64
    for a, row in itertools.product(range(2), range(rows)):
        tier = admitted[a, row].tolist()
        assert got[a, row].tolist() == sorted(by_score[a, row].tolist(), key=tier.__getitem__)


def test_ranks_of_no_entries() -> None:
    none = torch.empty(2, 0, dtype=torch.int64)
    assert ops.tier_ranks(none, none.to(torch.uint8), 3).shape == (2, 0)


def test_arguments_must_fit() -> None:
    order = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="shapes"):
        ops.tier_ranks(order, order[:1].to(torch.uint8), 1)
    with pytest.raises(ValueError, match="tiers"):
        ops.tier_ranks(order, order.to(torch.uint8), 256)
    with pytest.raises(ValueError, match="heads"):
        ops.pack(torch.zeros(2, 5, 4), torch.zeros(2, 5, 4), *joined([[0]]), 0)
