"""Attention scores on a GPU: softmax statistics first, then the probabilities' reductions.

No matrix of queries × keys is ever in memory:

1. `softmax_kernel` folds a split of the columns into a running softmax, block by block of
   rows (a row is a query of one query head of a KV head's group), and into the attention
   output where values are given; `merge_kernel` joins the splits, in order. What is kept of
   a row is its highest logit and 1 / Σ exp(logit − highest): a log-sum-exp in fp32 would
   lose the digits of large logits.
2. `reduce_kernel` or `window_kernel` makes the probabilities again: a program owns a block
   of columns, loops over the rows and reduces.

Blocks depend on shapes alone and no two programs add to the same number: equal inputs give
equal bits. No atomics, no synchronisation. Knows no caches and no models.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from criticalkv.kernels import reference

PROGRAMS = 512
"""Programs of the first pass below which its columns are split."""

LEAST_SPLIT = 256
"""Columns of a split, at least."""

MAX_HEAD_DIM = 256
# They change with every context: as part of the compile key they would compile anew each time.
LENGTHS = ["n", "m", "w", "tail", "first", "begin", "distance", "splits", "rows", "split_columns"]

LOG2_E = 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    q_rows,
    keys,
    values,
    key_row,
    begin,
    end,
    last,
    highest,
    total,
    acc,
    scale,
    VALUES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold the columns begin … end − 1 into a softmax; row r sees those ≤ last[r]."""
    d = tl.arange(0, BLOCK_D)
    in_d = d < DIM
    for c in range(begin, end, BLOCK_N):
        column = c + tl.arange(0, BLOCK_N)
        inside = column < end
        entry = column.to(tl.int64)
        k = tl.load(
            keys + entry[None, :] * key_row + d[:, None],
            mask=inside[None, :] & in_d[:, None],
            other=0.0,
        )
        logits = tl.dot(q_rows, k, input_precision="ieee") * scale
        seen = inside[None, :] & (column[None, :] <= last[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        # Nothing seen so far: any number will do, but −inf − −inf is none.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        if VALUES:
            v = tl.load(
                values + entry[:, None] * DIM + d[None, :],
                mask=inside[:, None] & in_d[None, :],
                other=0.0,
            )
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        highest = higher
    return highest, total, acc


@triton.jit(do_not_specialize=LENGTHS)  # type: ignore[untyped-decorator]
def softmax_kernel(  # type: ignore[no-untyped-def]
    q,  # [num_q_heads, m, D]
    keys,  # [num_kv_heads, n, D]
    values,  # like keys
    tail_keys,  # [num_kv_heads, tail, D]
    tail_values,  # like tail_keys
    prefix_keys,  # [Σ len_h, D]
    prefix_values,  # like prefix_keys
    prefix_cu,  # int32 [num_kv_heads + 1]
    padding,  # integers [num_kv_heads]
    part_highest,  # fp32 [splits, num_q_heads, m], base 2
    part_total,  # like part_highest
    part_out,  # fp32 [splits, num_q_heads, m, D]
    q_head,
    q_row,
    key_head,
    key_row,
    split_columns,
    scale,  # scaling · log2(e)
    n,
    m,
    tail,
    first,
    stride,
    CAUSAL: tl.constexpr,
    TAIL: tl.constexpr,
    PREFIX: tl.constexpr,
    PADDED: tl.constexpr,
    VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Softmax of a block of rows over one split of: keys, tail, prefix."""
    split, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < GROUP * m
    query = row % m
    d = tl.arange(0, BLOCK_D)
    in_d = d < DIM
    at = (head * GROUP + row // m) * q_head + query.to(tl.int64) * q_row
    q_rows = tl.load(q + at[:, None] + d[None, :], mask=real[:, None] & in_d[None, :], other=0.0)
    newest = tl.max(tl.where(real, query, 0), 0)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32) if VALUES else total
    begin = split * split_columns
    end = begin + split_columns

    last = query * 0 + n
    keys_end = tl.minimum(end, n)
    if CAUSAL:
        last = first + query * stride
        keys_end = tl.minimum(keys_end, first + newest * stride + 1)
    keys_begin = begin
    if PADDED:
        keys_begin = tl.maximum(begin, tl.load(padding + head).to(tl.int32))
    highest, total, acc = _fold(
        q_rows, keys + head * key_head, values + head * n * DIM, key_row, keys_begin, keys_end,
        last, highest, total, acc, scale, VALUES, DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    if TAIL:
        own = tail - m  # column of query 0
        base = head * tail * DIM
        tail_begin = tl.maximum(begin - n, 0)
        tail_end = tl.minimum(tl.minimum(end - n, tail), own + newest + 1)
        highest, total, acc = _fold(
            q_rows, tail_keys + base, tail_values + base, DIM, tail_begin, tail_end,
            own + query, highest, total, acc, scale, VALUES, DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    if PREFIX:
        start = tl.load(prefix_cu + head)
        length = tl.load(prefix_cu + head + 1) - start
        base = start.to(tl.int64) * DIM
        prefix_begin = tl.maximum(begin - n - tail, 0)
        prefix_end = tl.minimum(end - n - tail, length)
        highest, total, acc = _fold(
            q_rows, prefix_keys + base, prefix_values + base, DIM, prefix_begin, prefix_end,
            query * 0 + length, highest, total, acc, scale, VALUES, DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip

    part = (split.to(tl.int64) * tl.num_programs(2) + head) * GROUP * m + row
    tl.store(part_highest + part, highest, mask=real)
    tl.store(part_total + part, total, mask=real)
    if VALUES:
        place = part[:, None] * DIM + d[None, :]
        tl.store(part_out + place, acc, mask=real[:, None] & in_d[None, :])


@triton.jit(do_not_specialize=LENGTHS)  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    part_highest,  # fp32 [splits, rows], base 2
    part_total,  # like part_highest
    part_out,  # fp32 [splits, rows, D]
    highest,  # fp32 [rows], base 2
    inverse,  # fp32 [rows], 1 / Σ 2^(logit − highest), or 0 of nothing
    out,  # [rows, D]
    splits,
    rows,
    VALUES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Join the splits of a block of rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < rows
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for i in range(0, splits, BLOCK_S):
        s = i + tl.arange(0, BLOCK_S)
        at = s.to(tl.int64)[:, None] * rows + row[None, :]
        mask = (s < splits)[:, None] & real[None, :]
        top = tl.maximum(top, tl.max(tl.load(part_highest + at, mask=mask, other=float("-inf")), 0))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_R], tl.float32)
    for i in range(0, splits, BLOCK_S):
        s = i + tl.arange(0, BLOCK_S)
        at = s.to(tl.int64)[:, None] * rows + row[None, :]
        mask = (s < splits)[:, None] & real[None, :]
        parts = tl.load(part_highest + at, mask=mask, other=float("-inf"))
        sums = tl.load(part_total + at, mask=mask, other=0.0)
        total += tl.sum(sums * tl.exp2(parts - top[None, :]), 0)
    empty = total == 0.0
    share = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    tl.store(highest + row, top, mask=real)
    tl.store(inverse + row, share, mask=real)
    if VALUES:
        d = tl.arange(0, BLOCK_D)
        mask = real[:, None] & (d < DIM)[None, :]
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for s in range(splits):
            at = row + tl.full([], s, tl.int64) * rows
            parts = tl.load(part_highest + at, mask=real, other=float("-inf"))
            sums = tl.load(part_out + at[:, None] * DIM + d[None, :], mask=mask, other=0.0)
            acc += sums * tl.exp2(parts - top)[:, None]
        result = (acc * share[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * DIM + d[None, :], result, mask=mask)


@triton.jit(do_not_specialize=LENGTHS)  # type: ignore[untyped-decorator]
def reduce_kernel(  # type: ignore[no-untyped-def]
    q,  # [num_q_heads, m, D]
    keys,  # [num_kv_heads, n, D]
    highest,  # fp32 [num_q_heads, m], base 2
    inverse,  # like highest
    query_weight,  # fp32 [m]
    padding,  # integers [num_kv_heads]
    sums,  # fp32 [num_q_heads, n]
    peaks,  # like sums
    squares,  # like sums
    q_head,
    q_row,
    key_head,
    key_row,
    scale,  # scaling · log2(e)
    n,
    m,
    begin,  # first query that counts
    first,
    stride,
    distance,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SUM: tl.constexpr,
    PEAK: tl.constexpr,
    SQUARES: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Reduce the probabilities of a block of columns over the queries of one head."""
    # The heads of a group run side by side: the cache serves all but the first.
    start = tl.program_id(0) // GROUP * BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    this = head * GROUP + tl.program_id(0) % GROUP
    column = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_d = d < DIM
    k = tl.load(
        keys + head * key_head + column.to(tl.int64)[:, None] * key_row + d[None, :],
        mask=(column < n)[:, None] & in_d[None, :],
        other=0.0,
    )
    total = tl.zeros([BLOCK_N], tl.float32)
    peak = tl.zeros([BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_N], tl.float32)
    query_0 = begin
    pad = 0
    if PADDED:
        pad += tl.load(padding + head).to(tl.int32)
    if CAUSAL:
        near = start + distance - first  # queries before this many columns score none of these
        query_0 = tl.maximum(query_0, (near + stride - 1) // stride)
    for i in range(query_0, m, BLOCK_M):
        query = i + tl.arange(0, BLOCK_M)
        asks = query < m
        at = this * q_head + query.to(tl.int64) * q_row
        q_rows = tl.load(
            q + at[None, :] + d[:, None], mask=asks[None, :] & in_d[:, None], other=0.0
        )
        logits = tl.dot(k, q_rows, input_precision="ieee") * scale
        top = tl.load(highest + this * m + query, mask=asks, other=0.0)
        share = tl.load(inverse + this * m + query, mask=asks, other=0.0)
        probs = tl.exp2(logits - top[None, :]) * share[None, :]
        scored = asks[None, :] & (column < n)[:, None]
        if CAUSAL:
            last = first + query * stride - distance
            scored = scored & (column[:, None] <= last[None, :])
        if PADDED:  # with it goes what a query scores whose own column is padding
            scored = scored & (column >= pad)[:, None]
        probs = tl.where(scored, probs, 0.0)
        if SUM:
            total += tl.sum(probs, 1)
        if PEAK:  # NaN would lose every comparison
            peak = tl.maximum(peak, tl.max(tl.where(probs == probs, probs, float("inf")), 1))
        if SQUARES:
            weighted = probs * probs
            if WEIGHTED:
                weighted *= tl.load(query_weight + query, mask=asks, other=0.0)[None, :]
            square += tl.sum(weighted, 1)
    place = this * n + column
    if SUM:
        tl.store(sums + place, total, mask=column < n)
    if PEAK:
        peak = tl.where(peak == float("inf"), float("nan"), peak)
        tl.store(peaks + place, peak, mask=column < n)
    if SQUARES:
        tl.store(squares + place, square, mask=column < n)


@triton.jit(do_not_specialize=LENGTHS)  # type: ignore[untyped-decorator]
def window_kernel(  # type: ignore[no-untyped-def]
    q,  # [num_q_heads, w, D]
    keys,  # [num_kv_heads, n, D]
    highest,  # fp32 [num_q_heads, w], base 2
    inverse,  # like highest
    out,  # fp32 [num_kv_heads, n]
    q_head,
    q_row,
    key_head,
    key_row,
    scale,  # scaling · log2(e)
    factor,  # of the sum over window and group
    n,
    w,
    KERNEL: tl.constexpr,
    MAX: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Score a block of columns by the window, and pool them with what it knows around it.

    Of its columns, a program makes but does not write the KERNEL // 2 on either side.
    """
    HALO: tl.constexpr = KERNEL // 2
    head = tl.program_id(1).to(tl.int64)
    index = tl.arange(0, BLOCK_N)
    column = tl.program_id(0) * (BLOCK_N - 2 * HALO) - HALO + index
    d = tl.arange(0, BLOCK_D)
    in_d = d < DIM
    exists = (column >= 0) & (column < n)
    k = tl.load(
        keys + head * key_head + column.to(tl.int64)[:, None] * key_row + d[None, :],
        mask=exists[:, None] & in_d[None, :],
        other=0.0,
    )
    score = tl.zeros([BLOCK_N], tl.float32)
    for i in range(0, GROUP * w, BLOCK_M):
        row = i + tl.arange(0, BLOCK_M)
        real = row < GROUP * w
        query = row % w
        at = (head * GROUP + row // w) * q_head + query.to(tl.int64) * q_row
        q_rows = tl.load(
            q + at[None, :] + d[:, None], mask=real[None, :] & in_d[:, None], other=0.0
        )
        logits = tl.dot(k, q_rows, input_precision="ieee") * scale
        top = tl.load(highest + head * GROUP * w + row, mask=real, other=0.0)
        share = tl.load(inverse + head * GROUP * w + row, mask=real, other=0.0)
        probs = tl.exp2(logits - top[None, :]) * share[None, :]
        seen = real[None, :] & (column[:, None] <= (n - w + query)[None, :])
        score += tl.sum(tl.where(seen, probs, 0.0), 1)
    score *= factor
    if KERNEL > 1:
        before = (column >= 0) & (column < n - w)
        near = (index[None, :] - index[:, None] <= HALO) & (index[:, None] - index[None, :] <= HALO)
        # NaN would lose every comparison.
        around = tl.where(score == score, score, float("inf"))
        around = tl.where(near & before[None, :], around[None, :], 0.0)
        pooled = tl.max(around, 1) if MAX else tl.sum(around, 1) / KERNEL
        score = tl.where(before, pooled, score)
    written = exists & (index >= HALO) & (index < BLOCK_N - HALO)
    tl.store(out + head * n + column, score, mask=written)


def softmax_sizes(dim: int, rows: int, itemsize: int, *, values: bool) -> dict[str, int]:
    """Return `softmax_kernel`'s block sizes, warps and stages.

    Args:
        dim: D.
        rows: group_size · queries.
        itemsize: of q, in bytes; fp32 products live in plain registers and need more.
        values: whether it computes the output too.
    """
    block_d = _block_d(dim)
    few, fp32, wide = rows <= 16, itemsize == 4, block_d > 128
    return {
        "BLOCK_D": block_d,
        "BLOCK_M": 16 if few or fp32 else 64 if wide else 128,
        "BLOCK_N": 32 if fp32 or wide else 64,
        "num_warps": 4 if few and not fp32 else 8,
        "num_stages": 2 if fp32 or values else 3,
    }


def reduce_sizes(dim: int, rows: int, itemsize: int) -> dict[str, int]:
    """Return the block sizes, warps and stages of `reduce_kernel` and `window_kernel`.

    Args:
        dim: D.
        rows: queries, or those of all heads of a group.
        itemsize: of q, in bytes.
    """
    block_d = _block_d(dim)
    fp32, wide = itemsize == 4, block_d > 128
    most = 16 if fp32 else 32 if wide else 64
    return {
        "BLOCK_D": block_d,
        "BLOCK_M": min(most, max(16, int(triton.next_power_of_2(rows)))),
        "BLOCK_N": 32 if fp32 else 64 if wide else 128,
        "num_warps": 8,
        "num_stages": 2,
    }


def _block_d(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def applies(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these: of one dtype, which they know, and not too wide."""
    given = [t for t in tensors if t is not None]
    known = given[0].dtype in (torch.float16, torch.bfloat16, torch.float32)
    same = all(t.dtype == given[0].dtype and t.device == given[0].device for t in given)
    return known and same and given[0].shape[-1] <= MAX_HEAD_DIM


@dataclass(frozen=True)
class _Seen:
    """What the queries [num_q_heads, m, D] see; see `ops.attention_scores` for the names."""

    queries: Tensor
    keys: Tensor
    scaling: float
    first: int | None = None
    stride: int = 1
    tail_keys: Tensor | None = None
    prefix_keys: Tensor | None = None
    prefix_cu: Tensor | None = None
    padding: Tensor | None = None

    @property
    def group_size(self) -> int:
        return self.queries.shape[0] // self.keys.shape[0]

    @property
    def strides(self) -> tuple[int, ...]:
        """From one head and one row to the next, of queries and of keys, in elements."""
        return (*self.queries.stride()[:2], *self.keys.stride()[:2])

    @property
    def tail(self) -> int:
        return 0 if self.tail_keys is None else self.tail_keys.shape[1]

    @property
    def flags(self) -> dict[str, bool]:
        return {"CAUSAL": self.first is not None, "PADDED": self.padding is not None}

    def columns(self) -> int:
        """Most columns of a head; where lengths are on the GPU, an upper bound."""
        own = self.keys.shape[1] + self.tail
        if self.prefix_keys is None or self.prefix_cu is None:
            return own
        if self.prefix_cu.is_cpu:
            return own + int(self.prefix_cu.diff().max())
        return own + self.prefix_keys.shape[0]


class _Values(NamedTuple):
    """Values of what is seen, laid out like the keys."""

    own: Tensor
    tail: Tensor
    prefix: Tensor | None


class _Softmax(NamedTuple):
    """Highest logit (base 2) and 1 / Σ of each row, fp32 [num_q_heads, m]; the output."""

    highest: Tensor
    inverse: Tensor
    out: Tensor | None


def _dense(rows: Tensor) -> Tensor:
    """The same with each row's elements side by side, as the kernels read them."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@functools.lru_cache(maxsize=256)
def _on_device(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 on the device; kept, because each chunk of a context asks for the same."""
    return torch.tensor(lengths, dtype=torch.int32).to(device, non_blocking=True)


def _lengths(prefix_cu: Tensor | None, like: Tensor) -> Tensor:
    if prefix_cu is None:
        return like
    if prefix_cu.is_cpu:
        return _on_device(tuple(prefix_cu.tolist()), like.device)
    return prefix_cu.to(torch.int32)


def _split_columns(columns: int, programs: int, block: int) -> int:
    """Columns of a split, such that there are enough programs; a multiple of the block."""
    wanted = triton.cdiv(columns, triton.cdiv(PROGRAMS, programs))
    return int(triton.cdiv(max(LEAST_SPLIT, wanted), block) * block)


def _softmax(seen: _Seen, values: _Values | None = None) -> _Softmax:
    """The first pass."""
    q, keys = seen.queries, seen.keys
    (num_q_heads, m, dim), heads = q.shape, keys.shape[0]
    rows, total_rows = seen.group_size * m, num_q_heads * m
    sizes = softmax_sizes(dim, rows, q.element_size(), values=values is not None)
    blocks = triton.cdiv(rows, sizes["BLOCK_M"])
    columns = seen.columns()
    step = _split_columns(columns, heads * blocks, sizes["BLOCK_N"])
    splits = triton.cdiv(columns, step)
    part = q.new_empty((2, splits, num_q_heads, m), dtype=torch.float32)
    merged = q.new_empty((2, num_q_heads, m), dtype=torch.float32)
    out = part_out = q  # not written without values
    if values is not None:
        part_out = q.new_empty((splits, num_q_heads, m, dim), dtype=torch.float32)
        out = q.new_empty(q.shape)
    tail_keys = q if seen.tail_keys is None else seen.tail_keys.contiguous()
    prefix_keys = q if seen.prefix_keys is None else seen.prefix_keys.contiguous()
    prefix_values = None if values is None else values.prefix
    softmax_kernel[(blocks, splits, heads)](
        q,
        keys,
        keys if values is None else values.own.contiguous(),
        tail_keys,
        tail_keys if values is None else values.tail.contiguous(),
        prefix_keys,
        prefix_keys if prefix_values is None else prefix_values.contiguous(),
        _lengths(seen.prefix_cu, q),
        q if seen.padding is None else seen.padding,
        part[0],
        part[1],
        part_out,
        *seen.strides,
        step,
        seen.scaling * LOG2_E,
        keys.shape[1],
        m,
        seen.tail,
        seen.first or 0,
        seen.stride,
        TAIL=seen.tail > 0,
        PREFIX=seen.prefix_keys is not None,
        VALUES=values is not None,
        GROUP=seen.group_size,
        DIM=dim,
        **seen.flags,
        **sizes,
    )
    block_r = 16
    merge_kernel[(triton.cdiv(total_rows, block_r),)](
        part[0],
        part[1],
        part_out,
        merged[0],
        merged[1],
        out,
        splits,
        total_rows,
        VALUES=values is not None,
        DIM=dim,
        BLOCK_D=sizes["BLOCK_D"],
        BLOCK_R=block_r,
        BLOCK_S=32,
        num_warps=4,
    )
    return _Softmax(merged[0], merged[1], None if values is None else out)


def _reduce(
    seen: _Seen,
    softmax: _Softmax,
    reductions: Sequence[str],
    *,
    begin: int = 0,
    weight: Tensor | None = None,
    distance: int = 0,
) -> dict[str, Tensor]:
    """The second pass: "sum", "max", "sumsq" over the queries from `begin` on."""
    q, keys = seen.queries, seen.keys
    (_, m, dim), (heads, n, _), group = q.shape, keys.shape, seen.group_size
    reduced = {name: q.new_empty((heads, group, n), dtype=torch.float32) for name in reductions}
    unused = softmax.highest
    sizes = reduce_sizes(dim, m, q.element_size())
    reduce_kernel[(triton.cdiv(n, sizes["BLOCK_N"]) * group, heads)](
        q,
        keys,
        softmax.highest,
        softmax.inverse,
        unused if weight is None else weight,
        unused if seen.padding is None else seen.padding,
        *(reduced.get(name, unused) for name in ("sum", "max", "sumsq")),
        *seen.strides,
        seen.scaling * LOG2_E,
        n,
        m,
        begin,
        seen.first or 0,
        seen.stride,
        distance,
        WEIGHTED=weight is not None,
        SUM="sum" in reduced,
        PEAK="max" in reduced,
        SQUARES="sumsq" in reduced,
        GROUP=group,
        DIM=dim,
        **seen.flags,
        **sizes,
    )
    return reduced


def attention_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    reductions: Sequence[str],
    first_query: int | None,
    tail_keys: Tensor | None,
    prefix_keys: Tensor | None,
    prefix_cu: Tensor | None,
    query_weight: Tensor | None,
    padding: Tensor | None,
    min_distance: int,
    query_stride: int,
    block: int | None,  # noqa: ARG001
) -> dict[str, Tensor]:
    """Return the reductions; see `ops` for the arguments. `block` has no meaning here."""
    seen = _Seen(
        _dense(queries),
        _dense(keys),
        scaling,
        first_query,
        query_stride,
        tail_keys,
        prefix_keys,
        prefix_cu,
        None if padding is None else padding.to(queries.device),
    )
    weight = None if query_weight is None else query_weight.float().contiguous()
    kept = {"sum" if name == "mean" else name for name in reductions}
    order = [name for name in ("sum", "max", "sumsq") if name in kept]
    reduced = _reduce(seen, _softmax(seen), order, weight=weight, distance=min_distance)
    if "mean" in reductions:
        reduced["mean"] = reduced["sum"] / _asked(seen)
    return reduced


def _asked(seen: _Seen) -> Tensor | int:
    """Queries that count, by head: int, or [num_kv_heads, 1, 1]; at least 1."""
    m = seen.queries.shape[1]
    if seen.padding is None or seen.first is None:
        return m
    return (m - (seen.padding - seen.first).clamp(0, m)).clamp_min(1)[:, None, None]


def scored_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    *,
    scaling: float,
    prefix_k: Tensor | None,
    prefix_v: Tensor | None,
    prefix_cu: Tensor | None,
    unscored: int,
    w_o: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (out [Hq, m, D], peak [H, G, n], sumsq [H, G, n] or None); see `ops`."""
    seen = _Seen(
        _dense(q),
        _dense(keys),
        scaling,
        tail_keys=tail_k,
        prefix_keys=prefix_k,
        prefix_cu=prefix_cu,
    )
    softmax = _softmax(seen, _Values(values, tail_v, prefix_v))
    out = softmax.out
    assert out is not None  # values were given
    weight = _output_weight(out, w_o)
    names = ("max",) if w_o is None else ("max", "sumsq")
    reduced = _reduce(seen, softmax, names, begin=unscored, weight=weight)
    return out, reduced["max"], reduced.get("sumsq")


def _output_weight(out: Tensor, w_o: Tensor | None) -> Tensor | None:
    """1 / ‖o_q‖₂², fp32 [m]."""
    if w_o is None:
        return None
    norms = reference.output_norms(out, w_o)
    return norms.clamp_min(reference.MIN_NORM).square().reciprocal()


def window_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    kernel: int,
    pooling: str | None,
    reduction: str,
    prefix_keys: Tensor | None,
    prefix_cu: Tensor | None,
) -> Tensor:
    """Return the pooled scores of the window, fp32 [num_kv_heads, n]; see `ops`."""
    (_, width, dim), (heads, n, _) = queries.shape, keys.shape
    seen = _Seen(
        _dense(queries),
        _dense(keys),
        scaling,
        n - width,
        prefix_keys=prefix_keys,
        prefix_cu=prefix_cu,
    )
    softmax = _softmax(seen)
    kernel = 1 if pooling is None else kernel
    factor = 1 / (seen.group_size * (width if reduction == "mean" else 1))
    sizes = reduce_sizes(dim, seen.group_size * width, queries.element_size())
    if 2 * kernel > sizes["BLOCK_N"]:  # mostly halo
        total = _reduce(seen, softmax, ("sum",))["sum"].sum(1) * factor
        return reference.pool(total, n - width, kernel, pooling)
    out = keys.new_empty((heads, n), dtype=torch.float32)
    own = sizes["BLOCK_N"] - 2 * (kernel // 2)
    window_kernel[(triton.cdiv(n, own), heads)](
        seen.queries,
        seen.keys,
        softmax.highest,
        softmax.inverse,
        out,
        *seen.strides,
        scaling * LOG2_E,
        factor,
        n,
        width,
        KERNEL=kernel,
        MAX=pooling == "max",
        GROUP=seen.group_size,
        DIM=dim,
        **sizes,
    )
    return out
