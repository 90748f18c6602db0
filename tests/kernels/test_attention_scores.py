"""Reduced attention scores against a loop over every query and key."""

import itertools
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from criticalkv.kernels import ops, reference

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
        reductions=("mean", "sum", "max", "sumsq"),
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
        "sum": a.sum(2),
        "max": a.amax(2),
        "sumsq": (a.square() * weight.double()[:, None]).sum(2),
    }
    for name, value in expected.items():
        assert got[name].dtype == torch.float32
        torch.testing.assert_close(got[name].double(), value, rtol=1e-4, atol=1e-7)


EVERY: tuple[ops.Reduction, ...] = ("mean", "sum", "max", "sumsq")


def reduced(a: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The reductions of A fp64 [G, m, n]."""
    return {
        "mean": a.mean(1),
        "sum": a.sum(1),
        "max": a.amax(1),
        "sumsq": (a.square() * weight.double()[:, None]).sum(1),
    }


@pytest.mark.parametrize("block", [None, 1, 3])
@pytest.mark.parametrize("lens", [None, (3, 0, 2)], ids=["root", "child"])
@pytest.mark.parametrize("padding", [(0, 0, 0), (4, 0, 2), (9, 3, 0)], ids=str)
def test_padding_equals_each_head_alone(
    padding: tuple[int, ...], lens: tuple[int, ...] | None, block: int | None
) -> None:
    """The last head of (9, 3, 0) has all 12 entries, the first only 3 for its 5 queries."""
    torch.manual_seed(1)
    group, n, m = 2, 12, 5
    queries, keys = torch.randn(3 * group, m, 8), torch.randn(3, n, 8)
    weight = torch.rand(m) + 0.5
    prefix = None if lens is None else [torch.randn(k, 8) for k in lens]
    got = ops.attention_scores(
        queries,
        keys,
        scaling=0.3,
        reductions=EVERY,
        first_query=n - m,
        prefix_keys=None if prefix is None else torch.cat(prefix),
        prefix_cu=None if lens is None else torch.tensor([0, *lens]).cumsum(0),
        query_weight=weight,
        padding=torch.tensor(padding),
        block=block,
    )
    for h, pad in enumerate(padding):
        asking = min(m, n - pad)
        a = naive(
            queries[h * group : (h + 1) * group, -asking:],
            keys[h : h + 1, pad:],
            0.3,
            n - pad - asking,
            None,
            None if prefix is None else prefix[h : h + 1],
        )
        for name, value in reduced(a, weight[-asking:]).items():
            assert got[name][h, :, :pad].eq(0).all()
            torch.testing.assert_close(got[name][h, :, pad:].double(), value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("m", [12, 5])
@pytest.mark.parametrize("block", [None, 1, 5])
@pytest.mark.parametrize("distance", [0, 1, 2, 7, 11, 12, 100])
def test_near_keys_are_seen_but_not_scored(distance: int, block: int | None, m: int) -> None:
    torch.manual_seed(2)
    n = 12
    queries, keys, weight = torch.randn(4, m, 8), torch.randn(2, n, 8), torch.rand(m) + 0.5
    got = ops.attention_scores(
        queries,
        keys,
        scaling=0.3,
        reductions=EVERY,
        first_query=n - m,
        query_weight=weight,
        min_distance=distance,
        block=block,
    )
    a = naive(queries, keys, 0.3, n - m, None, None)
    for i in range(m):
        for j in range(n):
            if (n - m + i) - j < distance:
                a[:, i, j] = 0
    for h in range(2):
        for name, value in reduced(a[2 * h : 2 * h + 2], weight).items():
            torch.testing.assert_close(got[name][h].double(), value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("distance", [0, 3])
@pytest.mark.parametrize("stride", [2, 5])
def test_strided_queries_are_the_rows_of_all(stride: int, distance: int, block: int | None) -> None:
    torch.manual_seed(5)
    queries, keys, weight = torch.randn(4, 12, 8), torch.randn(2, 14, 8), torch.rand(12)
    got = ops.attention_scores(
        queries[:, ::stride],
        keys,
        scaling=0.3,
        reductions=EVERY,
        first_query=2,
        query_weight=weight[::stride],
        min_distance=distance,
        query_stride=stride,
        block=block,
    )
    a = naive(queries, keys, 0.3, 2, None, None)
    for i, j in itertools.product(range(12), range(14)):
        if 2 + i - j < distance:
            a[:, i, j] = 0
    for h in range(2):
        rows = a[2 * h : 2 * h + 2, ::stride]
        for name, value in reduced(rows, weight[::stride]).items():
            torch.testing.assert_close(got[name][h].double(), value, rtol=1e-4, atol=1e-7)


def test_padding_and_distance_together() -> None:
    """A head's padding does not bring its entries nearer to its queries."""
    torch.manual_seed(3)
    queries, keys = torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    got = ops.attention_scores(
        queries,
        keys,
        scaling=0.3,
        reductions=("max",),
        first_query=0,
        padding=torch.tensor([4, 0]),
        min_distance=3,
    )["max"]
    for h, pad in ((0, 4), (1, 0)):
        a = naive(queries[h : h + 1, pad:], keys[h : h + 1, pad:], 0.3, 0, None, None)
        for i in range(9 - pad):
            a[:, i, max(0, i - 2) :] = 0
        torch.testing.assert_close(got[h, :, pad:].double(), a.amax(1), rtol=1e-4, atol=1e-7)


def test_a_head_of_nothing_but_padding_scores_nothing() -> None:
    got = ops.attention_scores(
        torch.randn(2, 3, 8),
        torch.randn(2, 5, 8),
        scaling=1.0,
        reductions=EVERY,
        first_query=2,
        padding=torch.tensor([5, 0]),
    )
    for name in EVERY:
        assert got[name][0].eq(0).all()
        assert got[name][1].isfinite().all()


@pytest.mark.parametrize("block", [None, 2])
def test_rows_are_what_the_reductions_reduce(block: int | None) -> None:
    torch.manual_seed(4)
    queries, keys = torch.randn(6, 5, 8), torch.randn(2, 9, 8)
    lens, padding = [3, 0], torch.tensor([0, 6])
    prefix = torch.randn(3, 8)
    cu = torch.tensor([0, *lens]).cumsum(0)
    seen: list[tuple[int, int]] = []
    for head, begin, logits, probs in ops.attention_rows(
        queries,
        keys,
        scaling=0.3,
        first_query=4,
        prefix_keys=prefix,
        prefix_cu=cu,
        padding=padding,
        block=block,
    ):
        for t in range(probs.shape[1]):
            i = begin + t
            seen.append((head, i))
            pad, end = int(padding[head]), 4 + i + 1
            for g in range(3):
                q = queries[head * 3 + g, i].double()
                own = 0.3 * keys[head, pad:end].double() @ q
                past = 0.3 * prefix[: lens[head]].double() @ q
                expected = torch.cat([own, past]).softmax(0)[: end - pad]
                torch.testing.assert_close(
                    logits[g, t, pad:end].double(), own, rtol=1e-4, atol=1e-5
                )
                torch.testing.assert_close(
                    probs[g, t, pad:end].double(), expected, rtol=1e-4, atol=1e-7
                )
                assert logits[g, t, :pad].eq(-torch.inf).all()
                assert probs[g, t, end:].eq(0).all()
    # Query i's own entry is 4 + i: head 1's first two queries are padding too.
    assert seen == [(0, i) for i in range(5)] + [(1, i) for i in range(2, 5)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "sumsq"])
def test_one_reduction_equals_all_of_them(reduction: ops.Reduction) -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(4, 6, 8), torch.randn(2, 9, 8)
    alone = ops.attention_scores(queries, keys, scaling=0.3, reductions=(reduction,))
    names: tuple[ops.Reduction, ...] = ("mean", "sum", "max", "sumsq")
    every = ops.attention_scores(queries, keys, scaling=0.3, reductions=names)
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
        (torch.zeros(2, 3, 4), {"min_distance": 1}, "first_query"),
        (torch.zeros(2, 3, 4), {"query_stride": 2}, "first_query"),
        (
            torch.zeros(2, 3, 4),
            {"query_stride": 2, "first_query": 0, "padding": torch.tensor([0, 0])},
            "padding",
        ),
    ],
)
def test_misuse_is_refused(queries: Tensor, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.attention_scores(queries, torch.zeros(2, 5, 4), scaling=1.0, **extra)


def test_a_block_is_gone_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks at once would be twice the memory."""
    made: list[weakref.ref[Tensor]] = []
    every = reference._every_column

    def watching(*args: Any, **kwargs: Any) -> Iterator[reference.AttentionRows]:
        blocks = every(*args, **kwargs)
        while (block := next(blocks, None)) is not None:
            assert all(ref() is None for ref in made)
            made.append(weakref.ref(block.probs))
            box = [block]
            del block
            yield box.pop()

    monkeypatch.setattr(reference, "_every_column", watching)
    queries, keys = torch.randn(6, 7, 8), torch.randn(2, 9, 8)
    for name in EVERY:
        ops.attention_scores(queries, keys, scaling=0.3, reductions=(name,), block=2)
    assert len(made) == len(EVERY) * 2 * 4
