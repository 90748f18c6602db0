"""Attention and scores in one pass equal the two operations that are tested by loops."""

from __future__ import annotations

import pytest
import torch

from criticalkv.kernels import ops, reference

torch.set_num_threads(1)

CASES = [
    # num_kv_heads, group_size, n, m, head_dim, unscored, prefix lengths
    (1, 1, 1, 1, 64, 0, None),
    (2, 3, 13, 7, 64, 2, None),
    (3, 2, 31, 5, 80, 4, (4, 0, 9)),
    (2, 8, 17, 11, 96, 0, (0, 0)),
    (1, 4, 127, 37, 16, 3, (5,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("block", [1 << 20, 200])
def test_equals_attention_and_scores(
    case: tuple[int, int, int, int, int, int, tuple[int, ...] | None],
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads, group, n, m, dim, unscored, prefix = case
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block)
    torch.manual_seed(n)
    q = torch.randn(heads * group, m, dim)
    keys, values = torch.randn(heads, n, dim), torch.randn(heads, n, dim)
    tail_k, tail_v = torch.randn(heads, m, dim), torch.randn(heads, m, dim)
    w_o = torch.randn(23, heads * group * dim)
    lens = torch.tensor(prefix or (0,) * heads)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    past_k, past_v = torch.randn(int(cu[-1]), dim), torch.randn(int(cu[-1]), dim)

    out, peak, sumsq = ops.scored_attention(
        q, keys, values, tail_k, tail_v, scaling=0.2, prefix_k=past_k, prefix_v=past_v,
        prefix_cu=cu, unscored=unscored, w_o=w_o,
    )  # fmt: skip

    rows = [torch.cat([past_k[a:b], keys[h]]) for h, (a, b) in enumerate(zip(cu, cu[1:]))]  # noqa: B905, RUF007
    vals = [torch.cat([past_v[a:b], values[h]]) for h, (a, b) in enumerate(zip(cu, cu[1:]))]  # noqa: B905, RUF007
    joined = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
    expected, _ = ops.ragged_attention(
        q, torch.cat(rows), torch.cat(vals), joined, tail_k, tail_v, scaling=0.2
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    scores = ops.attention_scores(
        q[:, unscored:],
        keys,
        scaling=0.2,
        reductions=("max", "sumsq"),
        tail_keys=tail_k,
        prefix_keys=past_k,
        prefix_cu=cu,
        query_weight=ops.output_norms(expected[:, unscored:], w_o).square().reciprocal(),
    )
    torch.testing.assert_close(peak, scores["max"], atol=1e-6, rtol=1e-5)
    assert sumsq is not None
    torch.testing.assert_close(sumsq, scores["sumsq"], atol=0, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_is_scored_in_fp32(dtype: torch.dtype) -> None:
    """Weights are those of the same tensors in fp32; ‖o_q‖ is of outputs that were rounded."""
    torch.manual_seed(5)
    shapes = [(6, 7, 32), (2, 19, 32), (2, 19, 32), (2, 7, 32), (2, 7, 32)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    w_o = torch.randn(23, 6 * 32).to(dtype)
    out, peak, sumsq = ops.scored_attention(*tensors, scaling=0.2, unscored=2, w_o=w_o)
    _, full_peak, full_sumsq = ops.scored_attention(
        *(t.float() for t in tensors), scaling=0.2, unscored=2, w_o=w_o.float()
    )
    assert out.dtype == dtype
    assert sumsq is not None
    assert full_sumsq is not None
    assert peak.dtype == sumsq.dtype == torch.float32
    torch.testing.assert_close(peak, full_peak, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sumsq, full_sumsq, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_without_w_o_there_is_no_sum_of_squares() -> None:
    one = torch.randn(1, 3, 16)
    out, peak, sumsq = ops.scored_attention(one, one, one, one, one, scaling=1.0)
    assert out.shape == (1, 3, 16)
    assert peak.shape == (1, 1, 3)
    assert sumsq is None


@pytest.mark.parametrize("unscored", [-1, 3])
def test_something_must_be_scored(unscored: int) -> None:
    one = torch.randn(1, 3, 16)
    with pytest.raises(ValueError, match="unscored"):
        ops.scored_attention(one, one, one, one, one, scaling=1.0, unscored=unscored)
