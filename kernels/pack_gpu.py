"""Packing kept entries on a GPU: one Triton launch copies keys and values, writes positions
and looks for NaN and infinity.

A program copies a block of rows of one run: consecutive rows of the output that come from
one head. Blocks past a run's end return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from criticalkv.kernels import pack_reference

ELEMENTS = 2048
"""Of keys, and as many of values, that a program copies."""

INFINITY = tl.constexpr(0x7F800000)
"""Bits of fp32 infinity: those of finite magnitudes are smaller, those of NaN larger."""


@triton.jit
def _magnitudes(x):  # type: ignore[no-untyped-def]
    """The bits of |x| in fp32: integers of the same order."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def pack_kernel(  # type: ignore[no-untyped-def]
    keys,  # [H, n, D] with strides key_head, key_row, 1
    values,  # like keys, with its own strides
    indices,  # int64 [Σ len_h]
    runs,  # int64 [R, 4]: head, first among indices, first row of the output, rows
    out_keys,  # [Σ, D]
    out_values,  # [Σ, D]
    positions,  # int32 [Σ]
    finite,  # uint8 [1]: set to 0 where something copied is not
    first_position,
    key_head,
    key_row,
    value_head,
    value_row,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Copy a block of rows of one run."""
    block, run = tl.program_id(0), tl.program_id(1)
    head, source = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1)
    target, count = tl.load(runs + run * 4 + 2), tl.load(runs + run * 4 + 3)
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    if block * BLOCK_R < count:
        there = r < count
        index = tl.load(indices + source + r, mask=there, other=0)
        tl.store(positions + target + r, (index + first_position).to(tl.int32), mask=there)
        d = tl.arange(0, BLOCK_D)
        mask = there[:, None] & (d < DIM)
        to = (target + r)[:, None] * DIM + d
        k = tl.load(keys + head * key_head + index[:, None] * key_row + d, mask=mask, other=0.0)
        v = tl.load(
            values + head * value_head + index[:, None] * value_row + d, mask=mask, other=0.0
        )
        tl.store(out_keys + to, k, mask=mask)
        tl.store(out_values + to, v, mask=mask)
        worst = tl.maximum(_magnitudes(k), _magnitudes(v))
        wrong = tl.max(tl.max(worst, 1), 0) >= INFINITY
        tl.store(finite, 0, mask=wrong)  # all that store here store the same


def block_sizes(head_dim: int) -> dict[str, int]:
    """Return the kernel's compile-time sizes."""
    block_d = triton.next_power_of_2(head_dim)
    return {"BLOCK_D": block_d, "BLOCK_R": max(1, ELEMENTS // block_d)}


def pack(
    keys: Tensor,
    values: Tensor,
    indices: Tensor,
    cu_seqlens: Tensor,
    first_position: int,
    tier_lens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (keys [Σ, D], values, positions int32 [Σ], finite bool []); see `ops`."""
    keys, values = _whole_rows(keys), _whole_rows(values)
    runs, dim = pack_reference.pack_runs(cu_seqlens, tier_lens), keys.shape[2]
    total, longest = int(runs[:, 3].sum()), int(runs[:, 3].max())
    out_keys, out_values = (x.new_empty(total, dim) for x in (keys, values))
    positions = indices.new_empty(total, dtype=torch.int32)
    finite = torch.ones((), dtype=torch.bool, device=keys.device)
    if total:
        sizes = block_sizes(dim)
        pack_kernel[(triton.cdiv(longest, sizes["BLOCK_R"]), runs.shape[0])](
            keys,
            values,
            indices.contiguous(),
            runs.to(keys.device, non_blocking=True),
            out_keys,
            out_values,
            positions,
            finite.view(torch.uint8),
            first_position,
            *keys.stride()[:2],
            *values.stride()[:2],
            DIM=dim,
            **sizes,
        )
    return out_keys, out_values, positions, finite


def _whole_rows(x: Tensor) -> Tensor:
    """The tensor with rows in one piece; a transposed one has them already."""
    return x if x.stride(-1) == 1 else x.contiguous()
