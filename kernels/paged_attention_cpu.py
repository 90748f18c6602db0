"""Attention over pages on a CPU, in fp32: a numba kernel for sequences with few queries.

The arithmetic is small; what costs is fetching scattered pages. So the query heads of a
KV head share every load, the next page is prefetched while one is computed, and a row is
cut into chunks that the threads take one after another, whoever is free. Where the cuts
are depends on the row alone: what else is in a batch changes no bit of a result. Chunks
are merged by their log-sum-exp.

Knows no caches and no models. Sequences with many queries go to `reference`, whose
matrix products are faster then.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic
from torch import Tensor

from criticalkv.kernels import reference

CHUNK = 1024
"""Entries after which a chunk ends with the page: small enough to share rows among threads,
large enough that the switch from keys to values costs nothing."""

MAX_ROWS = 64
"""Queries of a sequence times group size up to which this kernel is faster than matmuls."""

LANES = 8
"""head_dim must be a multiple of it."""

_F = np.float32
_LOG2E = _F(1.4426950408889634)
_LN2 = _F(0.6931471805599453)
_LOWEST = _F(-126)
"""2 ** x is taken as 0 below: fp32 has no normal number there."""
_ROUND = _F(12582912.0)
"""1.5 · 2^23. Added to |x| < 2^22 it rounds to an integer, which is then in the low bits."""
# 2 ** r for |r| ≤ 0.5: the Taylor series of e^(r ln 2), whose remainder is below 2 ** -23.
_C = [_F(np.log(2.0) ** k / np.prod(np.arange(1.0, k + 1))) for k in range(8)]
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = _C

_REORDER = {"reassoc", "contract", "nsz"}
"""What vectorising a sum needs; infinities and NaN keep their meaning."""

_lock = threading.Lock()


def _compiled(**options: Any) -> Callable[[Any], Any]:
    """`njit`, with the machine code kept on disk where there is a place for it."""

    def wrap(function: Any) -> Any:
        try:
            return njit(cache=True, error_model="numpy", **options)(function)
        except RuntimeError:  # neither the package nor the user has a writable directory
            return njit(error_model="numpy", **options)(function)

    return wrap


@intrinsic  # type: ignore[untyped-decorator]
def _bits(_: Any, x: Any) -> Any:  # noqa: ARG001
    """The bits of a float32 as int32."""
    return types.int32(types.float32), lambda _c, b, _s, args: b.bitcast(args[0], ir.IntType(32))


@intrinsic  # type: ignore[untyped-decorator]
def _from_bits(_: Any, x: Any) -> Any:  # noqa: ARG001
    """The float32 that has the bits of an int32."""
    return types.float32(types.int32), lambda _c, b, _s, args: b.bitcast(args[0], ir.FloatType())


@intrinsic  # type: ignore[untyped-decorator]
def _take(_: Any, counter: Any) -> Any:
    """Return counter[0] and add 1 to it, atomically."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), generate


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(_: Any, array: Any, index: Any) -> Any:  # noqa: ARG001
    """Fetch the cache line of array.flat[index] into the L2 cache; any index is harmless."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        name = "llvm.prefetch.p0i8"
        prefetch = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        address = builder.bitcast(builder.gep(data, [args[1]]), byte)
        builder.call(prefetch, [address, i32(0), i32(2), i32(1)])  # read, L2, data
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@_compiled()
def _exp2(x):  # type: ignore[no-untyped-def]
    """2 ** x for x ≤ 0, without a branch; −inf gives 0 and NaN stays NaN.

    Must not be compiled with reordering: it would cancel the rounding.
    """
    y = _LOWEST if x < _LOWEST else x
    shifted = y + _ROUND
    r = y - (shifted - _ROUND)
    p = _C4 + r * (_C5 + r * (_C6 + r * _C7))
    p = _C0 + r * (_C1 + r * (_C2 + r * (_C3 + r * p)))
    power = _from_bits((_bits(shifted) << np.int32(23)) + np.int32(0x3F800000))
    return _F(0) if x < _LOWEST else p * power


@_compiled()
def _ordered(bits):  # type: ignore[no-untyped-def]
    """Map the bits of a float to an integer of the same order, and back."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


# `group` and `lanes` are tuples whose *lengths* say group_size and head_dim / LANES: a
# tuple's length is part of its type, so that the loops over them have constant bounds.


@_compiled(fastmath=_REORDER)
def _dots(q, row, keys, used, following, logits, at, group, lanes):  # type: ignore[no-untyped-def]
    """logits[row + g, at + j] = q[row + g] · keys[j] for the first `used` keys of a page."""
    dim = len(lanes) * LANES
    for j in range(used):
        for d in range(0, dim, 16):
            _prefetch(following, j * dim + d)
        for g in range(len(group)):
            total = _F(0)
            for d in range(dim):
                total += q[row + g, d] * keys[j, d]
            logits[row + g, at + j] = total


@_compiled(fastmath={"contract"})
def _add_values(weights, row, at, values, used, following, acc, group, lanes):  # type: ignore[no-untyped-def]
    """acc[row + g] += Σ_j weights[row + g, at + j] · values[j], four values at a time."""
    dim = len(lanes) * LANES
    whole = used - used % 4
    for j in range(0, whole, 4):
        for d in range(0, 4 * dim, 16):
            _prefetch(following, j * dim + d)
        for g in range(len(group)):
            w0, w1 = weights[row + g, at + j], weights[row + g, at + j + 1]
            w2, w3 = weights[row + g, at + j + 2], weights[row + g, at + j + 3]
            for d in range(dim):
                acc[row + g, d] += (w0 * values[j, d] + w1 * values[j + 1, d]) + (
                    w2 * values[j + 2, d] + w3 * values[j + 3, d]
                )
    for j in range(whole, used):
        for g in range(len(group)):
            w0 = weights[row + g, at + j]
            for d in range(dim):
                acc[row + g, d] += w0 * values[j, d]


@_compiled(fastmath={"contract"})
def _exponentials(logits, visible, count):  # type: ignore[no-untyped-def]
    """logits[:count] -> 2 ** (logit − max), 0 from `visible` on; return the max or −inf."""
    # Compared as integers: a maximum of floats is not vectorised, because of NaN.
    largest = _ordered(_bits(_F(-np.inf)))
    for j in range(visible):
        largest = max(largest, _ordered(_bits(logits[j])))
    highest = _from_bits(_ordered(largest))
    # Nothing visible: any number will do as the max, but −inf − −inf is none.
    base = _F(0) if highest == _F(-np.inf) else highest
    for j in range(visible):
        logits[j] = _exp2(logits[j] - base)
    for j in range(visible, count):
        logits[j] = _F(0)
    return highest


@_compiled(fastmath=_REORDER)
def _sum(weights, count):  # type: ignore[no-untyped-def]
    total = _F(0)
    for j in range(count):
        total += weights[j]
    return total


@_compiled()
def _hide_passed(logits, table, fill, position_pages, query, window):  # type: ignore[no-untyped-def]
    """logits[j] = −inf where a sliding window has passed entry j."""
    j = 0
    for c in range(fill.shape[0]):
        for slot in range(fill[c]):
            if position_pages[table[c], slot] <= query - window:
                logits[j] = _F(-np.inf)
            j += 1


@_compiled()
def _cut(fills, query_cu, group_size, max_rows, causal, dim):  # type: ignore[no-untyped-def]
    """Cut all rows into chunks of whole pages.

    Returns:
        chunks int64 [n, 7]: sequence, head, first place, place after the last, entries
            before, entries, first row of its partial results;
        most: the most rows of one chunk;
        counter int64 [1]: chunks taken so far, 0;
        memory for the partial results of all chunks: acc [rows, D], highest [rows], sums
            [rows].
    """
    sequences, heads, places = fills.shape
    chunks = np.empty((fills.size, 7), np.int64)
    n, rows, most = 0, 0, 0
    for s in range(sequences):
        own = query_cu[s + 1] - query_cu[s]
        needed = own * group_size
        if needed > max_rows:
            continue
        most = max(most, needed)
        for h in range(heads):
            if causal and fills[s, h].sum() < own:
                raise ValueError("a head has fewer entries than its queries own")
            first, before, count = 0, 0, 0
            for c in range(places):
                if count == 0:
                    first = c
                count += fills[s, h, c]
                if count >= CHUNK or (c == places - 1 and count):
                    chunks[n] = s, h, first, c + 1, before, count, rows
                    n, rows, before, count = n + 1, rows + needed, before + count, 0
    highest, sums = np.empty(rows, np.float32), np.empty(rows, np.float32)
    acc, counter = np.empty((rows, dim), np.float32), np.zeros(1, np.int64)
    return chunks[:n], most, counter, acc, highest, sums


@_compiled()
def _chunk(  # type: ignore[no-untyped-def]
    chunk, total, q, scale, keys, values, table, fill, query_cu, causal, window,
    position_pages, query_positions, scratch, acc, highest, sums, group, lanes,
):  # fmt: skip
    """Compute the partial results of one chunk: acc [R, D], highest [R], sums [R].

    table and fill are those of its places; `total` is the length of the whole row.
    """
    group_size, dim = len(group), len(lanes) * LANES
    begin, end = query_cu[chunk[0]], query_cu[chunk[0] + 1]
    queries, logits = scratch
    before, count = chunk[4], chunk[5]
    for t in range(end - begin):
        for g in range(group_size):
            for d in range(dim):
                row = q[chunk[1] * group_size + g, begin + t]
                queries[t * group_size + g, d] = row[d] * scale
                acc[t * group_size + g, d] = _F(0)
    last = fill.shape[0] - 1
    at = 0
    for c in range(last + 1):
        following = keys[table[c + 1]] if c < last and fill[c + 1] > 0 else values[table[0]]
        if fill[c] > 0:
            for t in range(end - begin):
                _dots(
                    queries, t * group_size, keys[table[c]], fill[c], following, logits, at,
                    group, lanes,
                )  # fmt: skip
            at += fill[c]
    for t in range(end - begin):
        visible = count
        if causal:
            visible = min(count, max(0, total - (end - begin) + t + 1 - before))
        for row in range(t * group_size, (t + 1) * group_size):
            if window > 0:
                query = query_positions[begin + t]
                _hide_passed(logits[row], table, fill, position_pages, query, window)
            highest[row] = _exponentials(logits[row], visible, count)
            sums[row] = _sum(logits[row], visible)
            if np.isnan(sums[row]):
                highest[row] = _F(np.inf)  # so that it is not taken for an empty chunk
    at = 0
    for c in range(last + 1):
        following = values[table[c + 1]] if c < last and fill[c + 1] > 0 else values[table[0]]
        if fill[c] > 0:
            for t in range(end - begin):
                _add_values(
                    logits, t * group_size, at, values[table[c]], fill[c], following, acc,
                    group, lanes,
                )  # fmt: skip
            at += fill[c]


@_compiled(fastmath={"contract"})
def _merge(chunks, query_cu, max_rows, acc, highest, sums, out, lse, group, lanes):  # type: ignore[no-untyped-def]
    """Merge the chunks of every row in order into out [Hq, T, D] and lse [Hq, T]."""
    group_size, dim = len(group), len(lanes) * LANES
    n = 0
    for s in range(query_cu.shape[0] - 1):
        count = query_cu[s + 1] - query_cu[s]
        if count * group_size > max_rows:
            continue
        for h in range(out.shape[0] // group_size):
            first = n
            while n < chunks.shape[0] and chunks[n, 0] == s and chunks[n, 1] == h:
                n += 1
            for row in range(count * group_size):
                head, query = h * group_size + row % group_size, query_cu[s] + row // group_size
                peak, total = _F(-np.inf), _F(0)
                for i in range(first, n):
                    peak = max(peak, highest[chunks[i, 6] + row])
                out[head, query] = _F(0)
                if peak > _F(-np.inf):
                    for i in range(first, n):
                        part = chunks[i, 6] + row
                        weight = _exp2(highest[part] - peak)
                        total += weight * sums[part]
                        for d in range(dim):
                            out[head, query, d] += weight * acc[part, d]
                    for d in range(dim):
                        out[head, query, d] /= total
                lse[head, query] = (peak + np.log2(total)) * _LN2


@_compiled()
def _work(  # type: ignore[no-untyped-def]
    counter, chunks, most, q, keys, values, tables, fills, query_cu, scale, causal, window,
    position_pages, query_positions, acc, highest, sums, group, lanes,
):  # fmt: skip
    """Compute chunks until none is left; several threads do so at once."""
    scratch = (
        np.empty((most, q.shape[2]), np.float32),
        np.empty((most, CHUNK + keys.shape[1]), np.float32),
    )
    i = _take(counter)
    while i < chunks.shape[0]:
        s, h, first, end = chunks[i, 0], chunks[i, 1], chunks[i, 2], chunks[i, 3]
        part = chunks[i, 6]
        _chunk(
            chunks[i], fills[s, h].sum(), q, scale, keys, values, tables[s, h, first:end],
            fills[s, h, first:end], query_cu, causal, window, position_pages,
            query_positions, scratch, acc[part:], highest[part:], sums[part:], group, lanes,
        )  # fmt: skip
        i = _take(counter)


@_compiled(parallel=True, nogil=True)
def _run(  # type: ignore[no-untyped-def]
    q, keys, values, tables, fills, query_cu, scale, causal, window, position_pages,
    query_positions, max_rows, out, lse, threads, group, lanes,
):  # fmt: skip
    """Fill out and lse of the sequences with at most `max_rows` rows; see `ops`.

    Holds the parallel loop and little else: this way of compiling is slow.
    """
    chunks, most, counter, acc, highest, sums = _cut(
        fills, query_cu, len(group), max_rows, causal, q.shape[2]
    )
    for _ in prange(threads):
        _work(
            counter, chunks, most, q, keys, values, tables, fills, query_cu, scale, causal,
            window, position_pages, query_positions, acc, highest, sums, group, lanes,
        )  # fmt: skip
    _merge(chunks, query_cu, max_rows, acc, highest, sums, out, lse, group, lanes)


def applies(q: Tensor, key_pages: Tensor, value_pages: Tensor) -> bool:
    """Whether the kernel can read these tensors: fp32 on a CPU, pages in one piece, no gradient."""
    fp32 = all(t.dtype == torch.float32 and t.is_cpu for t in (q, key_pages, value_pages))
    whole = key_pages.is_contiguous() and value_pages.is_contiguous()
    wanted = torch.is_grad_enabled() and q.requires_grad
    return fp32 and whole and q.shape[-1] % LANES == 0 and not wanted


@functools.cache
def _constants(group_size: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tuples whose lengths the kernel reads."""
    return (0,) * group_size, (0,) * (head_dim // LANES)


_NO_PAGES = np.empty((0, 0), np.int32)
_NO_POSITIONS = np.empty(0, np.int64)


def paged_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    fills: Tensor,
    query_cu: Tensor,
    *,
    scaling: float,
    causal: bool,
    window: int | None,
    position_pages: Tensor | None,
    query_positions: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return (out [Hq, T, D], lse fp32 [Hq, T] or None); see `ops` for the arguments."""
    group_size = q.shape[0] // tables.shape[1]
    max_rows = max(MAX_ROWS, group_size)
    q, out, lse = q.detach().contiguous(), torch.empty(q.shape), torch.empty(q.shape[:2])
    _launch(
        q.numpy(),
        key_pages.detach().numpy(),
        value_pages.detach().numpy(),
        _int32(tables),
        _int32(fills),
        _int32(query_cu),
        _F(scaling) * _LOG2E,
        causal,
        window or 0,
        _NO_PAGES if position_pages is None else _int32(position_pages),
        _NO_POSITIONS if query_positions is None else query_positions.long().contiguous().numpy(),
        max_rows,
        out.numpy(),
        lse.numpy(),
        *_constants(group_size, q.shape[2]),
    )
    for s, (begin, end) in enumerate(itertools.pairwise(query_cu.tolist())):
        if (end - begin) * group_size <= max_rows:
            continue
        out[:, begin:end], long_lse = reference.paged_attention(
            q[:, begin:end],
            key_pages,
            value_pages,
            tables[s : s + 1],
            fills[s : s + 1],
            torch.tensor([0, end - begin]),
            scaling=scaling,
            causal=causal,
            window=window,
            position_pages=position_pages,
            query_positions=None if query_positions is None else query_positions[begin:end],
            return_lse=return_lse,
        )
        if long_lse is not None:
            lse[:, begin:end] = long_lse
    return out, lse if return_lse else None


def warm_up(head_dim: int, group_size: int) -> None:
    """Compile the kernel, or load it from disk, before it is needed.

    A first call does the same, and takes seconds then.
    """
    pages = torch.zeros(1, 1, head_dim)
    ones = torch.ones(1, 1, 1, dtype=torch.int32)
    paged_attention(
        torch.zeros(group_size, 1, head_dim),
        pages,
        pages,
        ones - 1,
        ones,
        torch.tensor([0, 1], dtype=torch.int32),
        scaling=1.0,
        causal=True,
        window=None,
        position_pages=None,
        query_positions=None,
        return_lse=False,
    )


def _int32(tensor: Tensor) -> Any:
    if tensor.dtype != torch.int32 or not tensor.is_contiguous():
        tensor = tensor.to(torch.int32).contiguous()
    return tensor.numpy()


def _launch(*arguments: Any) -> None:
    """Run the kernel with as many threads as torch uses; numba counts them per caller."""
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    with _turn():
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        try:
            _run(*arguments[:-2], threads, *arguments[-2:])
        finally:
            numba.set_num_threads(before)


def _turn() -> AbstractContextManager[Any]:
    """What guards a launch: under "workqueue", two at once would abort the process.

    numba picks its threading layer (tbb, omp, workqueue: the first there is) at the first
    launch; until then the lock holds too.
    """
    try:
        return _lock if numba.threading_layer() == "workqueue" else nullcontext()
    except ValueError:
        return _lock
