"""Random rows in pages, and attention over them by loops over every entry, in fp64.

On the tests' path: what the tests of `paged_attention` on several devices share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

NOWHERE = 1 << 24
"""A page that does not exist: the table's entry where nothing is."""


@dataclass
class Batch:
    """The arguments of `ops.paged_attention`; unused slots are NaN."""

    q: Tensor
    key_pages: Tensor
    value_pages: Tensor
    tables: Tensor
    fills: Tensor
    query_cu: Tensor
    position_pages: Tensor
    query_positions: Tensor

    def arguments(self) -> tuple[Tensor, ...]:
        """The positional ones."""
        pages = (self.key_pages, self.value_pages)
        return (self.q, *pages, self.tables, self.fills, self.query_cu)

    def options(self, window: int | None, causal: bool = True) -> dict[str, Any]:
        """The others."""
        return {
            "scaling": scaling(self),
            "causal": causal,
            "window": window,
            "position_pages": None if window is None else self.position_pages,
            "query_positions": None if window is None else self.query_positions,
            "return_lse": True,
        }

    def only(self, s: int, more_places: int = 0) -> Batch:
        """Sequence s alone, with so many empty places appended."""
        return replace(self, **only(self, s, more_places))


def only(batch: Any, s: int, more_places: int) -> dict[str, Tensor]:
    """The fields of a batch, of pages or of groups, that sequence s alone changes."""
    a, b = batch.query_cu[s].item(), batch.query_cu[s + 1].item()
    return {
        "q": batch.q[:, a:b],
        "tables": torch.nn.functional.pad(batch.tables[s : s + 1], (0, more_places)),
        "fills": torch.nn.functional.pad(batch.fills[s : s + 1], (0, more_places)),
        "query_cu": torch.tensor([0, b - a], dtype=torch.int32),
        "query_positions": batch.query_positions[a:b],
    }


def batch(
    rows: Sequence[Sequence[Sequence[int]]],
    queries: Sequence[int],
    *,
    group: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Return random pages for the rows, scattered.

    Args:
        rows: [sequence][head], the lengths of the nodes of its chain. Every node starts a
            page; a node of length 0 leaves an empty place.
        queries: of each sequence. Their own entries are the last ones.
        group: group_size.
        dim: head_dim.
        page_size: slots per page.
        dtype: of q and pages.
        seed: of everything random.
    """
    torch.manual_seed(seed)
    fills = [[_fills(chain, page_size) for chain in heads] for heads in rows]
    places = max(len(row) for heads in fills for row in heads)
    padded = [[row + [0] * (places - len(row)) for row in heads] for heads in fills]
    filled = torch.tensor(padded, dtype=torch.int32)
    used = filled > 0
    total = int(used.sum()) + 3
    tables = torch.full_like(filled, NOWHERE)
    tables[used] = torch.randperm(total)[: int(used.sum())].to(torch.int32)
    slots = torch.zeros(total, page_size, dtype=torch.bool)
    slots[tables[used].long()] = torch.arange(page_size) < filled[used][:, None]
    pages = [torch.full((total, page_size, dim), torch.nan, dtype=dtype) for _ in range(2)]
    for page in pages:
        page[slots] = torch.randn(int(slots.sum()), dim).to(dtype)
    positions = torch.full((total, page_size), 1 << 30, dtype=torch.int32)
    asked = []
    for s, heads in enumerate(filled):
        length = int(heads.sum(-1).max())
        asked.append(torch.arange(length - queries[s], length))
        for h, fill in enumerate(heads):
            _place(positions, tables[s, h], fill, queries[s], length)
    cu = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    q = torch.randn(group * len(rows[0]), sum(queries), dim).to(dtype)
    return Batch(q, *pages, tables, filled, cu, positions, torch.cat(asked))


def scaling(b: Batch) -> float:
    """Not the usual factor, or a kernel that ignores its argument would pass."""
    return 1.3 * b.q.shape[-1] ** -0.5


def _fills(chain: Sequence[int], page_size: int) -> list[int]:
    fills = []
    for length in chain:
        whole, rest = divmod(length, page_size)
        fills += [page_size] * whole + ([rest] if rest or not length else [])
    return fills


def _place(pages: Tensor, table: Tensor, fill: Tensor, own: int, length: int) -> None:
    """Give a row's entries positions: those before the queries' own in no order."""
    slots = [(p, i) for p, n in zip(table.tolist(), fill.tolist(), strict=True) for i in range(n)]
    shared = max(0, len(slots) - own)
    before = torch.randperm(max(1, length - own))[:shared].tolist()
    for (page, slot), position in zip(
        slots, before + list(range(length - own, length)), strict=False
    ):
        pages[page, slot] = position


def attention(b: Batch, window: int | None = None, causal: bool = True) -> tuple[Tensor, Tensor]:
    """Return fp64 (out [Hq, T, D], lse [Hq, T])."""
    out = torch.zeros(b.q.shape, dtype=torch.float64)
    lse = torch.full(b.q.shape[:2], -torch.inf, dtype=torch.float64)
    group = b.q.shape[0] // b.tables.shape[1]
    cu = b.query_cu.tolist()
    for s in range(len(cu) - 1):
        for head in range(b.q.shape[0]):
            row = (s, head // group)
            entries = [
                (page, slot)
                for page, fill in zip(b.tables[row].tolist(), b.fills[row].tolist(), strict=True)
                for slot in range(fill)
            ]
            for t in range(cu[s], cu[s + 1]):
                seen = entries[: len(entries) - (cu[s + 1] - 1 - t)] if causal else entries
                if window is not None:
                    oldest = b.query_positions[t].item() - window
                    seen = [e for e in seen if b.position_pages[e].item() > oldest]
                if seen:
                    out[head, t], lse[head, t] = _one(b, b.q[head, t], seen)
    return out, lse


def _one(b: Batch, q: Tensor, seen: list[tuple[int, int]]) -> tuple[Tensor, float]:
    """One query over the entries it sees."""
    logits = [scaling(b) * float(b.key_pages[e].double() @ q.double()) for e in seen]
    highest = max(logits)
    weights = [math.exp(x - highest) for x in logits]
    total = torch.zeros(q.shape, dtype=torch.float64)
    for weight, entry in zip(weights, seen, strict=True):
        total += weight * b.value_pages[entry].double()
    return total / sum(weights), highest + math.log(sum(weights))
