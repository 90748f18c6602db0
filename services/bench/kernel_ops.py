"""Every operation of `kernels` against plain torch, which keeps what it computes in memory.

One process, both sides take turns, medians over repeats. On a CPU; on a GPU
infra/bench/gpu.sh measures against the hardware's limits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.kernels.group_layout import ROWS, GroupLayout
from criticalkv.shared.report import median

Call = Callable[[], Any]
WINDOW, POOL, CHUNK, PAGE, TIERS = 32, 7, 256, 64, 8


@dataclass(frozen=True)
class Shape:
    """Sizes of the operations' inputs.

    Attributes:
        tokens: n.
        heads: KV heads.
        group: query heads per KV head.
        dim: head_dim.
        width: D_model.
    """

    tokens: int = 4096
    heads: int = 4
    group: int = 4
    dim: int = 128
    width: int = 2048


@dataclass(frozen=True)
class Pair:
    """One operation: ours, and plain torch's.

    Attributes:
        name: of the operation.
        ours: returns what `naive` does, up to rounding.
        naive: plain torch.
        rate: work in one call, and its unit per second: ("GFLOP", 1.2) or ("GB", 0.3).
    """

    name: str
    ours: Call
    naive: Call
    rate: tuple[str, float]


def measure(shape: Shape, repeats: int, tick: Callable[[], object]) -> list[dict[str, Any]]:
    """Time all operations; `tick` is called after each."""
    torch.manual_seed(0)
    found = []
    for pair in pairs(shape):
        found.append(_timed(pair, repeats))
        tick()
    return found


def pairs(shape: Shape) -> Iterator[Pair]:
    """Yield the operations on random inputs."""
    keys, values = (torch.randn(shape.heads, shape.tokens, shape.dim) for _ in range(2))
    queries = torch.randn(shape.heads * shape.group, CHUNK, shape.dim)
    w_o = torch.randn(shape.width, shape.heads * shape.group * shape.dim) * shape.width**-0.5
    yield from _norms(shape, values, w_o)
    yield from _scores(shape, queries, keys, values)
    yield from _kept(shape, keys, values)
    yield from _decode(shape, queries[:, :1], keys, values)


def _timed(pair: Pair, repeats: int) -> dict[str, Any]:
    samples: dict[str, list[float]] = {"ours": [], "naive": []}
    right, got = pair.naive(), pair.ours()
    for _ in range(repeats):
        for name, call in (("ours", pair.ours), ("naive", pair.naive)):
            started = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - started)
    unit, work = pair.rate
    ours, naive = median(samples["ours"]), median(samples["naive"])
    return {
        "op": pair.name,
        "ours_s": ours,
        "naive_s": naive,
        "speedup": naive / ours,
        "rate": work / ours,
        "unit": f"{unit}/s",
        "relative_error": _error(got, right),
        "samples_s": samples,
    }


def _error(got: Tensor, right: Tensor) -> float:
    """Largest deviation ÷ largest magnitude."""
    got, right = got.double(), right.double()
    return float((got - right).abs().max() / right.abs().max().clamp_min(1e-30))


def _norms(shape: Shape, values: Tensor, w_o: Tensor) -> Iterator[Pair]:
    flops = 2e-9 * shape.heads * shape.group * shape.tokens * shape.dim * shape.width
    by_head = w_o.view(shape.width, shape.heads, shape.group, shape.dim)

    def naive(order: int) -> Tensor:
        product = torch.einsum("hnd,mhgd->hgnm", values, by_head)
        norms: Tensor = torch.linalg.vector_norm(product, order, dim=-1)
        return norms

    orders: tuple[tuple[ops.Norm, int], ...] = (("l1", 1), ("l2", 2))
    for norm, order in orders:
        yield Pair(
            f"value_norm {norm}",
            partial(ops.value_norm, values, w_o, shape.group, norm),
            partial(naive, order),
            ("GFLOP of v·W_O", flops),
        )


def _scores(shape: Shape, queries: Tensor, keys: Tensor, values: Tensor) -> Iterator[Pair]:
    scaling, window = shape.dim**-0.5, queries[:, -WINDOW:].contiguous()
    row = 2e-9 * shape.heads * shape.group * shape.tokens * shape.dim
    before = shape.tokens - WINDOW

    def naive_window() -> Tensor:
        logits = window.view(shape.heads, -1, shape.dim) @ keys.mT * scaling
        logits = logits.view(shape.heads, shape.group, WINDOW, -1)
        logits += torch.full((WINDOW, shape.tokens), -torch.inf).triu(before + 1)
        mean = logits.softmax(-1).mean((1, 2))
        pooled = F.max_pool1d(mean[:, :before], POOL, 1, POOL // 2)
        return torch.cat([pooled, mean[:, before:]], 1)

    yield Pair(
        "window_scores",
        lambda: ops.window_scores(window, keys, scaling=scaling, kernel=POOL, pooling="max"),
        naive_window,
        ("GFLOP", row * WINDOW),
    )
    tail = torch.randn(2, shape.heads, CHUNK, shape.dim)

    def naive_replay() -> Tensor:
        every = torch.cat([keys, tail[0]], 1).repeat_interleave(shape.group, 0)
        logits = queries @ every.mT * scaling
        logits += torch.full((CHUNK, every.shape[1]), -torch.inf).triu(shape.tokens + 1)
        probs = logits.softmax(-1)
        every = torch.cat([values, tail[1]], 1).repeat_interleave(shape.group, 0)
        replay_out.append(probs @ every)
        replay_out.clear()
        peak: Tensor = probs[..., : shape.tokens].amax(1)
        return peak.view(shape.heads, shape.group, -1)

    replay_out: list[Tensor] = []
    yield Pair(
        "scored_attention",
        lambda: ops.scored_attention(queries, keys, values, *tail, scaling=scaling)[1],
        naive_replay,
        ("GFLOP", 2 * row * CHUNK),
    )


def _kept(shape: Shape, keys: Tensor, values: Tensor) -> Iterator[Pair]:
    heads, n, dim = keys.shape
    by_score = torch.rand(heads, n).argsort(-1)
    admitted = torch.randint(0, TIERS + 1, (heads, n), dtype=torch.uint8)
    place = torch.arange(n)

    def naive_ranks() -> Tensor:
        rank = admitted.gather(-1, by_score).long() * n + place
        return by_score.gather(-1, rank.argsort(-1))

    yield Pair(
        "tier_ranks",
        lambda: ops.tier_ranks(by_score, admitted, TIERS),
        naive_ranks,
        ("G entries", 1e-9 * by_score.numel()),
    )
    kept = [by_score[h, : n // 2] for h in range(heads)]
    cu = torch.arange(heads + 1, dtype=torch.int32) * (n // 2)
    indices = torch.cat(kept)
    size = 1e-9 * 4 * 2 * heads * (n // 2) * dim
    yield Pair(
        "pack",
        lambda: torch.stack(ops.pack(keys, values, indices, cu, 0)[:2]),
        lambda: torch.stack(
            [torch.cat([t[h][kept[h]] for h in range(heads)]) for t in (keys, values)]
        ),
        ("GB packed", size),
    )
    for bits in (8, 4):
        yield _quantize(shape, keys.flatten(0, 1), values.flatten(0, 1), bits)


def _quantize(shape: Shape, keys: Tensor, values: Tensor, bits: int) -> Pair:
    starts = torch.arange(0, keys.shape[0], ROWS)
    fills = torch.full_like(starts, ROWS)
    positions = torch.arange(keys.shape[0], dtype=torch.int32)
    layout = GroupLayout(bits, shape.dim)

    def ours() -> Tensor:
        groups = ops.quantize(keys, values, positions, starts, fills, bits)
        return ops.dequantize(*groups, fills, layout)[0]

    def naive() -> Tensor:
        out = torch.empty_like(keys)
        run = layout.value_run
        for at in range(0, keys.shape[0], ROWS):
            out[at : at + ROWS] = _rounded(keys[at : at + ROWS], 0, layout.levels)
            for first in range(0, shape.dim, run):
                _rounded(values[at : at + ROWS, first : first + run], 1, layout.levels)
        return out

    return Pair(f"quantize and back, int{bits}", ours, naive, ("GB", 1e-9 * 8 * keys.numel()))


def _rounded(x: Tensor, dim: int, levels: int) -> Tensor:
    zero = x.amin(dim, keepdim=True)
    scale = ((x.amax(dim, keepdim=True) - zero) / levels).clamp_min(1e-12)
    return ((x - zero) / scale).round() * scale + zero


def _decode(shape: Shape, query: Tensor, keys: Tensor, values: Tensor) -> Iterator[Pair]:
    pages = shape.tokens // PAGE
    tables = torch.arange(shape.heads * pages, dtype=torch.int32).view(1, shape.heads, pages)
    fills, cu = torch.full_like(tables, PAGE), torch.tensor([0, 1], dtype=torch.int32)
    key_pages, value_pages = (t.reshape(-1, PAGE, shape.dim) for t in (keys, values))
    scaling = shape.dim**-0.5

    def naive() -> Tensor:
        every = [t.repeat_interleave(shape.group, 0) for t in (keys, values)]
        return F.scaled_dot_product_attention(query, every[0], every[1], scale=scaling)

    yield Pair(
        "paged_attention",
        lambda: ops.paged_attention(
            query, key_pages, value_pages, tables, fills, cu, scaling=scaling
        )[0],
        naive,
        ("GB of KV", 1e-9 * 8 * keys.numel()),
    )
    for bits in (8, 4):
        yield _quantized(shape, query, keys.flatten(0, 1), values.flatten(0, 1), bits)


def _quantized(shape: Shape, query: Tensor, keys: Tensor, values: Tensor, bits: int) -> Pair:
    layout, count = GroupLayout(bits, shape.dim), shape.tokens // ROWS
    starts = torch.arange(0, keys.shape[0], ROWS)
    fills = torch.full_like(starts, ROWS, dtype=torch.int32)
    positions = torch.arange(keys.shape[0], dtype=torch.int32)
    groups = ops.quantize(keys, values, positions, starts, fills, bits)
    tables = torch.arange(starts.numel(), dtype=torch.int32).view(1, shape.heads, count)
    table_fills, cu = fills.view(1, shape.heads, count), torch.tensor([0, 1], dtype=torch.int32)
    scaling = shape.dim**-0.5

    def naive() -> Tensor:
        full = ops.dequantize(*groups, fills, layout)[:2]
        each = [t.view(shape.heads, -1, shape.dim).repeat_interleave(shape.group, 0) for t in full]
        return F.scaled_dot_product_attention(query, each[0], each[1], scale=scaling)

    return Pair(
        f"quantized_attention int{bits}",
        lambda: ops.quantized_attention(
            query, *groups, tables, table_fills, cu, layout=layout, scaling=scaling
        )[0],
        naive,
        ("GB of KV", 1e-9 * sum(g.numel() for g in groups)),
    )
