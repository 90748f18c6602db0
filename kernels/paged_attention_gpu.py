"""Attention over pages on a GPU: two Triton kernels, split over the entries.

The first computes, per (split of a row, block of its sequence's queries), the attention
over the split's entries alone; the second merges the splits by their log-sum-exp, in
order. The query heads of a KV head share a block, so that every entry is loaded once.

    block of queries, G = 2        entries of one row, 2 pages a split
    q0 g0 | q0 g1 | q1 g0 | …   ×  page 7, page 2 | page 9, –

How long rows are only the GPU knows: the grid covers the table's places, and what is
past a row's end returns at once. Splits depend on the page size alone, not on the batch
(unless partial results would not fit `PARTIAL_BYTES`). No atomics, and no synchronisation.
Knows no caches and no models.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 512
"""Slots of one split, at least a page."""

PARTIAL_BYTES = 1 << 28
"""Memory for partial results, above which splits grow: many queries × long rows."""


# Lengths change with every step: as part of the compile key they would compile anew each time.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["window", "places", "split_places", "num_blocks", "num_queries"]
)
def split_kernel(  # type: ignore[no-untyped-def]
    q,  # [num_q_heads, T, D]
    keys,  # [P, PAGE, D]
    values,  # like keys
    tables,  # [S, num_kv_heads, places]
    fills,  # like tables
    ends,  # like tables: cumulative fills
    query_cu,  # [S + 1]
    blocks,  # [2, B]: sequence and first query of each block of queries
    position_pages,  # [P, PAGE]
    query_positions,  # [T]
    part_out,  # fp32 [splits, num_q_heads, T, D]
    part_lse,  # fp32 [splits, num_q_heads, T], base 2
    scale,  # scaling · log2(e)
    window,
    places,
    split_places,
    num_blocks,
    num_queries,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Attend from one block of queries to one split of one row."""
    split, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_q_heads = tl.num_programs(1) * GROUP
    s = tl.load(blocks + block)
    first = tl.load(blocks + num_blocks + block)
    end = tl.load(query_cu + s + 1)

    # Row m of the block: query first + m // GROUP, head m % GROUP of the group.
    m = tl.arange(0, BLOCK_M)
    query = first + m // GROUP
    q_head = head * GROUP + m % GROUP
    real = (query < end) & (m < BLOCK_M // GROUP * GROUP)
    d = tl.arange(0, BLOCK_D)
    in_d = d < DIM
    q_rows = (q_head.to(tl.int64) * num_queries + query)[:, None] * DIM + d
    q_block = tl.load(q + q_rows, mask=real[:, None] & in_d, other=0.0)

    row = (s * tl.num_programs(1) + head) * places
    visible = tl.full([BLOCK_M], 0, tl.int32)
    if CAUSAL:
        visible += tl.load(ends + row + places - 1) - (end - query) + 1
    query_position = tl.full([BLOCK_M], 0, tl.int64)
    if WINDOW:
        query_position += tl.load(query_positions + query, mask=real, other=0).to(tl.int64)

    place_0 = split * split_places
    place_end = tl.minimum(place_0 + split_places, places)
    used = 0
    for c in range(place_0, place_end, BLOCK_C):
        at = c + tl.arange(0, BLOCK_C)
        used += tl.sum(tl.load(fills + row + at, mask=at < place_end, other=0))
    slots_end = tl.where(used > 0, place_end * PAGE, place_0 * PAGE)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(place_0 * PAGE, slots_end, BLOCK_N):
        index = n + tl.arange(0, BLOCK_N)
        place, slot = index // PAGE, index % PAGE
        fill = tl.load(fills + row + place, mask=place < place_end, other=0)
        filled = slot < fill
        page = tl.load(tables + row + place, mask=filled, other=0).to(tl.int64)
        entries = page * PAGE + slot
        k = tl.load(
            keys + entries[None, :] * DIM + d[:, None], mask=filled & in_d[:, None], other=0.0
        )
        logits = tl.dot(q_block, k, input_precision="ieee") * scale
        seen = filled[None, :] & real[:, None]
        if CAUSAL:
            order = tl.load(ends + row + place, mask=filled, other=0) - fill + slot
            seen = seen & (order[None, :] < visible[:, None])
        if WINDOW:
            position = tl.load(position_pages + entries, mask=filled, other=0).to(tl.int64)
            seen = seen & (position[None, :] > query_position[:, None] - window)
        logits = tl.where(seen, logits, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(logits, 1))
        # Nothing seen so far: any number will do, but −inf − −inf is none.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + entries[:, None] * DIM + d, mask=filled[:, None] & in_d, other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        highest = new_highest

    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), highest + tl.log2(tl.where(empty, 1.0, total)))
    part = (split * num_q_heads + q_head).to(tl.int64) * num_queries + query
    tl.store(part_lse + part, lse, mask=real)
    tl.store(part_out + part[:, None] * DIM + d, out, mask=real[:, None] & in_d)


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    part_out,  # fp32 [splits, num_q_heads, T, D]
    part_lse,  # fp32 [splits, num_q_heads, T], base 2
    out,  # [num_q_heads, T, D]
    lse,  # fp32 [num_q_heads, T], natural
    splits,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Merge the splits of one (query head, query), in order."""
    head, query = tl.program_id(1), tl.program_id(0)
    place = head.to(tl.int64) * tl.num_programs(0) + query
    stride = tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
    d = tl.arange(0, BLOCK_D)
    highest = float("-inf")
    for i in range(0, splits, BLOCK_S):
        s = i + tl.arange(0, BLOCK_S)
        parts = tl.load(part_lse + s * stride + place, mask=s < splits, other=float("-inf"))
        highest = tl.maximum(highest, tl.max(parts, 0))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for i in range(0, splits, BLOCK_S):
        s = i + tl.arange(0, BLOCK_S)
        at = s * stride + place
        parts = tl.load(part_lse + at, mask=s < splits, other=float("-inf"))
        weights = tl.exp2(parts - base)
        mask = (s < splits)[:, None] & (d < DIM)
        rows = tl.load(part_out + at[:, None] * DIM + d, mask=mask, other=0.0)
        total += tl.sum(weights, 0)
        acc += tl.sum(rows * weights[:, None], 0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(out + place * DIM + d, (acc / total).to(out.dtype.element_ty), mask=d < DIM)
    natural = (highest + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + place, tl.where(empty, float("-inf"), natural))


def block_sizes(head_dim: int, group_size: int, most_queries: int, itemsize: int) -> dict[str, int]:
    """Return the split kernel's compile-time sizes and warps.

    Args:
        head_dim: D.
        group_size: query heads per KV head.
        most_queries: most queries of one sequence.
        itemsize: of q, in bytes; fp32 products live in plain registers and need more.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    few, fp32 = most_queries * group_size <= 16, itemsize == 4
    return {
        "BLOCK_D": block_d,
        "BLOCK_M": max(16 if few or fp32 else 64, triton.next_power_of_2(group_size)),
        "BLOCK_N": 32 if fp32 or block_d > 128 else 64,
        "BLOCK_C": 32,
        "num_warps": 8 if fp32 or (not few and block_d > 64) else 4,
        "num_stages": 2,
    }


@functools.lru_cache(maxsize=64)
def query_blocks(query_cu: tuple[int, ...], step: int, device: torch.device) -> Tensor:
    """Cut the sequences' queries into blocks of `step`: int32 [2, B], sequence and first query.

    Kept, because all layers of a step, and most steps, ask for the same.
    """
    rows = [
        (s, first)
        for s in range(len(query_cu) - 1)
        for first in range(query_cu[s], query_cu[s + 1], step)
    ]
    return torch.tensor(rows, dtype=torch.int32).T.contiguous().to(device, non_blocking=True)


@functools.lru_cache(maxsize=64)
def on_device(query_cu: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(query_cu, dtype=torch.int32).to(device, non_blocking=True)


def splits_of(places: int, page_size: int, row_bytes: int) -> tuple[int, int]:
    """Cut rows of so many places.

    Args:
        places: of the table.
        page_size: slots of a place.
        row_bytes: of all partial results of one split.

    Returns:
        (places of one split, splits).
    """
    count = max(1, SPLIT // page_size)
    while row_bytes * triton.cdiv(places, count) > PARTIAL_BYTES and count < places:
        count *= 2
    return count, max(1, triton.cdiv(places, count))


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
    """Return (out [Hq, T, D], lse fp32 [Hq, T] or None); see `ops` for the arguments.

    Whether every row has the entries that its queries own is not checked: that would wait
    for the GPU.
    """
    q, tables, fills = q.contiguous(), tables.contiguous(), fills.contiguous()
    (num_q_heads, num_queries, dim), (_, heads, places) = q.shape, tables.shape
    group, page_size = num_q_heads // heads, key_pages.shape[1]
    cu = tuple(query_cu.tolist())
    most = max(b - a for a, b in itertools.pairwise(cu))
    sizes = block_sizes(dim, group, most, q.element_size())
    blocks = query_blocks(cu, sizes["BLOCK_M"] // group, q.device)
    masked = causal and most > 1  # a single query sees everything anyway
    row_bytes = num_q_heads * num_queries * (dim + 1) * 4
    split_places, splits = splits_of(places, page_size, row_bytes)
    parts = q.new_empty((splits, num_q_heads, num_queries, dim), dtype=torch.float32)
    part_lse = q.new_empty(parts.shape[:3], dtype=torch.float32)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    arguments: tuple[Any, ...] = (
        q,
        key_pages,
        value_pages,
        tables,
        fills,
        fills.cumsum(-1, dtype=torch.int32) if masked else fills,
        on_device(cu, q.device),
        blocks,
        fills if position_pages is None else position_pages,
        fills if query_positions is None else query_positions,
        parts,
        part_lse,
        scaling * 1.4426950408889634,
        window or 0,
        places,
        split_places,
        blocks.shape[1],
        num_queries,
    )
    split_kernel[(splits, heads, blocks.shape[1])](
        *arguments,
        CAUSAL=masked,
        WINDOW=window is not None,
        GROUP=group,
        PAGE=page_size,
        DIM=dim,
        **sizes,
    )
    merge_kernel[(num_queries, num_q_heads)](
        parts,
        part_lse,
        out,
        lse,
        splits,
        DIM=dim,
        BLOCK_D=sizes["BLOCK_D"],
        BLOCK_S=16,
    )
    return out, lse if return_lse else None
