"""Quantizing KV into groups on a GPU, and expanding groups, in Triton; the bytes are those of
`quantized_reference`, bit for bit. Layout: `group_layout`.

A program makes or expands one group. It reads a group's entries once. Divisions are rounded
as IEEE 754 says, and a scale times a code is exact in fp32, so that a fused multiply-add
changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from criticalkv.kernels.group_layout import MAX_MAGNITUDE, ROWS, GroupLayout

LARGEST = tl.constexpr(MAX_MAGNITUDE)


@triton.jit
def _half_down(x):  # type: ignore[no-untyped-def]
    """The largest fp16 ≤ x; 0 has no sign."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    lower = tl.where(half > 0, bits - 1, bits + 1)
    lower = tl.where(half == 0, -0x7FFF, lower).to(tl.int16)  # −2^-24
    down = tl.where(half.to(tl.float32) > x, lower.to(tl.float16, bitcast=True), half)
    return tl.where(down == 0, 0.0, down).to(tl.float16)


@triton.jit  # type: ignore[untyped-decorator]
def _affine(low, high, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp16 (scale, zero), rounded outwards."""
    zero = _half_down(low)
    levels = tl.full(low.shape, LEVELS, tl.float32)
    scale = tl.div_rn(high - zero.to(tl.float32), levels)
    return tl.abs(_half_down(-scale)), zero


@triton.jit  # type: ignore[untyped-decorator]
def _codes(x, scale, zero, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest code of each element, int32; where the scale is 0, x is the zero."""
    step = tl.where(scale == 0, 1.0, scale.to(tl.float32))
    # No step is negative: cutting off the fraction is rounding down.
    return tl.minimum((tl.div_rn(x - zero.to(tl.float32), step) + 0.5).to(tl.int32), LEVELS)


@triton.jit  # type: ignore[untyped-decorator]
def _store_codes(  # type: ignore[no-untyped-def]
    out, codes, used, BITS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Write int32 codes [32, BLOCK_D] as rows of DIM · BITS / 8 bytes, unused rows as 0."""
    rows: tl.constexpr = codes.shape[0]
    row_bytes: tl.constexpr = DIM * BITS // 8
    width: tl.constexpr = BLOCK_D * BITS // 8
    j = tl.arange(0, width)
    if BITS == 4:
        low = tl.broadcast_to(j[None, :], rows, width)
        codes = tl.gather(codes, low, 1) | (tl.gather(codes, low + DIM // 2, 1) << 4)
    packed = tl.where(used[:, None], codes, 0).to(tl.uint8)
    at = tl.arange(0, rows)[:, None] * row_bytes + j
    tl.store(out + at, packed, mask=(j < row_bytes) & (at >= 0))


@triton.jit  # type: ignore[untyped-decorator]
def quantize_kernel(  # type: ignore[no-untyped-def]
    keys,  # [n, D]
    values,  # [n, D]
    positions,  # [n]
    starts,  # int64 [N]
    fills,  # [N]
    key_out,  # uint8 [N, KEY_BYTES]
    key_halves,  # the same memory as fp16
    value_out,  # uint8 [N, VALUE_BYTES]
    value_halves,  # the same memory as fp16
    value_ints,  # the same memory as int32
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    AFFINE_AT: tl.constexpr,
    POSITIONS_AT: tl.constexpr,
):
    """Quantize one group. Unused rows repeat its first row, and change no extreme."""
    levels: tl.constexpr = (1 << BITS) - 1
    runs: tl.constexpr = BLOCK_D // RUN
    group = tl.program_id(0).to(tl.int64)
    start, fill = tl.load(starts + group), tl.load(fills + group)
    r, d = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
    used = r < fill
    row = start + tl.where(used, r, 0)
    real = (d < DIM) & (r[:, None] >= 0)
    place = row[:, None] * DIM + d

    x = tl.load(keys + place, mask=real, other=0.0).to(tl.float32)
    scale, zero = _affine(tl.min(x, 0), tl.max(x, 0), levels)
    codes = _codes(x, scale[None, :], zero[None, :], levels)
    _store_codes(key_out + group * KEY_BYTES, codes, used, BITS, DIM, BLOCK_D)
    halves = key_halves + (group * KEY_BYTES + AFFINE_AT) // 2
    tl.store(halves + d, scale, mask=d < DIM)
    tl.store(halves + DIM + d, zero, mask=d < DIM)

    x = tl.load(values + place, mask=real, other=0.0).to(tl.float32)
    low = tl.min(tl.reshape(tl.where(real, x, LARGEST), [BLOCK_ROWS, runs, RUN]), 2)
    high = tl.max(tl.reshape(tl.where(real, x, -LARGEST), [BLOCK_ROWS, runs, RUN]), 2)
    scale, zero = _affine(low, high, levels)
    x = tl.reshape(x, [BLOCK_ROWS, runs, RUN])
    codes = _codes(x, scale[:, :, None], zero[:, :, None], levels)
    codes = tl.reshape(codes, [BLOCK_ROWS, BLOCK_D])
    _store_codes(value_out + group * VALUE_BYTES, codes, used, BITS, DIM, BLOCK_D)
    run = tl.arange(0, runs)
    halves = value_halves + (group * VALUE_BYTES + AFFINE_AT) // 2
    halves += (r[:, None] * RUNS + run) * 2
    there = (run < RUNS) & (r[:, None] >= 0)
    tl.store(halves, tl.where(used[:, None], scale, 0.0), mask=there)
    tl.store(halves + 1, tl.where(used[:, None], zero, 0.0), mask=there)
    position = tl.where(used, tl.load(positions + row).to(tl.int32), 0)
    tl.store(value_ints + (group * VALUE_BYTES + POSITIONS_AT) // 4 + r, position)


@triton.jit  # type: ignore[untyped-decorator]
def _load_codes(groups, r, d, mask, BITS: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes of rows r and channels d, fp32 [32, BLOCK_D]."""
    byte, shift = d, 0
    if BITS == 4:
        shift = tl.where(d < DIM // 2, 0, 4)
        byte = d - shift // 4 * (DIM // 2)
    at = r[:, None] * (DIM * BITS // 8) + byte
    loaded = tl.load(groups + at, mask=mask, other=0).to(tl.int32)
    return ((loaded >> shift) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def dequantize_kernel(  # type: ignore[no-untyped-def]
    key_groups,  # uint8 [N, KEY_BYTES]
    key_halves,  # the same memory as fp16
    value_groups,  # uint8 [N, VALUE_BYTES]
    value_halves,  # the same memory as fp16
    value_ints,  # the same memory as int32
    ends,  # int64 [N]: cumulative fills
    fills,  # [N]
    keys,  # fp32 [Σ fills, D]
    values,  # fp32 [Σ fills, D]
    positions,  # int32 [Σ fills]
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    AFFINE_AT: tl.constexpr,
    POSITIONS_AT: tl.constexpr,
):
    """Expand one group."""
    runs: tl.constexpr = BLOCK_D // RUN
    group = tl.program_id(0).to(tl.int64)
    fill = tl.load(fills + group)
    begin = tl.load(ends + group) - fill
    r, d = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
    used = r < fill
    mask = used[:, None] & (d < DIM)
    out = (begin + r)[:, None] * DIM + d

    codes = _load_codes(key_groups + group * KEY_BYTES, r, d, mask, BITS, DIM)
    halves = key_halves + (group * KEY_BYTES + AFFINE_AT) // 2
    key_scale = tl.load(halves + d, mask=d < DIM, other=0.0).to(tl.float32)
    key_zero = tl.load(halves + DIM + d, mask=d < DIM, other=0.0).to(tl.float32)
    tl.store(keys + out, key_zero[None, :] + key_scale[None, :] * codes, mask=mask)

    codes = _load_codes(value_groups + group * VALUE_BYTES, r, d, mask, BITS, DIM)
    codes = tl.reshape(codes, [BLOCK_ROWS, runs, RUN])
    run = tl.arange(0, runs)
    halves = value_halves + (group * VALUE_BYTES + AFFINE_AT) // 2
    halves += (r[:, None] * RUNS + run) * 2
    there = (run < RUNS) & used[:, None]
    scale = tl.load(halves, mask=there, other=0.0).to(tl.float32)
    zero = tl.load(halves + 1, mask=there, other=0.0).to(tl.float32)
    expanded = zero[:, :, None] + scale[:, :, None] * codes
    tl.store(values + out, tl.reshape(expanded, [BLOCK_ROWS, BLOCK_D]), mask=mask)
    position = tl.load(value_ints + (group * VALUE_BYTES + POSITIONS_AT) // 4 + r)
    tl.store(positions + begin + r, position, mask=used)


def constants(layout: GroupLayout) -> dict[str, int]:
    """Return the kernels' compile-time sizes."""
    block_d = triton.next_power_of_2(layout.head_dim)
    return {
        "BITS": layout.bits,
        "DIM": layout.head_dim,
        "BLOCK_D": block_d,
        "RUN": block_d if layout.value_runs == 1 else layout.value_run,
        "RUNS": layout.value_runs,
        "BLOCK_ROWS": ROWS,
        "KEY_BYTES": layout.key_bytes,
        "VALUE_BYTES": layout.value_bytes,
        "AFFINE_AT": layout.affine_at,
        "POSITIONS_AT": layout.positions_at,
    }


def num_warps(head_dim: int) -> int:
    """Return the warps of a program: an element or two of a row per thread."""
    return 4 if head_dim <= 128 else 8


def quantize(
    keys: Tensor, values: Tensor, positions: Tensor, starts: Tensor, fills: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """Return (key bytes uint8 [N, …], value bytes uint8 [N, …]); see `ops`."""
    layout, count = GroupLayout(bits, keys.shape[1]), starts.shape[0]
    key_groups = keys.new_empty((count, layout.key_bytes), dtype=torch.uint8)
    value_groups = keys.new_empty((count, layout.value_bytes), dtype=torch.uint8)
    if count:
        quantize_kernel[(count,)](
            *(x.contiguous() for x in (keys, values, positions, starts, fills)),
            *_views(key_groups, value_groups),
            **constants(layout),
            num_warps=num_warps(layout.head_dim),
        )
    return key_groups, value_groups


def dequantize(
    key_groups: Tensor, value_groups: Tensor, fills: Tensor, layout: GroupLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (keys fp32 [Σ fills, D], values like keys, positions int32); see `ops`.

    How many entries there are only the GPU knows: this waits for it.
    """
    ends = fills.cumsum(0, dtype=torch.int64)
    total = int(ends[-1]) if ends.numel() else 0
    keys = key_groups.new_empty((total, layout.head_dim), dtype=torch.float32)
    values, positions = torch.empty_like(keys), fills.new_empty(total, dtype=torch.int32)
    if total:
        dequantize_kernel[(fills.shape[0],)](
            *_views(key_groups.contiguous(), value_groups.contiguous()),
            ends,
            fills.contiguous(),
            keys,
            values,
            positions,
            **constants(layout),
            num_warps=num_warps(layout.head_dim),
        )
    return keys, values, positions


def _views(key_groups: Tensor, value_groups: Tensor) -> tuple[Any, ...]:
    """The groups as bytes, as fp16 and, values only, as int32."""
    halves = key_groups.view(torch.float16), value_groups.view(torch.float16)
    return key_groups, halves[0], value_groups, halves[1], value_groups.view(torch.int32)
