"""Pages: random sequences of ragged heads as a decode pool holds them, raw or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gpu_shape import Shape
from torch import Tensor

from criticalkv.kernels import ops, quantized_reference
from criticalkv.kernels.group_layout import ROWS, GroupLayout

PAGE = 64
"""Entries of a page."""


@dataclass(frozen=True)
class Pages:
    """Arguments of an attention over pages, and what the pages hold.

    Attributes:
        call: the arguments, by name.
        lens: int64 [S, num_kv_heads], entries of each head.
        keys: [Σ lens, D], head after head, sequence after sequence.
        values: like keys.
    """

    call: dict[str, Any]
    lens: Tensor
    keys: Tensor
    values: Tensor


def ragged_lens(shape: Shape, sequences: int, mean: float, most: int) -> Tensor:
    """Lengths of gamma(2) distribution, no multiples of a page: int64 [S, num_kv_heads]."""
    drawn = torch.distributions.Gamma(2.0, 2.0 / mean).sample((sequences, shape.num_kv_heads))
    return drawn.long().clamp(8, most)


def raw(shape: Shape, lens: Tensor, dtype: torch.dtype, queries: int) -> Pages:
    """Random entries of these lengths in pages, shuffled in memory."""
    tables, fills, order = _places(lens, PAGE)
    size = (order.numel(), PAGE, shape.head_dim)
    pages = [shape.random(*size, dtype=dtype) for _ in range(2)]
    slots = order.repeat_interleave(PAGE) * PAGE + torch.arange(PAGE).repeat(order.numel())
    used = slots[(torch.arange(PAGE) < fills[fills > 0][:, None]).flatten()].to(shape.device)
    call = _call(shape, lens, tables, fills, dtype, queries)
    call |= {"key_pages": pages[0], "value_pages": pages[1]}
    return Pages(call, lens, *(page.flatten(0, 1)[used] for page in pages))


def quantized(shape: Shape, lens: Tensor, dtype: torch.dtype, queries: int, bits: int) -> Pages:
    """Random entries of these lengths in groups, in pages of the size that `raw` has."""
    layout = GroupLayout(bits, shape.head_dim)
    tables, fills, order = _places(lens, ROWS)
    filled = fills[fills > 0].to(shape.device)
    starts = filled.cumsum(0) - filled
    total = int(lens.sum())
    entries = [shape.random(total, shape.head_dim, dtype=dtype) for _ in range(2)]
    positions = torch.arange(total, device=shape.device)
    groups = ops.quantize(*entries, positions, starts, filled, bits)
    size = PAGE * shape.head_dim * dtype.itemsize
    per_page = min(size // layout.key_bytes, size // layout.value_bytes)
    pages = [_placed(part, order.to(shape.device), per_page, size) for part in groups]
    call = _call(shape, lens, tables, fills, dtype, queries)
    call |= {"key_pages": pages[0], "value_pages": pages[1], "layout": layout}
    keys, values, _ = quantized_reference.dequantize(*groups, filled, layout)
    return Pages(call, lens, keys, values)


def _places(lens: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tables and fills, int32 [S, num_kv_heads, C], and the order of all pieces, int64."""
    counts = (lens + size - 1) // size
    width = int(counts.max())
    order = torch.randperm(int(counts.sum()))
    tables = torch.zeros(*lens.shape, width, dtype=torch.int32)
    tables[torch.arange(width) < counts[..., None]] = order.to(torch.int32)
    fills = (lens[..., None] - size * torch.arange(width)).clamp(0, size).to(torch.int32)
    return tables, fills, order


def _call(
    shape: Shape, lens: Tensor, tables: Tensor, fills: Tensor, dtype: torch.dtype, queries: int
) -> dict[str, Any]:
    sequences = lens.shape[0]
    return {
        "q": shape.queries(sequences * queries, dtype),
        "tables": tables.to(shape.device),
        "fills": fills.to(shape.device),
        "query_cu": torch.arange(sequences + 1, dtype=torch.int32) * queries,
        "scaling": shape.scaling,
    }


def _placed(groups: Tensor, order: Tensor, per_page: int, size: int) -> Tensor:
    """Put group i at place order[i] of pages of `size` bytes: uint8 [P, size]."""
    count, group = groups.shape
    pages = torch.zeros(-(-count // per_page), size, dtype=torch.uint8, device=groups.device)
    whole = pages[:, : per_page * group].view(-1, per_page, group)
    whole[order // per_page, order % per_page] = groups
    return pages
