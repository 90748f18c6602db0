"""Random quantized groups in pages, and attention over them entry by entry, in fp64.

On the tests' path: what the tests of `quantized_attention` on several devices share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import naive_pages
import naive_quantize
import torch
from torch import Tensor

from criticalkv.kernels.group_layout import ROWS, GroupLayout

NOWHERE = 1 << 24
"""A group that does not exist: the table's entry where nothing is."""
GARBAGE = 255
"""The bytes of memory that nothing is in; halves of it are NaN."""


@dataclass
class Batch:
    """The arguments of `ops.quantized_attention`; unused memory is garbage."""

    q: Tensor
    key_pages: Tensor
    value_pages: Tensor
    tables: Tensor
    fills: Tensor
    query_cu: Tensor
    query_positions: Tensor
    layout: GroupLayout
    per_page: int

    def arguments(self) -> tuple[Tensor, ...]:
        """The positional ones."""
        pages = (self.key_pages, self.value_pages)
        return (self.q, *pages, self.tables, self.fills, self.query_cu)

    def options(self, window: int | None = None) -> dict[str, Any]:
        """The others."""
        return {
            "layout": self.layout,
            "scaling": scaling(self),
            "window": window,
            "query_positions": None if window is None else self.query_positions,
        }

    def only(self, s: int, more_places: int = 0) -> Batch:
        """Sequence s alone, with so many empty places appended."""
        return replace(self, **naive_pages.only(self, s, more_places))


def batch(
    rows: Sequence[Sequence[Sequence[int]]],
    queries: Sequence[int],
    *,
    group: int,
    dim: int,
    bits: int,
    per_page: int = 3,
    spare: int = 20,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Return random groups for the rows, scattered over pages.

    Args:
        rows: [sequence][head], the lengths of the (node, tier) pieces of a head. Every piece
            starts a group; a piece of length 0 leaves an empty place.
        queries: of each sequence.
        group: group_size.
        dim: head_dim.
        bits: of a code.
        per_page: groups of a page.
        spare: bytes at the end of a page that hold no group.
        dtype: of q.
        seed: of everything random.
    """
    torch.manual_seed(seed)
    layout = GroupLayout(bits, dim)
    fills = [[[n for piece in head for n in _fills(piece)] for head in heads] for heads in rows]
    places = max(len(row) for heads in fills for row in heads)
    padded = [[row + [0] * (places - len(row)) for row in heads] for heads in fills]
    filled = torch.tensor(padded, dtype=torch.int32)
    used = filled > 0
    pages = -(-int(used.sum()) // per_page) + 2
    tables = torch.full_like(filled, NOWHERE)
    tables[used] = torch.randperm(pages * per_page)[: int(used.sum())].to(torch.int32)
    memory = [
        torch.full((pages, per_page * size + spare), GARBAGE, dtype=torch.uint8)
        for size in (layout.key_bytes, layout.value_bytes)
    ]
    for number, fill in zip(tables[used].tolist(), filled[used].tolist(), strict=True):
        page, place = divmod(number, per_page)
        for pages_of, parts in zip(memory, (_key_group, _value_group), strict=True):
            content = parts(fill, layout)
            pages_of[page, place * len(content) : (place + 1) * len(content)] = content
    cu = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    q = torch.randn(group * len(rows[0]), sum(queries), dim).to(dtype)
    positions = torch.cat([torch.arange(1000, 1000 + n) for n in queries])
    return Batch(q, *memory, tables, filled, cu, positions, layout, per_page)


def scaling(b: Batch) -> float:
    """Not the usual factor, or a kernel that ignores its argument would pass."""
    return 1.3 * b.q.shape[-1] ** -0.5


def _fills(length: int) -> list[int]:
    whole, rest = divmod(length, ROWS)
    return [ROWS] * whole + ([rest] if rest or not length else [])


def _key_group(fill: int, layout: GroupLayout) -> Tensor:
    affine = torch.stack(_affine((layout.head_dim,), layout))
    return torch.cat([_codes(fill, layout), affine.half().view(-1).view(torch.uint8)])


def _value_group(fill: int, layout: GroupLayout) -> Tensor:
    affine = torch.stack(_affine((ROWS, layout.value_runs), layout), -1).half()
    affine[fill:] = torch.nan
    positions = 100 * torch.randint(0, 10, (ROWS,), dtype=torch.int32)  # windows end at some
    parts = [_codes(fill, layout), affine.view(-1).view(torch.uint8), positions.view(torch.uint8)]
    return torch.cat(parts)


def _affine(shape: tuple[int, ...], layout: GroupLayout) -> tuple[Tensor, Tensor]:
    """(scale, zero) that make entries of order 1, not around 0."""
    scale = (2 + 2 * torch.rand(shape)) / layout.levels
    return scale, 0.5 * torch.randn(shape) - layout.levels / 2 * scale


def _codes(fill: int, layout: GroupLayout) -> Tensor:
    codes = torch.randint(0, 256, (ROWS, layout.code_bytes), dtype=torch.uint8)
    codes[fill:] = GARBAGE
    return codes.view(-1)


def entries(b: Batch, s: int, head: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return a row's keys and values, fp64 [n, D], and positions, read from its bytes."""
    dim, sizes = b.layout.head_dim, (b.layout.key_bytes, b.layout.value_bytes)
    none = torch.zeros(0, dim, dtype=torch.float64)
    keys, values, positions = [none], [none], []
    for number, fill in zip(b.tables[s, head].tolist(), b.fills[s, head].tolist(), strict=True):
        if fill == 0:
            continue
        page, place = divmod(number, b.per_page)
        key, value = (
            pages[page, place * size : (place + 1) * size]
            for pages, size in zip((b.key_pages, b.value_pages), sizes, strict=True)
        )
        group = naive_quantize.parse(key, value, b.layout.bits, dim)
        scale, zero = group.wide_value_affine
        wide_keys = group.key_zero.astype(float) + group.key_scale.astype(float) * group.key_codes
        keys.append(torch.from_numpy(wide_keys[:fill]))
        values.append(torch.from_numpy((zero + scale * group.value_codes)[:fill]))
        positions += group.positions[:fill].tolist()
    return torch.cat(keys), torch.cat(values), positions


def attention(
    b: Batch, window: int | None = None, entries_as: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return fp64 (out [Hq, T, D], lse [Hq, T]).

    Args:
        b: the batch.
        window: of `ops.quantized_attention`.
        entries_as: what keys and values, expanded, are rounded to.
    """
    out = torch.zeros(b.q.shape, dtype=torch.float64)
    lse = torch.full(b.q.shape[:2], -torch.inf, dtype=torch.float64)
    group, cu = b.q.shape[0] // b.tables.shape[1], b.query_cu.tolist()
    for s in range(len(cu) - 1):
        for head in range(b.tables.shape[1]):
            keys, values, positions = entries(b, s, head)
            keys, values = keys.to(entries_as).double(), values.to(entries_as).double()
            for t in range(cu[s], cu[s + 1]):
                oldest = -1 if window is None else b.query_positions[t].item() - window
                seen = [i for i, p in enumerate(positions) if p > oldest]
                for row in range(head * group, (head + 1) * group):
                    if not seen:
                        continue
                    logits = scaling(b) * (keys[seen] @ b.q[row, t].double())
                    lse[row, t] = logits.logsumexp(0)
                    out[row, t] = (logits - lse[row, t]).exp() @ values[seen]
    return out, lse
