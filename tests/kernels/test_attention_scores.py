"""Reduced attention scores against a loop over every query and key."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from criticalkv.kernels import ops

torch.set_num_threads(1)


def naive(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    first_query: int | None,
    tail: Tensor | None,
    prefix: list[Tensor] | None,
) -> Tensor:
    """A [num_q_heads, m, n] in fp64, one logit at a time."""
    heads, n, _ = keys.shape
    count, m, _ = queries.shape
    out = torch.zeros(count, m, n, dtype=torch.float64)
    for h in range(count):
        kv = h // (count // heads)
        for i in range(m):
            weights: dict[int, float] = {}
            total = 0.0
            for j in range(n):
                if first_query is None or j <= first_query + i:
                    logit = scaling * float(queries[h, i].double() @ keys[kv, j].double())
                    weights[j] = math.exp(logit)
                    total += weights[j]
            for key in [] if prefix is None else prefix[kv]:
                total += math.exp(scaling * float(queries[h, i].double() @ key.double()))
            if tail is not None:
                before = tail.shape[1] - m
                for key in tail[kv, : before + i + 1]:
                    total += math.exp(scaling * float(queries[h, i].double() @ key.double()))
            for j, weight in weights.items():
                out[h, i, j] = weight / total
    return out


CASES = [
    # num_kv_heads, group_size, n, m, head_dim, first_query, tail, prefix lengths, block
    (1, 1, 1, 1, 64, 0, None, None, None),
    (2, 3, 13, 5, 64, 8, None, None, None),
    (2, 8, 17, 3, 96, 14, None, (4, 0), 1),
    (3, 2, 11, 7, 80, None, 7, None, 2),
    (3, 1, 7, 4, 16, None, 6, (0, 5, 2), 3),
    (2, 2, 5, 5, 16, 0, None, (0, 0), 2),
    (1, 4, 31, 2, 16, None, None, None, None),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_naive(case: tuple[int, ...], dtype: torch.dtype) -> None:
    heads, group, n, m, dim, first, tail_len, lens, block = case
    torch.manual_seed(n)
    queries = torch.randn(heads * group, m, dim).to(dtype)
    keys = torch.randn(heads, n, dim).to(dtype)
    tail = None if tail_len is None else torch.randn(heads, tail_len, dim).to(dtype)
    prefix = None if lens is None else [torch.randn(k, dim).to(dtype) for k in lens]
    weight = torch.rand(m) + 0.5
    got = ops.attention_scores(
        queries,
        keys,
        scaling=0.2,
        reductions=("mean", "max", "sumsq"),
        first_query=first,
        tail_keys=tail,
        prefix_keys=None if prefix is None else torch.cat(prefix),
        prefix_cu=None if lens is None else torch.tensor([0, *lens]).cumsum(0),
        query_weight=weight,
        block=block,
    )
    a = naive(queries, keys, 0.2, first, tail, prefix).view(heads, group, m, n)
    expected = {
        "mean": a.mean(2),
        "max": a.amax(2),
        "sumsq": (a.square() * weight.double()[:, None]).sum(2),
    }
    for name, value in expected.items():
        assert got[name].dtype == torch.float32
        torch.testing.assert_close(got[name].double(), value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "max", "sumsq"])
def test_one_reduction_equals_all_three(reduction: ops.Reduction) -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(4, 6, 8), torch.randn(2, 9, 8)
    alone = ops.attention_scores(queries, keys, scaling=0.3, reductions=(reduction,))
    every = ops.attention_scores(queries, keys, scaling=0.3, reductions=("mean", "max", "sumsq"))
    assert list(alone) == [reduction]
    torch.testing.assert_close(alone[reduction], every[reduction], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("where", ["keys", "prefix"])
def test_large_logits_keep_their_precision(where: str) -> None:
    """log Σ exp of logits near 10⁵ would lose the share of each of two equal keys."""
    queries, keys = torch.full((1, 2, 4), 300.0), torch.full((1, 3, 4), 300.0)
    keys[0, 1] = -300
    if where == "keys":
        got = ops.attention_scores(queries, keys, scaling=1.0)["mean"]
    else:
        cu = torch.tensor([0, 1])
        got = ops.attention_scores(
            queries, keys[:, :2], scaling=1.0, prefix_keys=keys[0, 2:], prefix_cu=cu
        )["mean"]
    torch.testing.assert_close(got[0, 0, :2], torch.tensor([0.5, 0.0]))


def test_inputs_are_not_written() -> None:
    torch.manual_seed(0)
    queries, keys, tail = torch.randn(2, 3, 8), torch.randn(1, 5, 8), torch.randn(1, 3, 8)
    copies = [t.clone() for t in (queries, keys, tail)]
    ops.attention_scores(queries, keys, scaling=1.0, tail_keys=tail, reductions=("max", "mean"))
    assert all(torch.equal(a, b) for a, b in zip((queries, keys, tail), copies, strict=True))


@pytest.mark.parametrize(
    ("queries", "extra", "message"),
    [
        (torch.zeros(3, 1, 4), {}, "divide"),
        (torch.zeros(2, 0, 4), {}, "no queries"),
        (torch.zeros(2, 3, 4), {"tail_keys": torch.zeros(2, 2, 4)}, "tail keys"),
        (torch.zeros(2, 3, 4), {"first_query": -1}, "first_query"),
        (torch.zeros(2, 3, 4), {"prefix_keys": torch.zeros(2, 4)}, "together"),
    ],
)
def test_misuse_is_refused(queries: Tensor, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.attention_scores(queries, torch.zeros(2, 5, 4), scaling=1.0, **extra)
