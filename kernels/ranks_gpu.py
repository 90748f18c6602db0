"""Tier ranks on a GPU: a stable partition in two Triton kernels.

The first counts the classes (tiers, and "not admitted") of each chunk of a row; a running
sum over (class, chunk) then says where each chunk's share of a class ends; the second puts
every entry there, the chunk's last one last.

    row      a b | c d | e f     classes 1 0 | 0 1 | 1 0
    ends     class 0: 1, 2, 3    class 1: 4, 5, 6
    out      b c f | a d e

No atomics, and no synchronisation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024
"""Entries of one program: many programs even where a layer has few heads."""


@triton.jit  # type: ignore[untyped-decorator]
def count_kernel(  # type: ignore[no-untyped-def]
    by_score,  # int64 [rows, n]
    admitted,  # uint8 [rows, n]
    counts,  # int32 [rows, classes, chunks]
    n,
    classes,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Count the classes of one chunk of one row."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(by_score + row * n + at, mask=at < n, other=0)
    tier = tl.load(admitted + row * n + entry, mask=at < n, other=0).to(tl.int32)
    found = tl.histogram(tier, BINS, mask=at < n)
    c = tl.arange(0, BINS)
    place = (row * classes + c) * tl.num_programs(1) + chunk
    tl.store(counts + place, found, mask=c < classes)


@triton.jit  # type: ignore[untyped-decorator]
def place_kernel(  # type: ignore[no-untyped-def]
    by_score,  # int64 [rows, n]
    admitted,  # uint8 [rows, n]
    ends,  # int32 [rows, classes, chunks]
    out,  # int64 [rows, n]
    n,
    classes,
    BLOCK: tl.constexpr,
):
    """Put the entries of one chunk of one row into their places."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(by_score + row * n + at, mask=at < n, other=0)
    tier = tl.load(admitted + row * n + entry, mask=at < n, other=0).to(tl.int32)
    tier = tl.where(at < n, tier, classes)
    place = tl.zeros([BLOCK], tl.int32)
    for c in range(classes):
        end = tl.load(ends + (row * classes + c) * tl.num_programs(1) + chunk)
        from_end = tl.cumsum((tier == c).to(tl.int32), 0, reverse=True)
        place = tl.where(tier == c, end - from_end, place)
    tl.store(out + row * n + place, entry, mask=at < n)


def tier_ranks(by_score: Tensor, admitted: Tensor, tiers: int) -> Tensor:
    """Return the order by (tier, place in `by_score`), like by_score; see `ops`."""
    by_score, admitted = by_score.contiguous(), admitted.contiguous()
    out = torch.empty_like(by_score)
    if not out.numel():
        return out
    n, classes = by_score.shape[-1], tiers + 1
    rows, chunks = by_score.numel() // n, triton.cdiv(n, CHUNK)
    counts = by_score.new_empty((rows, classes * chunks), dtype=torch.int32)
    bins = triton.next_power_of_2(classes)
    count_kernel[(rows, chunks)](by_score, admitted, counts, n, classes, BLOCK=CHUNK, BINS=bins)
    ends = counts.cumsum(-1, dtype=torch.int32)
    place_kernel[(rows, chunks)](by_score, admitted, ends, out, n, classes, BLOCK=CHUNK)
    return out
