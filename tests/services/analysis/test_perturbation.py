"""The perturbation and its bounds, against plain loops, in thousands of random cases."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from criticalkv.services.analysis.perturbation import bounds, kept_share, perturbation
from criticalkv.services.analysis.query_rows import NORMS, QueryRows, query_rows, value_norms

HEADS, GROUP, QUERIES, DIM, WIDTH = 2, 3, 4, 5, 11


def draw(seed: int, columns: int) -> tuple[QueryRows, Tensor]:
    """Rows with fp64 norms, and kept entries; peaked, flat and nearly empty ones in turns."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    logits = normal(HEADS, GROUP, QUERIES, columns) * (0.1, 1.0, 6.0)[seed % 3]
    values, w_o = normal(HEADS, columns, DIM), normal(HEADS, GROUP, DIM, WIDTH)
    values *= torch.rand(HEADS, columns, 1, generator=g, dtype=torch.float64) ** 3
    if seed % 5 == 0:  # all values alike: the bounds are as tight as they get
        values = values[:, :1].expand_as(values).contiguous()
    product = values[:, None] @ w_o
    norms = {"l1": product.abs().sum(-1), "l2": product.square().sum(-1).sqrt()}
    share = torch.rand((), generator=g)
    kept = torch.rand(HEADS, columns, generator=g) < share
    return QueryRows(logits.softmax(-1), values, norms, w_o), kept  # type: ignore[arg-type]


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_bounds_hold_for_every_query_head(first: int) -> None:
    """7,200 queries: actual ≤ θ ≤ the attention-only bound, in both norms."""
    some_below_half = 0
    for seed in range(first, first + 100):
        rows, kept = draw(seed, 1 + seed % 37)
        found = perturbation(rows, kept)
        for norm in NORMS:
            rounding = 1e-12 * found.total[norm]
            theta, attention_only = found.bounds[norm]
            assert (found.actual[norm] <= theta + rounding).all(), seed
            assert (theta <= attention_only + rounding).all(), seed
            assert (found.layer[norm] <= found.actual[norm].sum(0) * (1 + 1e-12)).all()
        assert found.violations() == 0
        some_below_half += int((found.sigma <= 0.5).sum())
    assert some_below_half > 500


@pytest.mark.parametrize("seed", [1, 8, 11])
def test_figures_equal_a_plain_loop(seed: int) -> None:
    rows, kept = draw(seed, 13)
    found = perturbation(rows, kept)
    for h in range(HEADS):
        for g in range(GROUP):
            for m in range(QUERIES):
                a = [float(x) for x in rows.probs[h, g, m]]
                v = [(row @ rows.w_o[h, g]).tolist() for row in rows.values[h]]
                n = [bool(x) for x in kept[h]]
                sigma = sum(x for x, k in zip(a, n, strict=True) if k)
                whole = [sum(a[i] * v[i][d] for i in range(13)) for d in range(WIDTH)]
                rest = [
                    sum(a[i] * v[i][d] for i in range(13) if n[i]) / sigma for d in range(WIDTH)
                ]
                norms = [sum(abs(x) for x in row) for row in v]
                c = sum(x * y for x, y in zip(a, norms, strict=True))
                s = sum(a[i] * norms[i] for i in range(13) if n[i])
                theta = c - (2 - 1 / sigma) * s
                known = min(norms) if sigma > 0.5 else max(norms)
                q = (h * GROUP + g, m)
                assert float(found.sigma[q]) == pytest.approx(sigma)
                assert float(kept_share(rows, kept)[q]) == pytest.approx(sigma)
                changed = [x - y for x, y in zip(whole, rest, strict=True)]
                assert float(found.actual["l1"][q]) == pytest.approx(sum(map(abs, changed)))
                assert float(found.actual["l2"][q]) == pytest.approx(math.hypot(*changed))
                assert float(found.bounds["l1"].theta[q]) == pytest.approx(theta)
                loose = c - (2 * sigma - 1) * known
                assert float(found.bounds["l1"].attention_only[q]) == pytest.approx(loose)


def test_the_attention_only_bound_falls_with_mass_alone() -> None:
    sigma = torch.linspace(0, 1, 101, dtype=torch.float64)
    ones = torch.ones_like(sigma)
    loose = bounds(sigma, 0 * ones, 3 * ones, 1 * ones, 2 * ones).attention_only
    assert (loose.diff() < 0).all()
    assert float(loose[50]) == 3  # σ = ½: both forms meet in C


def test_everything_kept_changes_nothing_and_nothing_kept_changes_all() -> None:
    rows, kept = draw(4, 9)
    whole = perturbation(rows, torch.ones_like(kept))
    assert float(whole.actual["l1"].max()) < 1e-12
    assert float(whole.bounds["l1"].theta.abs().max()) < 1e-12
    empty = perturbation(rows, torch.zeros_like(kept))
    out = (rows.out @ rows.w_o).abs().sum(-1).flatten(0, 1)
    torch.testing.assert_close(empty.actual["l1"], out)
    torch.testing.assert_close(empty.bounds["l1"].theta, empty.total["l1"])
    assert empty.violations() == 0


def test_a_broken_bound_is_counted() -> None:
    rows, kept = draw(8, 20)
    small = QueryRows(rows.probs, rows.values, {k: rows.norms[k] / 50 for k in NORMS}, rows.w_o)
    assert perturbation(small, kept).violations() > 0


def test_rows_see_the_past_only_and_scale() -> None:
    g = torch.Generator().manual_seed(0)
    queries = torch.randn(6, 3, 8, generator=g)
    keys, values = torch.randn(2, 7, 8, generator=g), torch.randn(2, 7, 8, generator=g)
    w_o = torch.randn(10, 48, generator=g)
    rows = query_rows(queries, keys, values, w_o, value_norms(values, w_o), scaling=0.3)
    for head in range(6):
        for m in range(3):
            seen = 5 + m
            logits = [float(queries[head, m] @ keys[head // 3, j]) * 0.3 for j in range(seen)]
            total = sum(map(math.exp, logits))
            expected = [math.exp(x) / total for x in logits] + [0.0] * (7 - seen)
            row = rows.probs[head // 3, head % 3, m].tolist()
            assert row == pytest.approx(expected, rel=1e-5)
    one = values[1, 2].double() @ w_o[:, 4 * 8 : 5 * 8].T.double()
    assert float(rows.norms["l1"][1, 1, 2]) == pytest.approx(float(one.abs().sum()), rel=1e-5)
    for head in range(6):
        own = w_o[:, head * 8 : head * 8 + 8].T.double()
        assert torch.equal(rows.w_o[head // 3, head % 3], own)
