"""The window's pooled scores against loops over columns and neighbours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from criticalkv.kernels import ops

torch.set_num_threads(1)


def naive(
    queries: Tensor, keys: Tensor, prefix: list[Tensor], kernel: int, pooling: str | None, over: str
) -> list[list[float]]:
    """Scores [num_kv_heads][n] in fp64, one logit at a time."""
    (heads, n, _), (count, width, _) = keys.shape, queries.shape
    group, result = count // heads, []
    for h in range(heads):
        scores = [0.0] * n
        for g in range(group):
            for i in range(width):
                query = queries[h * group + g, i].double()
                seen = keys[h, : n - width + i + 1]
                weights = [math.exp(0.2 * float(query @ key.double())) for key in seen]
                rest = [math.exp(0.2 * float(query @ key.double())) for key in prefix[h]]
                for j, weight in enumerate(weights):
                    share = weight / math.fsum(weights + rest)
                    scores[j] += share / group / (width if over == "mean" else 1)
        result.append(pooled(scores, n - width, kernel, pooling))
    return result


def pooled(scores: list[float], before: int, kernel: int, pooling: str | None) -> list[float]:
    """The first `before` scores over their neighbours, the others as they are."""
    if pooling is None:
        return scores
    out = list(scores)
    for j in range(before):
        near = scores[max(0, j - kernel // 2) : min(before, j + kernel // 2 + 1)]
        out[j] = max(near) if pooling == "max" else math.fsum(near) / kernel
    return out


# num_kv_heads, group_size, n, window, head_dim, kernel, pooling, reduction, prefix lengths
CASES: list[tuple[Any, ...]] = [
    (1, 1, 1, 1, 64, 7, "max", "mean", (0,)),
    (2, 3, 13, 5, 64, 7, "max", "mean", (0, 0)),
    (2, 3, 13, 5, 80, 3, "avg", "sum", (4, 0)),
    (1, 8, 11, 10, 16, 5, "avg", "mean", (3,)),
    (1, 2, 7, 7, 16, 5, "avg", "mean", (0,)),
    (3, 1, 17, 2, 96, 5, None, "mean", (0, 5, 2)),
    (1, 2, 17, 2, 16, 63, "max", "sum", (0,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_loops(case: tuple[Any, ...]) -> None:
    heads, group, n, width, dim, kernel, pooling, over, lens = case
    torch.manual_seed(n)
    queries, keys = torch.randn(heads * group, width, dim), torch.randn(heads, n, dim)
    prefix = [torch.randn(length, dim) for length in lens]
    got = ops.window_scores(
        queries,
        keys,
        scaling=0.2,
        kernel=kernel,
        pooling=pooling,
        reduction=over,
        prefix_keys=torch.cat(prefix) if any(lens) else None,
        prefix_cu=torch.tensor([0, *lens]).cumsum(0) if any(lens) else None,
    )
    assert got.dtype == torch.float32
    expected = torch.tensor(naive(queries, keys, prefix, kernel, pooling, over))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("width", "kernel", "message"), [(4, 7, "first_query"), (2, 4, "odd"), (0, 7, "no queries")]
)
def test_misuse_is_refused(width: int, kernel: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.window_scores(
            torch.randn(1, width, 8), torch.randn(1, 3, 8), scaling=1, kernel=kernel, pooling="max"
        )
