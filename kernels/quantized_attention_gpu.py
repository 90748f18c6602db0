"""Attention over quantized groups in pages on a GPU: one Triton kernel, split over the groups.

Like `paged_attention_gpu`, whose second kernel merges the splits: a program attends from
one block of queries to one split of a row, a group at a time. A group's codes become
zero + scale · code in registers, in the dtype of the queries; products and sums are fp32.
No atomics, and no synchronisation. Bytes of a group: `group_layout`.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from criticalkv.kernels import quantized_reference
from criticalkv.kernels.group_layout import ROWS, GroupLayout
from criticalkv.kernels.paged_attention_gpu import (
    block_sizes,
    merge_kernel,
    on_device,
    query_blocks,
    splits_of,
)


# Lengths change with every step: as part of the compile key they would compile anew each time.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        *("window", "places", "split_places", "num_blocks", "num_queries", "per_page"),
    ]
)
def split_kernel(  # type: ignore[no-untyped-def]
    q,  # [num_q_heads, T, D]
    keys,  # uint8 [P, key_page]
    key_halves,  # the same memory as fp16
    values,  # uint8 [P, value_page]
    value_halves,  # the same memory as fp16
    value_words,  # the same memory as int32
    tables,  # [S, num_kv_heads, places]
    fills,  # like tables
    query_cu,  # [S + 1]
    blocks,  # [2, B]: sequence and first query of each block of queries
    query_positions,  # [T]
    part_out,  # fp32 [splits, num_q_heads, T, D]
    part_lse,  # fp32 [splits, num_q_heads, T], base 2
    scale,  # scaling · log2(e)
    window,
    places,
    split_places,
    num_blocks,
    num_queries,
    key_page,  # bytes of a page
    value_page,
    per_page,  # groups of a page
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,  # of a value
    KEY_BYTES: tl.constexpr,  # of a group, as VALUE_BYTES
    VALUE_BYTES: tl.constexpr,
    AFFINE_AT: tl.constexpr,
    POSITIONS_AT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
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
    query_position = tl.full([BLOCK_M], 0, tl.int64)
    if WINDOW:
        query_position += tl.load(query_positions + query, mask=real, other=0).to(tl.int64)

    # With 4 bits, the channels of the upper half are in the high halves of the bytes.
    CODE_BYTES: tl.constexpr = DIM * BITS // 8
    byte = d if BITS == 8 else d % CODE_BYTES
    shift = d // CODE_BYTES * 4
    row = tl.arange(0, ROWS)
    run = tl.arange(0, BLOCK_R)

    at = (s * tl.num_programs(1) + head) * places
    place_0 = split * split_places
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for place in range(place_0, tl.minimum(place_0 + split_places, places)):
        fill = tl.load(fills + at + place)
        used = row < fill
        number = tl.load(tables + at + place, mask=fill > 0, other=0)
        page, slot = (number // per_page).to(tl.int64), number % per_page

        key_at = page * key_page + slot * KEY_BYTES
        code = tl.load(
            keys + key_at + row[None, :] * CODE_BYTES + byte[:, None],
            mask=used[None, :] & in_d[:, None],
            other=0,
        )
        if BITS == 4:
            code = (code >> shift[:, None].to(tl.uint8)) & 15
        affine = key_halves + key_at // 2 + AFFINE_AT // 2 + d
        there = d < tl.where(fill > 0, DIM, 0)
        step = tl.load(affine, mask=there, other=0.0).to(tl.float32)
        zero = tl.load(affine + DIM, mask=there, other=0.0).to(tl.float32)
        k = zero[:, None] + step[:, None] * code.to(tl.float32)
        if q_block.dtype == tl.float16:  # scales are rounded outwards, beyond the largest fp16
            k = tl.clamp(k, -65504.0, 65504.0)
        logits = tl.dot(q_block, k.to(q_block.dtype), input_precision="ieee") * scale

        value_at = page * value_page + slot * VALUE_BYTES
        seen = used[None, :] & real[:, None]
        if WINDOW:
            positions = value_words + value_at // 4 + POSITIONS_AT // 4 + row
            position = tl.load(positions, mask=used, other=0).to(tl.int64)
            seen = seen & (position[None, :] > query_position[:, None] - window)
        logits = tl.where(seen, logits, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(logits, 1))
        # Nothing seen so far: any number will do, but −inf − −inf is none.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)

        code = tl.load(
            values + value_at + row[:, None] * CODE_BYTES + byte,
            mask=used[:, None] & in_d,
            other=0,
        )
        if BITS == 4:
            code = (code >> shift.to(tl.uint8)) & 15
        affine = value_halves + value_at // 2 + AFFINE_AT // 2 + (row[:, None] * RUNS + run) * 2
        there = used[:, None] & (run < RUNS)
        step = tl.load(affine, mask=there, other=0.0).to(tl.float32)
        zero = tl.load(affine + 1, mask=there, other=0.0).to(tl.float32)
        WIDE: tl.constexpr = BLOCK_D // BLOCK_R
        step = tl.reshape(tl.broadcast_to(step[:, :, None], [ROWS, BLOCK_R, WIDE]), [ROWS, BLOCK_D])
        zero = tl.reshape(tl.broadcast_to(zero[:, :, None], [ROWS, BLOCK_R, WIDE]), [ROWS, BLOCK_D])
        v = zero + step * code.to(tl.float32)
        if q_block.dtype == tl.float16:
            v = tl.clamp(v, -65504.0, 65504.0)
        v = v.to(q_block.dtype)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        highest = new_highest

    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), highest + tl.log2(tl.where(empty, 1.0, total)))
    part = (split * num_q_heads + q_head).to(tl.int64) * num_queries + query
    tl.store(part_lse + part, lse, mask=real)
    tl.store(part_out + part[:, None] * DIM + d, out, mask=real[:, None] & in_d)


def sizes(layout: GroupLayout, group_size: int, most_queries: int, itemsize: int) -> dict[str, int]:
    """Return the kernel's compile-time sizes, and its warps and stages.

    Args:
        layout: of the groups.
        group_size: query heads per KV head.
        most_queries: most queries of one sequence.
        itemsize: of q, in bytes.
    """
    blocks = block_sizes(layout.head_dim, group_size, most_queries, itemsize)
    return {
        "GROUP": group_size,
        "DIM": layout.head_dim,
        "BITS": layout.bits,
        "ROWS": ROWS,
        "RUNS": layout.value_runs,
        "KEY_BYTES": layout.key_bytes,
        "VALUE_BYTES": layout.value_bytes,
        "AFFINE_AT": layout.affine_at,
        "POSITIONS_AT": layout.positions_at,
        "BLOCK_R": triton.next_power_of_2(layout.value_runs),
        **{name: blocks[name] for name in ("BLOCK_D", "BLOCK_M", "num_warps", "num_stages")},
    }


def _readable(pages: Tensor) -> bool:
    """Whether pages are in one piece and can be read in words of 4 bytes."""
    return pages.is_contiguous() and pages.shape[1] % 4 == 0 and pages.storage_offset() % 4 == 0


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
    if not (_readable(key_pages) and _readable(value_pages)):
        return quantized_reference.quantized_attention(
            q,
            key_pages,
            value_pages,
            tables,
            fills,
            query_cu,
            layout=layout,
            scaling=scaling,
            window=window,
            query_positions=query_positions,
        )
    q, tables, fills = q.contiguous(), tables.contiguous(), fills.contiguous()
    (num_q_heads, num_queries, dim), (_, heads, places) = q.shape, tables.shape
    group = num_q_heads // heads
    cu = tuple(query_cu.tolist())
    most = max(b - a for a, b in itertools.pairwise(cu))
    compile_time = sizes(layout, group, most, q.element_size())
    blocks = query_blocks(cu, compile_time["BLOCK_M"] // group, q.device)
    split_places, splits = splits_of(places, ROWS, num_q_heads * num_queries * (dim + 1) * 4)
    parts = q.new_empty((splits, num_q_heads, num_queries, dim), dtype=torch.float32)
    part_lse = q.new_empty(parts.shape[:3], dtype=torch.float32)
    out = torch.empty_like(q, dtype=torch.float32)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    arguments: tuple[Any, ...] = (
        q,
        key_pages,
        key_pages.view(torch.float16),
        value_pages,
        value_pages.view(torch.float16),
        value_pages.view(torch.int32),
        tables,
        fills,
        on_device(cu, q.device),
        blocks,
        fills if query_positions is None else query_positions,
        parts,
        part_lse,
        scaling * 1.4426950408889634,
        window or 0,
        places,
        split_places,
        blocks.shape[1],
        num_queries,
        key_pages.shape[1],
        value_pages.shape[1],
        quantized_reference.groups_per_page(key_pages, value_pages, layout),
    )
    split_kernel[(splits, heads, blocks.shape[1])](
        *arguments, WINDOW=window is not None, **compile_time
    )
    merge_kernel[(num_queries, num_q_heads)](
        parts,
        part_lse,
        out,
        lse,
        splits,
        DIM=dim,
        BLOCK_D=compile_time["BLOCK_D"],
        BLOCK_S=16,
    )
    return out, lse
