"""Attention over pages on a CPU, in fp32: a numba kernel for sequences with few queries.

The arithmetic is small; what costs is fetching scattered pages. So the query heads of a
KV head share every load, and the next page is prefetched while one is computed. How rows
are cut and merged: `attention_cpu`.

Knows no caches and no models. Sequences with many queries go to `reference`, whose
matrix products are faster then.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numba import prange
from torch import Tensor

from criticalkv.kernels import reference
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
from criticalkv.kernels.vectors_cpu import LANES, compiled, take

MAX_ROWS = 64
"""Queries of a sequence times group size up to which this kernel is faster than matmuls."""


@compiled()
def _hide_passed(logits, table, fill, position_pages, query, window):  # type: ignore[no-untyped-def]
    """logits[j] = −inf where a sliding window has passed entry j."""
    j = 0
    for c in range(fill.shape[0]):
        for slot in range(fill[c]):
            if position_pages[table[c], slot] <= query - window:
                logits[j] = F(-np.inf)
            j += 1


@compiled()
def _chunk(  # type: ignore[no-untyped-def]
    chunk, total, q, scale, keys, values, table, fill, query_cu, causal, window,
    position_pages, query_positions, scratch, acc, highest, sums, group, lanes,
):  # fmt: skip
    """Compute the partial results of one chunk: acc [R, D], highest [R], sums [R].

    table and fill are those of its places; `total` is the length of the whole row.
    """
    group_size = len(group)
    begin, end = query_cu[chunk[0]], query_cu[chunk[0] + 1]
    queries, logits = scratch
    before, count = chunk[4], chunk[5]
    load_queries(q, scale, chunk[1], begin, end, queries, group, lanes)
    last = fill.shape[0] - 1
    at = 0
    for c in range(last + 1):
        following = keys[table[c + 1]] if c < last and fill[c + 1] > 0 else values[table[0]]
        if fill[c] > 0:
            for t in range(end - begin):
                dots(
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
            highest[row], sums[row] = weigh(logits[row], visible, count)
    at = 0
    for c in range(last + 1):
        following = values[table[c + 1]] if c < last and fill[c + 1] > 0 else values[table[0]]
        if fill[c] > 0:
            for t in range(end - begin):
                add_values(
                    logits, t * group_size, at, values[table[c]], fill[c], following, acc,
                    group, lanes,
                )  # fmt: skip
            at += fill[c]


@compiled()
def _work(  # type: ignore[no-untyped-def]
    counter, chunks, most, q, keys, values, tables, fills, query_cu, scale, causal, window,
    position_pages, query_positions, acc, highest, sums, group, lanes,
):  # fmt: skip
    """Compute chunks until none is left; several threads do so at once."""
    scratch = (
        np.empty((most, q.shape[2]), np.float32),
        np.empty((most, CHUNK + keys.shape[1]), np.float32),
    )
    i = take(counter)
    while i < chunks.shape[0]:
        s, h, first, end = chunks[i, 0], chunks[i, 1], chunks[i, 2], chunks[i, 3]
        part = chunks[i, 6]
        _chunk(
            chunks[i], fills[s, h].sum(), q, scale, keys, values, tables[s, h, first:end],
            fills[s, h, first:end], query_cu, causal, window, position_pages,
            query_positions, scratch, acc[part:], highest[part:], sums[part:], group, lanes,
        )  # fmt: skip
        i = take(counter)


@compiled(parallel=True, nogil=True, no_cpython_wrapper=False)
def _run(  # type: ignore[no-untyped-def]
    threads, q, keys, values, tables, fills, query_cu, scale, causal, window, position_pages,
    query_positions, max_rows, out, lse, group, lanes,
):  # fmt: skip
    """Fill out and lse of the sequences with at most `max_rows` rows; see `ops`.

    Holds the parallel loop and little else: this way of compiling is slow.
    """
    chunks, most, counter, acc, highest, sums = cut(
        fills, query_cu, len(group), max_rows, causal, q.shape[2]
    )
    for _ in prange(threads):
        _work(
            counter, chunks, most, q, keys, values, tables, fills, query_cu, scale, causal,
            window, position_pages, query_positions, acc, highest, sums, group, lanes,
        )  # fmt: skip
    merge(chunks, query_cu, max_rows, acc, highest, sums, out, lse, group, lanes)


def applies(q: Tensor, key_pages: Tensor, value_pages: Tensor) -> bool:
    """Whether the kernel can read these tensors: fp32 on a CPU, pages in one piece, no gradient."""
    fp32 = all(t.dtype == torch.float32 and t.is_cpu for t in (q, key_pages, value_pages))
    whole = key_pages.is_contiguous() and value_pages.is_contiguous()
    wanted = torch.is_grad_enabled() and q.requires_grad
    return fp32 and whole and q.shape[-1] % LANES == 0 and not wanted


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
    launch(
        _run,
        q.numpy(),
        key_pages.detach().numpy(),
        value_pages.detach().numpy(),
        int32(tables),
        int32(fills),
        int32(query_cu),
        F(scaling) * LOG2E,
        causal,
        window or 0,
        _NO_PAGES if position_pages is None else int32(position_pages),
        _NO_POSITIONS if query_positions is None else query_positions.long().contiguous().numpy(),
        max_rows,
        out.numpy(),
        lse.numpy(),
        *constants(group_size, q.shape[2]),
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
