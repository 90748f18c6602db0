"""Plain torch truth of quantized KV: any device, fp32 arithmetic. Layout: `group_layout`."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from criticalkv.kernels import reference
from criticalkv.kernels.group_layout import ROWS, GroupLayout

BLOCK_ELEMENTS = 1 << 19
"""Elements of keys, and of values, that are quantized at once: 2 MiB in fp32. Smaller blocks
spend their time between operations."""


def quantize(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    starts: Tensor,
    fills: Tensor,
    bits: int,
) -> tuple[Tensor, Tensor]:
    """Return (key bytes uint8 [N, …], value bytes uint8 [N, …]); see `ops.quantize`."""
    layout, count = GroupLayout(bits, keys.shape[1]), starts.shape[0]
    key_groups = keys.new_empty((count, layout.key_bytes), dtype=torch.uint8)
    value_groups = keys.new_empty((count, layout.value_bytes), dtype=torch.uint8)
    step = max(1, BLOCK_ELEMENTS // (ROWS * layout.head_dim))
    for piece in (slice(at, at + step) for at in range(0, count, step)):
        rows, used = _rows_of(starts[piece], fills[piece])
        _write_keys(_gathered(keys, rows), used, key_groups[piece], layout)
        _write_values(_gathered(values, rows), used, value_groups[piece], layout)
        places = value_groups[piece, layout.positions_at :].view(torch.int32)
        torch.mul(positions[rows], used, out=places)
    return key_groups, value_groups


def dequantize(
    key_groups: Tensor, value_groups: Tensor, fills: Tensor, layout: GroupLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (keys fp32 [Σ fills, D], values like keys, positions int32); see `ops.dequantize`."""
    used = torch.arange(ROWS, device=fills.device) < fills[:, None]
    n, dim, at = fills.shape[0], layout.head_dim, layout.affine_at
    affine = _halves(key_groups[:, at:]).view(n, 2, 1, dim).float()
    keys = affine[:, 1] + affine[:, 0] * _unpacked(key_groups[:, :at], layout)
    affine = _halves(value_groups[:, at : layout.positions_at])
    affine = affine.view(n, ROWS, layout.value_runs, 2).float()
    wide = affine.repeat_interleave(layout.value_run, 2)[:, :, :dim]
    values = wide[..., 1] + wide[..., 0] * _unpacked(value_groups[:, :at], layout)
    positions = value_groups[:, layout.positions_at :].contiguous().view(torch.int32)
    return keys[used], values[used], positions[used]


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
    """Return (out fp32 [Hq, T, D], lse fp32 [Hq, T]), expanding one head at a time."""
    heads = tables.shape[1]
    per_page = groups_per_page(key_pages, value_pages, layout)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    group = q.shape[0] // heads
    for s, (first, last) in enumerate(itertools.pairwise(query_cu.tolist())):
        for h in range(heads):
            there = fills[s, h] > 0
            numbers = tables[s, h][there].long()
            if not numbers.numel():
                continue
            keys, values, positions = dequantize(
                _cut(key_pages, numbers, per_page, layout.key_bytes),
                _cut(value_pages, numbers, per_page, layout.value_bytes),
                fills[s, h][there],
                layout,
            )
            rows = slice(h * group, (h + 1) * group)
            logits = q[rows, first:last].float() * scaling @ keys.T
            if window is not None:
                if query_positions is None:
                    raise ValueError("a window needs query_positions")
                oldest = query_positions[first:last] - window
                logits.masked_fill_(positions <= oldest[:, None], -torch.inf)
            total = logits.logsumexp(-1)
            # Nothing visible: any number will do, but −inf − −inf is none.
            base = total.masked_fill(total == -torch.inf, 0.0)
            out[rows, first:last] = (logits - base[..., None]).exp() @ values
            lse[rows, first:last] = total
    return out, lse


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the attention over disjoint entries from that over each part; see `ops.merge`."""
    lse = torch.stack([part[1] for part in parts])
    peak = lse.amax(0).nan_to_num(neginf=0.0)
    weights = (lse - peak).exp()
    total = weights.sum(0).clamp_min(reference.MIN_NORM)
    merged = torch.zeros_like(parts[0][0], dtype=torch.float32)
    for weight, (out, _) in zip(weights, parts, strict=True):
        merged += (weight / total)[..., None] * out.float()
    return merged


def groups_per_page(key_pages: Tensor, value_pages: Tensor, layout: GroupLayout) -> int:
    """Return how many groups a page of the pool holds.

    Raises:
        ValueError: if not even one fits.
    """
    count = min(key_pages.shape[1] // layout.key_bytes, value_pages.shape[1] // layout.value_bytes)
    if count == 0:
        raise ValueError("a page is smaller than a group")
    return count


def _cut(pages: Tensor, numbers: Tensor, per_page: int, size: int) -> Tensor:
    """Copy groups out of pages: uint8 [N, size]."""
    whole = pages[:, : per_page * size].view(-1, per_page, size)
    return whole[numbers // per_page, numbers % per_page]


def _rows_of(starts: Tensor, fills: Tensor) -> tuple[Tensor, Tensor]:
    """Return row indexes int64 [N, 32], beyond the fill the first again, and which count.

    So unused rows change no extreme.
    """
    row = torch.arange(ROWS, device=starts.device)
    used = row < fills[:, None]
    return starts[:, None] + row * used, used


def _gathered(x: Tensor, rows: Tensor) -> Tensor:
    """Copy rows: fp32 [N, 32, D]."""
    return x.detach().index_select(0, rows.flatten()).view(*rows.shape, -1).float()


def _write_keys(x: Tensor, used: Tensor, out: Tensor, layout: GroupLayout) -> None:
    """Quantize fp32 [N, 32, D], which is overwritten, into uint8 [N, key_bytes]."""
    scale, zero = _affine(x.amin(1), x.amax(1), layout.levels)
    out[:, layout.affine_at :].view(torch.float16).copy_(torch.cat([scale, zero], 1))
    _write_codes(_codes(x, scale[:, None], zero[:, None], layout.levels), used, out, layout)


def _write_values(x: Tensor, used: Tensor, out: Tensor, layout: GroupLayout) -> None:
    """Quantize fp32 [N, 32, D], which is overwritten, into uint8 [N, value_bytes]."""
    runs = _runs(x, layout)
    scale, zero = _affine(runs.amin(3), runs.amax(3), layout.levels)
    affine = out[:, layout.affine_at : layout.positions_at].view(torch.float16)
    affine.copy_(torch.stack([scale, zero], -1).masked_fill_(~used[..., None, None], 0).flatten(1))
    codes = _codes(runs, scale[..., None], zero[..., None], layout.levels).flatten(2)
    _write_codes(codes[..., : layout.head_dim], used, out, layout)


def _runs(x: Tensor, layout: GroupLayout) -> Tensor:
    """[N, 32, D] as [N, 32, V, run], the last run filled up with its last channel."""
    missing = layout.value_runs * layout.value_run - layout.head_dim
    if missing:
        x = torch.cat([x, x[..., -1:].expand(-1, -1, missing)], -1)
    return x.view(*x.shape[:2], layout.value_runs, layout.value_run)


def _affine(low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return fp16 (scale, zero): zero ≤ low and zero + levels · scale ≥ high.

    Rounded outwards, so that no element is clipped: a channel far from 0 would otherwise
    lose its extremes.
    """
    zero = _half_down(low)
    # By a tensor: CUDA multiplies by the reciprocal of a number, which may differ.
    steps = (high - zero.float()) / torch.full_like(high, levels)
    return _half_down(-steps).abs(), zero


def _codes(x: Tensor, scale: Tensor, zero: Tensor, levels: int) -> Tensor:
    """Overwrite fp32 x by its nearest codes; where the scale is 0, x is the zero."""
    step = scale.float().masked_fill_(scale == 0, 1.0)
    return x.sub_(zero.float()).div_(step).add_(0.5).floor_().clamp_(0, levels)


def _half_down(x: Tensor) -> Tensor:
    """The largest fp16 ≤ x; 0 has no sign."""
    half = x.half()
    bits = half.view(torch.int16)
    lower = torch.where(half > 0, bits - 1, bits + 1).to(torch.int16)
    lower = torch.where(half == 0, torch.full_like(lower, -0x7FFF), lower)  # −2^-24
    down = torch.where(half.float() > x, lower.view(torch.float16), half)
    return down.masked_fill_(down == 0, 0.0)


def _write_codes(codes: Tensor, used: Tensor, out: Tensor, layout: GroupLayout) -> None:
    """Write fp32 codes [N, 32, D], which are overwritten, as bytes, unused rows as 0."""
    codes *= used[..., None]
    if layout.bits == 4:
        low, high = codes.chunk(2, -1)
        codes = low.add_(high, alpha=16)
    out[:, : layout.affine_at].unflatten(1, (ROWS, layout.code_bytes)).copy_(codes)


def _unpacked(packed: Tensor, layout: GroupLayout) -> Tensor:
    """uint8 [N, 32·D·bits/8] as fp32 [N, 32, D]."""
    rows = packed.reshape(-1, ROWS, layout.code_bytes)
    if layout.bits == 4:
        rows = torch.cat([rows & 15, rows >> 4], -1)
    return rows.float()


def _halves(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.float16)
