"""Ragged attention against a loop over every query, in fp64."""

import pytest
import torch
from torch import Tensor

from criticalkv.kernels import ops, reference

torch.set_num_threads(1)


def naive(
    q: Tensor,
    prefix: list[tuple[Tensor, Tensor]],
    tail_k: Tensor,
    tail_v: Tensor,
    scaling: float,
    window: int | None = None,
    prefix_positions: list[Tensor] | None = None,
    query_positions: Tensor | None = None,
    tail_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    count, t, dim = q.shape
    heads, s, _ = tail_k.shape
    out = torch.zeros(count, t, dim, dtype=torch.float64)
    lse = torch.full((count, t), -torch.inf, dtype=torch.float64)
    for h in range(count):
        kv = h // (count // heads)
        for i in range(t):
            keys, values = [], []
            for j, (k, v) in enumerate(zip(*prefix[kv], strict=True)):
                if window is None or prefix_positions[kv][j] > query_positions[i] - window:
                    keys.append(k)
                    values.append(v)
            for j in range(max(0, s - t + i + 1)):
                if window is None or tail_positions[j] > query_positions[i] - window:
                    keys.append(tail_k[kv, j])
                    values.append(tail_v[kv, j])
            if keys:
                logits = scaling * torch.stack(keys).double() @ q[h, i].double()
                lse[h, i] = logits.logsumexp(0)
                out[h, i] = logits.softmax(0) @ torch.stack(values).double()
    return out, lse


def inputs(
    heads: int, group: int, t: int, s: int, dim: int, lens: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    torch.manual_seed(t * 31 + s)
    q = torch.randn(heads * group, t, dim).to(dtype)
    prefix = [(torch.randn(n, dim).to(dtype), torch.randn(n, dim).to(dtype)) for n in lens]
    return q, prefix, torch.randn(heads, s, dim).to(dtype), torch.randn(heads, s, dim).to(dtype)


def flat(prefix: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    lens = [k.shape[0] for k, _ in prefix]
    cu = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.cat([k for k, _ in prefix]), torch.cat([v for _, v in prefix]), cu


CASES = [
    # num_kv_heads, group_size, T, S, head_dim, prefix lengths
    (1, 1, 1, 1, 64, (0,)),
    (2, 3, 1, 1, 64, (7, 0)),
    (3, 1, 1, 13, 80, (5, 31, 1)),
    (2, 8, 1, 5, 96, (0, 0)),
    (2, 4, 7, 7, 64, (0, 0)),
    (2, 2, 7, 7, 16, (11, 3)),
    (2, 5, 3, 17, 16, (2, 0)),
    (3, 2, 11, 13, 80, (0, 0, 0)),
    (2, 2, 3, 0, 16, (4, 0)),
    (1, 2, 1, 0, 16, (0,)),
]


@pytest.mark.parametrize("block", [None, 40], ids=["whole", "blocked"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp32_equals_fp64_oracle(
    case: tuple[int, ...], block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, group, t, s, dim, lens = case
    if block:
        monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
    q, prefix, tail_k, tail_v = inputs(heads, group, t, s, dim, lens, torch.float32)
    out, none = ops.ragged_attention(q, *flat(prefix), tail_k, tail_v, scaling=0.3)
    with_lse, lse = ops.ragged_attention(
        q, *flat(prefix), tail_k, tail_v, scaling=0.3, return_lse=True
    )
    expected, expected_lse = naive(q, prefix, tail_k, tail_v, 0.3)
    assert none is None
    assert lse is not None
    assert lse.dtype == torch.float32
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(with_lse.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("case", CASES[:8], ids=str)
def test_bf16_error_is_at_most_twice_that_of_torch(case: tuple[int, ...]) -> None:
    heads, group, t, s, dim, lens = case
    q, prefix, tail_k, tail_v = inputs(heads, group, t, s, dim, lens, torch.bfloat16)
    out, _ = ops.ragged_attention(q, *flat(prefix), tail_k, tail_v, scaling=0.3)
    expected, _ = naive(q, prefix, tail_k, tail_v, 0.3)
    seen = torch.ones(t, s, dtype=torch.bool).tril(s - t)
    theirs = torch.empty_like(q)
    for h in range(heads * group):
        kv = h // group
        keys = torch.cat([prefix[kv][0], tail_k[kv]])
        values = torch.cat([prefix[kv][1], tail_v[kv]])
        mask = torch.cat([torch.ones(t, lens[kv], dtype=torch.bool), seen], dim=1)
        theirs[h] = ((q[h] @ keys.T) * 0.3).masked_fill(~mask, -torch.inf).softmax(-1) @ values
    allowed = 2 * (theirs.double() - expected).abs().max() + 1e-3
    assert (out.double() - expected).abs().max() <= allowed


@pytest.mark.parametrize("block", [None, 40], ids=["whole", "blocked"])
@pytest.mark.parametrize("window", [1, 3, 6, 100])
@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 5), (7, 7), (4, 9), (2, 0)])
def test_sliding_window_by_position(
    t: int, s: int, window: int, block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block:
        monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
    lens = (8, 0)
    q, prefix, tail_k, tail_v = inputs(2, 3, t, s, 16, lens, torch.float32)
    positions = [torch.randperm(10, dtype=torch.int32)[:n] for n in lens]
    tail_positions = torch.arange(10, 10 + s, dtype=torch.int32)
    query_positions = (
        torch.arange(10 + s - t, 10 + s, dtype=torch.int32)
        if s
        else torch.tensor([9, 20], dtype=torch.int32)
    )
    out, lse = ops.ragged_attention(
        q,
        *flat(prefix),
        tail_k,
        tail_v,
        scaling=0.3,
        window=window,
        prefix_positions=torch.cat(positions),
        query_positions=query_positions,
        tail_positions=tail_positions,
        return_lse=True,
    )
    assert lse is not None
    expected, expected_lse = naive(
        q, prefix, tail_k, tail_v, 0.3, window, positions, query_positions, tail_positions
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=2e-6)


def test_parts_combine_by_lse() -> None:
    q, prefix, tail_k, tail_v = inputs(2, 3, 4, 6, 16, (9, 0), torch.float32)
    whole, lse = ops.ragged_attention(
        q, *flat(prefix), tail_k, tail_v, scaling=0.3, return_lse=True
    )
    past, past_lse = ops.ragged_attention(
        q, *flat(prefix), tail_k[:, :0], tail_v[:, :0], scaling=0.3, return_lse=True
    )
    nothing = [(k[:0], v[:0]) for k, v in prefix]
    tail, tail_lse = ops.ragged_attention(
        q, *flat(nothing), tail_k, tail_v, scaling=0.3, return_lse=True
    )
    assert lse is not None
    assert past_lse is not None
    assert tail_lse is not None
    torch.testing.assert_close(lse, torch.logaddexp(past_lse, tail_lse))
    mixed = (past_lse - lse).exp()[..., None] * past + (tail_lse - lse).exp()[..., None] * tail
    torch.testing.assert_close(whole, mixed, rtol=1e-5, atol=1e-6)


def test_order_within_a_head_does_not_matter() -> None:
    q, prefix, tail_k, tail_v = inputs(1, 2, 3, 3, 16, (13,), torch.float32)
    shuffle = torch.randperm(13)
    shuffled = [(k[shuffle], v[shuffle]) for k, v in prefix]
    a, _ = ops.ragged_attention(q, *flat(prefix), tail_k, tail_v, scaling=0.3)
    b, _ = ops.ragged_attention(q, *flat(shuffled), tail_k, tail_v, scaling=0.3)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_strided_queries_are_accepted() -> None:
    q, prefix, tail_k, tail_v = inputs(2, 3, 4, 4, 16, (3, 5), torch.float32)
    strided = q.transpose(0, 1).contiguous().transpose(0, 1)
    a, _ = ops.ragged_attention(q, *flat(prefix), tail_k, tail_v, scaling=0.3)
    b, _ = ops.ragged_attention(strided, *flat(prefix), tail_k, tail_v, scaling=0.3)
    torch.testing.assert_close(a, b)


def test_nan_is_not_hidden() -> None:
    q, prefix, tail_k, tail_v = inputs(1, 1, 1, 1, 16, (3,), torch.float32)
    prefix[0][0][1] = torch.nan
    out, _ = ops.ragged_attention(q, *flat(prefix), tail_k, tail_v, scaling=0.3)
    assert out.isnan().all()


def test_misuse_is_refused() -> None:
    q, prefix, tail_k, tail_v = inputs(2, 1, 3, 2, 16, (3, 3), torch.float32)
    with pytest.raises(ValueError, match="tail tokens"):
        ops.ragged_attention(q, *flat(prefix), tail_k, tail_v, scaling=0.3)
    with pytest.raises(ValueError, match="divide"):
        ops.ragged_attention(q[:1], *flat(prefix), tail_k, tail_v, scaling=0.3)
    with pytest.raises(ValueError, match="positions"):
        ops.ragged_attention(q[:, :1], *flat(prefix), tail_k, tail_v, scaling=0.3, window=4)
