"""Attention over quantized groups in pages on a CPU, in fp32: a numba kernel.

Rows of a group are expanded into a buffer that stays in the first-level cache, and all
queries of the KV head attend to them there: what crosses the memory bus are codes.
Expanding costs one multiplication and one addition per element, no more than the products
of one query with it. How rows are cut and merged: `attention_cpu`. Bytes of a group:
`group_layout`.

Knows no caches and no models.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic
from torch import Tensor

from criticalkv.kernels import quantized_reference
from criticalkv.kernels.attention_cpu import (
    CHUNK,
    LOG2E,
    F,
    add_values,
    constants,
    cut,
    dots,
    int32,
    launch,
    load_queries,
    merge,
    weigh,
)
from criticalkv.kernels.group_layout import ROWS, VALUE_RUN, GroupLayout
from criticalkv.kernels.vectors_cpu import (
    BLOCK,
    FLOAT,
    I32,
    I64,
    LANES,
    address,
    compiled,
    fused,
    picked,
    prefetch,
    take,
    vector,
)

MAX_ROWS = 256
"""Queries of a sequence times group size that run at once: their logits stay in the cache."""

LINE = 64
"""Bytes that come from memory at once."""

AHEAD = 2
"""A group is prefetched so many groups before it is needed."""

_RUN = VALUE_RUN[4]


# Like `group` and `lanes` in `attention_cpu`, `bits` is a tuple whose length says what it
# is called. `keys` and `values` are the pages' memory, flat, as (bytes, halves, words).


def _halves_at(context: Any, builder: Any, array: tuple[Any, Any], index: Any, count: int) -> Any:
    """Load so many halves as floats."""
    halves = address(context, builder, array, index, vector(ir.HalfType(), count))
    return builder.fpext(builder.load(halves, align=2), vector(FLOAT, count))


def _codes_at(
    context: Any, builder: Any, array: tuple[Any, Any], index: Any, dim: int, bits: int
) -> Any:
    """Load the codes of a row as floats."""
    count = dim * bits // 8
    kind = vector(ir.IntType(8), count)
    codes = builder.load(address(context, builder, array, index, kind), align=1)
    if bits == 4:
        low = builder.and_(codes, ir.Constant(kind, [15] * count))
        high = builder.lshr(codes, ir.Constant(kind, [4] * count))
        codes = picked(builder, low, range(dim), high)
    wide = builder.zext(codes, vector(I32, dim))
    return builder.sitofp(wide, vector(FLOAT, dim))


def _store_row(
    context: Any, builder: Any, array: tuple[Any, Any], index: Any, parts: tuple[Any, Any, Any]
) -> Any:
    """Store zero + scale · code; parts: code, scale, zero."""
    code, scale, zero = parts
    row = fused(builder, zero, scale, code)
    builder.store(row, address(context, builder, array, index, row.type), align=4)
    return context.get_dummy_value()


@intrinsic
def _expand_key(_, codes, at, affine, out, to, lanes, bits):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """out.flat[to:] = the key at codes[at:], by affine [2, D]: scale and zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = list(zip(signature.args, args, strict=True))
        dim = lanes.count * LANES
        code = _codes_at(context, builder, array[0], args[1], dim, bits.count)
        kind = vector(FLOAT, dim)
        scale, zero = (
            builder.load(address(context, builder, array[2], I64(first), kind), align=4)
            for first in (0, dim)
        )
        return _store_row(context, builder, array[3], args[4], (code, scale, zero))

    return types.void(codes, types.int64, affine, out, types.int64, lanes, bits), generate


@intrinsic
def _expand_value(_, codes, at, halves, affine_at, out, to, lanes, bits):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """out.flat[to:] = the value at codes[at:], by the (scale, zero) of each run of channels."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = list(zip(signature.args, args, strict=True))
        layout = GroupLayout(bits.count, lanes.count * LANES)
        code = _codes_at(context, builder, array[0], args[1], layout.head_dim, layout.bits)
        affine = _halves_at(context, builder, array[2], args[3], 2 * layout.value_runs)
        runs = [d // layout.value_run for d in range(layout.head_dim)]
        scale = picked(builder, affine, [2 * run for run in runs])
        zero = picked(builder, affine, [2 * run + 1 for run in runs])
        return _store_row(context, builder, array[4], args[5], (code, scale, zero))

    kinds = (codes, types.int64, halves, types.int64, out, types.int64, lanes, bits)
    return types.void(*kinds), generate


@intrinsic
def _load_halves(_, halves, at, out, lanes):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """out.flat[:2 · D] = halves[at:], as floats."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = list(zip(signature.args, args, strict=True))
        floats = _halves_at(context, builder, array[0], args[1], 2 * lanes.count * LANES)
        where = address(context, builder, array[2], I64(0), floats.type)
        builder.store(floats, where, align=4)
        return context.get_dummy_value()

    return types.void(halves, types.int64, out, lanes), generate


@compiled()
def _place(number, sizes):  # type: ignore[no-untyped-def]
    """Return where a group begins, in bytes; sizes: groups of a page, its bytes, a group's."""
    per_page, page, group = sizes
    return number // per_page * page + number % per_page * group


@compiled()
def _expand_keys(keys, at, first, rows, expanded, lanes, bits):  # type: ignore[no-untyped-def]
    """Expand keys of the group at byte `at`, from row `first` on.

    expanded: fp32 [BLOCK, D] for them, and [2, D], the scales and zeros of the group.
    """
    dim = len(lanes) * LANES
    row_bytes = dim * len(bits) // 8
    out, affine = expanded
    if first == 0:
        _load_halves(keys[1], (at + ROWS * row_bytes) // 2, affine, lanes)
    for j in range(rows):
        row = at + (first + j) * row_bytes
        _expand_key(keys[0], row, affine, out, j * dim, lanes, bits)


@compiled()
def _expand_values(values, at, first, rows, expanded, lanes, bits):  # type: ignore[no-untyped-def]
    """Expand values of the group at byte `at`, from row `first` on, into expanded[0]."""
    dim = len(lanes) * LANES
    row_bytes = dim * len(bits) // 8
    runs = 1 if len(bits) == 8 else (dim + _RUN - 1) // _RUN
    affine = (at + ROWS * row_bytes) // 2
    for j in range(rows):
        row = first + j
        _expand_value(
            values[0], at + row * row_bytes, values[1], affine + 2 * runs * row, expanded[0],
            j * dim, lanes, bits,
        )  # fmt: skip


@compiled()
def _fetch(memory, number, sizes, first):  # type: ignore[no-untyped-def]
    """Prefetch the share of a group that comes with BLOCK rows, from row `first` on.

    All of it at once would be more than a core can wait for, and the next load with it.
    """
    at = _place(number, sizes)
    for byte in range(first * sizes[2] // ROWS, (first + BLOCK) * sizes[2] // ROWS, LINE):
        prefetch(memory[0], at + byte)


@compiled()
def _hide_passed(logits, table, fill, words, sizes, positions_at, query, window):  # type: ignore[no-untyped-def]
    """logits[j] = −inf where a sliding window has passed entry j."""
    j = 0
    for c in range(fill.shape[0]):
        first = (_place(table[c], sizes) + positions_at) // 4
        for row in range(fill[c]):
            if words[first + row] <= query - window:
                logits[j] = F(-np.inf)
            j += 1


@compiled()
def _chunk(  # type: ignore[no-untyped-def]
    chunk, q, scale, keys, values, key_sizes, value_sizes, positions_at, table, fill,
    query_cu, window, query_positions, scratch, acc, highest, sums, group, lanes, bits,
):  # fmt: skip
    """Compute the partial results of one chunk: acc [R, D], highest [R], sums [R].

    table and fill are those of its places.
    """
    group_size = len(group)
    begin, end = query_cu[chunk[0]], query_cu[chunk[0] + 1]
    queries, logits, expanded = scratch
    load_queries(q, scale, chunk[1], begin, end, queries, group, lanes)
    last = fill.shape[0] - 1
    at = 0
    for c in range(last + 1):
        place, ahead = _place(table[c], key_sizes), c + AHEAD
        for j in range(0, fill[c], BLOCK):
            if ahead <= last:
                _fetch(keys, table[ahead], key_sizes, j)
            else:
                _fetch(values, table[min(ahead - last - 1, last)], value_sizes, j)
            rows = min(BLOCK, fill[c] - j)
            _expand_keys(keys, place, j, rows, expanded, lanes, bits)
            for t in range(end - begin):
                row = t * group_size
                dots(queries, row, expanded[0], rows, None, logits, at, group, lanes)
            at += rows
    for t in range(end - begin):
        for row in range(t * group_size, (t + 1) * group_size):
            if window > 0:
                query = query_positions[begin + t]
                _hide_passed(
                    logits[row], table, fill, values[2], value_sizes, positions_at, query, window
                )
            highest[row], sums[row] = weigh(logits[row], chunk[5], chunk[5])
    at = 0
    for c in range(last + 1):
        place, ahead = _place(table[c], value_sizes), min(c + AHEAD, last)
        for j in range(0, fill[c], BLOCK):
            _fetch(values, table[ahead], value_sizes, j)
            rows = min(BLOCK, fill[c] - j)
            _expand_values(values, place, j, rows, expanded, lanes, bits)
            for t in range(end - begin):
                row = t * group_size
                add_values(logits, row, at, expanded[0], rows, None, acc, group, lanes)
            at += rows


@compiled()
def _work(  # type: ignore[no-untyped-def]
    counter, chunks, most, q, keys, values, key_sizes, value_sizes, positions_at, tables,
    fills, query_cu, scale, window, query_positions, acc, highest, sums, group, lanes, bits,
):  # fmt: skip
    """Compute chunks until none is left; several threads do so at once."""
    dim = q.shape[2]
    scratch = (
        np.empty((most, dim), np.float32),
        np.empty((most, CHUNK + ROWS), np.float32),
        (np.empty((BLOCK, dim), np.float32), np.empty((2, dim), np.float32)),
    )
    i = take(counter)
    while i < chunks.shape[0]:
        s, h, first, end = chunks[i, 0], chunks[i, 1], chunks[i, 2], chunks[i, 3]
        part = chunks[i, 6]
        _chunk(
            chunks[i], q, scale, keys, values, key_sizes, value_sizes, positions_at,
            tables[s, h, first:end], fills[s, h, first:end], query_cu, window,
            query_positions, scratch, acc[part:], highest[part:], sums[part:], group, lanes,
            bits,
        )  # fmt: skip
        i = take(counter)


@compiled(parallel=True, nogil=True, no_cpython_wrapper=False)
def _run(  # type: ignore[no-untyped-def]
    threads, q, keys, values, key_sizes, value_sizes, positions_at, tables, fills, query_cu,
    scale, window, query_positions, max_rows, out, lse, group, lanes, bits,
):  # fmt: skip
    """Fill out and lse of the sequences with at most `max_rows` rows; see `ops`.

    Holds the parallel loop and little else: this way of compiling is slow.
    """
    chunks, most, counter, acc, highest, sums = cut(
        fills, query_cu, len(group), max_rows, False, q.shape[2]
    )
    for _ in prange(threads):
        _work(
            counter, chunks, most, q, keys, values, key_sizes, value_sizes, positions_at,
            tables, fills, query_cu, scale, window, query_positions, acc, highest, sums,
            group, lanes, bits,
        )  # fmt: skip
    merge(chunks, query_cu, max_rows, acc, highest, sums, out, lse, group, lanes)


def applies(q: Tensor, key_pages: Tensor, value_pages: Tensor) -> bool:
    """Whether the kernel can read these tensors: fp32 on a CPU, whole pages, no gradient."""
    fp32 = q.dtype == torch.float32 and q.is_cpu and q.shape[-1] % LANES == 0
    wanted = torch.is_grad_enabled() and q.requires_grad
    return fp32 and not wanted and all(_readable(pages) for pages in (key_pages, value_pages))


def _readable(pages: Tensor) -> bool:
    """Whether pages are in one piece and can be read in words of 4 bytes."""
    words = pages.shape[1] % 4 == 0 and pages.data_ptr() % 4 == 0
    return pages.is_cpu and pages.is_contiguous() and words


_NO_POSITIONS = np.empty(0, np.int64)


def quantized_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    fills: Tensor,
    query_cu: Tensor,
    *,
    layout: GroupLayout,
    scaling: float,
    window: int | None,
    query_positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (out fp32 [Hq, T, D], lse fp32 [Hq, T]); see `ops` for the arguments."""
    group_size = q.shape[0] // tables.shape[1]
    most = max(1, MAX_ROWS // group_size)
    per_page = quantized_reference.groups_per_page(key_pages, value_pages, layout)
    q, out, lse = q.detach().contiguous(), torch.empty(q.shape), torch.empty(q.shape[:2])
    launch(
        _run,
        q.numpy(),
        _memory(key_pages),
        _memory(value_pages),
        (per_page, key_pages.shape[1], layout.key_bytes),
        (per_page, value_pages.shape[1], layout.value_bytes),
        layout.positions_at,
        int32(tables),
        int32(fills),
        int32(query_cu),
        F(scaling) * LOG2E,
        window or 0,
        _NO_POSITIONS if query_positions is None else query_positions.long().contiguous().numpy(),
        most * group_size,
        out.numpy(),
        lse.numpy(),
        *constants(group_size, q.shape[2]),
        (0,) * layout.bits,
    )
    for s, piece in _pieces(query_cu.tolist(), most):
        out[:, piece], lse[:, piece] = quantized_attention(
            q[:, piece],
            key_pages,
            value_pages,
            tables[s : s + 1],
            fills[s : s + 1],
            torch.tensor([0, piece.stop - piece.start]),
            layout=layout,
            scaling=scaling,
            window=window,
            query_positions=None if query_positions is None else query_positions[piece],
        )
    return out, lse


def _pieces(query_cu: list[int], most: int) -> Iterator[tuple[int, slice]]:
    """Cut the queries of the sequences that have more than `most`."""
    for s, (begin, end) in enumerate(itertools.pairwise(query_cu)):
        if end - begin > most:
            for first in range(begin, end, most):
                yield s, slice(first, min(first + most, end))


def _memory(pages: Tensor) -> tuple[Any, Any, Any]:
    """The pages' memory, flat, as bytes, as halves (their bits) and as words."""
    flat = pages.view(-1).numpy()
    return flat, flat.view(np.int16), flat.view(np.int32)


def warm_up(head_dim: int, group_size: int, bits: int) -> None:
    """Compile the kernel, or load it from disk, before it is needed.

    A first call does the same, and takes seconds then.
    """
    layout = GroupLayout(bits, head_dim)
    ones = torch.ones(1, 1, 1, dtype=torch.int32)
    quantized_attention(
        torch.zeros(group_size, 1, head_dim),
        torch.zeros(1, layout.key_bytes, dtype=torch.uint8),
        torch.zeros(1, layout.value_bytes, dtype=torch.uint8),
        ones - 1,
        ones,
        torch.tensor([0, 1], dtype=torch.int32),
        layout=layout,
        scaling=1.0,
        window=None,
        query_positions=None,
    )
