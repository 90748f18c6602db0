"""What the numba kernels for attention share: cutting rows, products, softmax, merging, launching.

A row (sequence, KV head) is cut into chunks that the threads take one after another,
whoever is free. Where the cuts are depends on the row alone: what else is in a batch
changes no bit of a result. Chunks are merged by their log-sum-exp.

`group` and `lanes` are tuples whose *lengths* say group_size and head_dim / LANES: a
tuple's length is part of its type, so that the loops over them have constant bounds.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from criticalkv.kernels.vectors_cpu import (
    BLOCK,
    LANES,
    add_block,
    add_one,
    bits_of,
    compiled,
    dot_block,
    dot_one,
    from_bits,
    prefetch,
)

CHUNK = 1024
"""Entries after which a chunk ends with the page: small enough to share rows among threads,
large enough that the switch from keys to values costs nothing."""

F = np.float32
LOG2E = F(1.4426950408889634)
_LN2 = F(0.6931471805599453)
_LOWEST = F(-126)
"""2 ** x is taken as 0 below: fp32 has no normal number there."""
_ROUND = F(12582912.0)
"""1.5 · 2^23. Added to |x| < 2^22 it rounds to an integer, which is then in the low bits."""
# 2 ** r for |r| ≤ 0.5: the Taylor series of e^(r ln 2), whose remainder is below 2 ** -23.
_C = [F(np.log(2.0) ** k / np.prod(np.arange(1.0, k + 1))) for k in range(8)]
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = _C

_REORDER = {"reassoc", "contract", "nsz"}
"""What vectorising a sum needs; infinities and NaN keep their meaning."""

_lock = threading.Lock()


@compiled()
def _exp2(x):  # type: ignore[no-untyped-def]
    """2 ** x for x ≤ 0, without a branch; −inf gives 0 and NaN stays NaN.

    Must not be compiled with reordering: it would cancel the rounding.
    """
    y = _LOWEST if x < _LOWEST else x
    shifted = y + _ROUND
    r = y - (shifted - _ROUND)
    p = _C4 + r * (_C5 + r * (_C6 + r * _C7))
    p = _C0 + r * (_C1 + r * (_C2 + r * (_C3 + r * p)))
    power = from_bits((bits_of(shifted) << np.int32(23)) + np.int32(0x3F800000))
    return F(0) if x < _LOWEST else p * power


@compiled()
def _ordered(bits):  # type: ignore[no-untyped-def]
    """Map the bits of a float to an integer of the same order, and back."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@compiled()
def load_queries(q, scale, head, begin, end, queries, group, lanes):  # type: ignore[no-untyped-def]
    """queries[t · group_size + g] = scale · q[head · group_size + g, begin + t]."""
    group_size, dim = len(group), len(lanes) * LANES
    for t in range(end - begin):
        for g in range(group_size):
            for d in range(dim):
                row = q[head * group_size + g, begin + t]
                queries[t * group_size + g, d] = row[d] * scale


@compiled()
def _fetch_rows(page, j, dim):  # type: ignore[no-untyped-def]
    """Prefetch BLOCK rows of a page, or of none, from row j on."""
    if page is not None:
        for d in range(j * dim, (j + BLOCK) * dim, 16):
            prefetch(page, d)


@compiled()
def dots(q, row, keys, used, following, logits, at, group, lanes):  # type: ignore[no-untyped-def]
    """logits[row + g, at + j] = q[row + g] · keys[j] for the first `used` keys of a page.

    Prefetches the page `following`, if it is not None.
    """
    dim, stride = len(lanes) * LANES, logits.shape[1]
    whole = used - used % BLOCK
    for j in range(0, whole, BLOCK):
        _fetch_rows(following, j, dim)
        for g in range(len(group)):
            r = row + g
            dot_block(q, r * dim, keys, j * dim, logits, r * stride + at + j, lanes)
    for j in range(whole, used):
        for g in range(len(group)):
            r = row + g
            dot_one(q, r * dim, keys, j * dim, logits, r * stride + at + j, lanes)


@compiled()
def add_values(weights, row, at, values, used, following, acc, group, lanes):  # type: ignore[no-untyped-def]
    """acc[row + g] += Σ_j weights[row + g, at + j] · values[j] over a page's first `used`.

    Prefetches the page `following`, if it is not None.
    """
    dim, stride = len(lanes) * LANES, weights.shape[1]
    whole = used - used % BLOCK
    for j in range(0, whole, BLOCK):
        _fetch_rows(following, j, dim)
        for g in range(len(group)):
            r = row + g
            add_block(weights, r * stride + at + j, values, j * dim, acc, r * dim, lanes)
    for j in range(whole, used):
        for g in range(len(group)):
            r = row + g
            add_one(weights, r * stride + at + j, values, j * dim, acc, r * dim, lanes)


@compiled(fastmath={"contract"})
def _exponentials(logits, visible, count):  # type: ignore[no-untyped-def]
    """logits[:count] -> 2 ** (logit − max), 0 from `visible` on; return the max or −inf."""
    # Compared as integers: a maximum of floats is not vectorised, because of NaN.
    largest = _ordered(bits_of(F(-np.inf)))
    for j in range(visible):
        largest = max(largest, _ordered(bits_of(logits[j])))
    highest = from_bits(_ordered(largest))
    # Nothing visible: any number will do as the max, but −inf − −inf is none.
    base = F(0) if highest == F(-np.inf) else highest
    for j in range(visible):
        logits[j] = _exp2(logits[j] - base)
    for j in range(visible, count):
        logits[j] = F(0)
    return highest


@compiled(fastmath=_REORDER)
def _sum(weights, count):  # type: ignore[no-untyped-def]
    total = F(0)
    for j in range(count):
        total += weights[j]
    return total


@compiled()
def weigh(logits, visible, count):  # type: ignore[no-untyped-def]
    """Turn logits[:count], base 2, into weights, 0 from `visible` on.

    Returns:
        (highest, total): weights are 2 ** (logit − highest), total is their sum.
    """
    highest = _exponentials(logits, visible, count)
    total = _sum(logits, visible)
    if np.isnan(total):
        highest = F(np.inf)  # so that it is not taken for an empty chunk
    return highest, total


@compiled()
def cut(fills, query_cu, group_size, max_rows, causal, dim):  # type: ignore[no-untyped-def]
    """Cut all rows into chunks of whole pages.

    Returns:
        chunks int64 [n, 7]: sequence, head, first place, place after the last, entries
            before, entries, first row of its partial results;
        most: the most rows of one chunk;
        counter int64 [1]: chunks taken so far, 0;
        memory for the partial results of all chunks: acc [rows, D], 0, highest [rows], sums
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
    acc, counter = np.zeros((rows, dim), np.float32), np.zeros(1, np.int64)
    return chunks[:n], most, counter, acc, highest, sums


@compiled(fastmath={"contract"})
def merge(chunks, query_cu, max_rows, acc, highest, sums, out, lse, group, lanes):  # type: ignore[no-untyped-def]
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
                peak, total = F(-np.inf), F(0)
                for i in range(first, n):
                    peak = max(peak, highest[chunks[i, 6] + row])
                out[head, query] = F(0)
                if peak > F(-np.inf):
                    for i in range(first, n):
                        part = chunks[i, 6] + row
                        weight = _exp2(highest[part] - peak)
                        total += weight * sums[part]
                        for d in range(dim):
                            out[head, query, d] += weight * acc[part, d]
                    for d in range(dim):
                        out[head, query, d] /= total
                lse[head, query] = (peak + np.log2(total)) * _LN2


def launch(run: Callable[..., None], *arguments: Any) -> None:
    """Run a kernel with as many threads as torch uses; numba counts them per caller.

    Args:
        run: takes the arguments, the threads, and the two or three tuples of `constants`.
        arguments: its others and, last, those tuples.
    """
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    with _turn():
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        try:
            run(threads, *arguments)
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


@functools.cache
def constants(group_size: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tuples whose lengths the kernels read."""
    return (0,) * group_size, (0,) * (head_dim // LANES)


def int32(tensor: Tensor) -> Any:
    """Return a tensor as a contiguous numpy array of int32, copied only if it must be."""
    if tensor.dtype != torch.int32 or not tensor.is_contiguous():
        tensor = tensor.to(torch.int32).contiguous()
    return tensor.numpy()
