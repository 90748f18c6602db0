"""Plain torch truth of quantized KV: any device, fp32 arithmetic. Layout: `group_layout`."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from criticalkv.kernels import reference
from criticalkv.kernels.group_layout import ROWS, GroupLayout


def quantize(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    starts: Tensor,
    fills: Tensor,
    bits: int,
) -> tuple[Tensor, Tensor]:
    """Return (key bytes uint8 [N, …], value bytes uint8 [N, …]); see `ops.quantize`."""
    layout = GroupLayout(bits, keys.shape[1])
    rows, used = _rows_of(starts, fills)
    grouped_keys = keys[rows].float()
    grouped_values = values[rows].float()
    key_scale, key_zero = _affine(grouped_keys, used[..., None], 1, layout.levels)
    key_codes = _codes(grouped_keys, key_scale[:, None], key_zero[:, None], layout.levels)
    runs = _runs(grouped_values, layout)
    value_scale, value_zero = _affine(runs, _in_run(layout, keys.device), 3, layout.levels)
    value_codes = _codes(runs, value_scale[..., None], value_zero[..., None], layout.levels)
    value_codes = value_codes.flatten(2)[..., : layout.head_dim]
    value_affine = torch.stack([value_scale, value_zero], -1)
    value_affine[~used] = 0
    return (
        torch.cat(
            [
                _packed(key_codes.masked_fill_(~used[..., None], 0), bits).flatten(1),
                _bytes(torch.stack([key_scale, key_zero], 1)),
            ],
            1,
        ),
        torch.cat(
            [
                _packed(value_codes.masked_fill_(~used[..., None], 0), bits).flatten(1),
                _bytes(value_affine),
                _bytes(positions[rows].to(torch.int32).masked_fill_(~used, 0)),
            ],
            1,
        ),
    )


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
            probs = (logits - total[..., None]).exp().nan_to_num_(0)
            out[rows, first:last] = probs @ values
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
    """Return row indexes int64 [N, 32], beyond the fill the first again, and which count."""
    row = torch.arange(ROWS, device=starts.device)
    used = row < fills[:, None]
    return starts[:, None] + torch.where(used, row, 0), used


def _runs(values: Tensor, layout: GroupLayout) -> Tensor:
    """[N, 32, D] as [N, 32, V, run], the last run padded."""
    missing = layout.value_runs * layout.value_run - layout.head_dim
    padded = torch.nn.functional.pad(values, (0, missing))
    return padded.view(*values.shape[:2], layout.value_runs, layout.value_run)


def _in_run(layout: GroupLayout, device: torch.device) -> Tensor:
    """bool [1, 1, V, run]: which places of the runs are channels."""
    place = torch.arange(layout.value_runs * layout.value_run, device=device)
    return (place < layout.head_dim).view(1, 1, layout.value_runs, layout.value_run)


def _affine(x: Tensor, used: Tensor, dim: int, levels: int) -> tuple[Tensor, Tensor]:
    """Return fp16 (scale, zero) over `dim`: zero ≤ min and zero + levels · scale ≥ max.

    Rounded outwards, so that no element is clipped: a channel far from 0 would otherwise
    lose its extremes.
    """
    low = x.masked_fill(~used, torch.inf).amin(dim)
    high = x.masked_fill(~used, -torch.inf).amax(dim)
    zero = _half_down(low)
    scale = -_half_down(-(high - zero.float()) / levels)
    return scale, zero


def _codes(x: Tensor, scale: Tensor, zero: Tensor, levels: int) -> Tensor:
    steps = (x - zero.float()) / scale.float()
    steps = torch.where(scale == 0, torch.zeros_like(steps), steps)
    return (steps + 0.5).floor().clamp_(0, levels).to(torch.uint8)


def _half_down(x: Tensor) -> Tensor:
    """The largest fp16 ≤ x."""
    half = x.half()
    bits = half.view(torch.int16)
    lower = torch.where(half > 0, bits - 1, bits + 1).to(torch.int16)
    lower = torch.where(half == 0, torch.full_like(lower, -0x7FFF), lower)  # −2^-24
    return torch.where(half.float() > x, lower.view(torch.float16), half)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [N, 32, D] codes as [N, 32, D·bits/8] bytes."""
    if bits == 8:
        return codes
    low, high = codes.chunk(2, -1)
    return low | (high << 4)


def _unpacked(packed: Tensor, layout: GroupLayout) -> Tensor:
    """uint8 [N, 32·D·bits/8] as fp32 [N, 32, D]."""
    rows = packed.reshape(-1, ROWS, layout.code_bytes)
    if layout.bits == 4:
        rows = torch.cat([rows & 15, rows >> 4], -1)
    return rows.float()


def _bytes(x: Tensor) -> Tensor:
    return x.flatten(1).contiguous().view(torch.uint8)


def _halves(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.float16)
