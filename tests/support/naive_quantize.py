"""Quantized groups by loops over elements: what the documented layout says, and nothing else.

On the tests' path.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ROWS = 32


@dataclass(frozen=True)
class Group:
    """The parts of one group, as they were written."""

    key_codes: npt.NDArray[np.int64]  # [32, D]
    key_scale: npt.NDArray[np.float16]  # [D]
    key_zero: npt.NDArray[np.float16]  # [D]
    value_codes: npt.NDArray[np.int64]  # [32, D]
    value_scale: npt.NDArray[np.float16]  # [32, V]
    value_zero: npt.NDArray[np.float16]  # [32, V]
    positions: npt.NDArray[np.int32]  # [32]

    @property
    def wide_value_affine(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """(scale, zero) of each element of the values, fp64 [32, D]."""
        dim = self.value_codes.shape[1]
        run = dim if self.value_scale.shape[1] == 1 else 32
        of = np.arange(dim) // run
        return self.value_scale[:, of].astype(float), self.value_zero[:, of].astype(float)


def group_bytes(
    keys: Tensor, values: Tensor, positions: Sequence[int], bits: int
) -> tuple[bytes, bytes]:
    """Quantize at most 32 entries, [r, D] each, an element at a time, in fp32."""
    r, dim = keys.shape
    k, v = keys.float().numpy(), values.float().numpy()
    affine = [_affine(k[:, d], bits) for d in range(dim)]
    codes = [[_code(k[i, d], *affine[d], bits) for d in range(dim)] for i in range(r)]
    key = _packed(codes, dim, bits)
    key += b"".join(struct.pack("<e", scale) for scale, _ in affine)
    key += b"".join(struct.pack("<e", zero) for _, zero in affine)

    run = dim if bits == 8 else min(dim, 32)
    firsts = range(0, dim, run)
    rows = [[_affine(v[i, d : d + run], bits) for d in firsts] for i in range(r)]
    codes = [[_code(v[i, d], *rows[i][d // run], bits) for d in range(dim)] for i in range(r)]
    value = _packed(codes, dim, bits)
    for i in range(ROWS):
        for j in range(len(firsts)):
            value += struct.pack("<ee", *(rows[i][j] if i < r else (0.0, 0.0)))
    value += struct.pack(f"<{ROWS}i", *positions, *[0] * (ROWS - r))
    return key, value


def parse(key: Tensor, value: Tensor, bits: int, dim: int) -> Group:
    """Read a group's bytes."""
    size = dim * bits // 8
    k, v = key.numpy(), value.numpy()
    affine = k[ROWS * size :].copy().view(np.float16)
    runs = -(-dim // (dim if bits == 8 else min(dim, 32)))
    values_end = ROWS * size + ROWS * runs * 4
    value_affine = v[ROWS * size : values_end].copy().view(np.float16).reshape(ROWS, runs, 2)
    return Group(
        _codes(k[: ROWS * size], bits),
        affine[:dim],
        affine[dim:],
        _codes(v[: ROWS * size], bits),
        value_affine[..., 0],
        value_affine[..., 1],
        v[values_end:].copy().view(np.int32),
    )


def random_entries(
    n: int, dim: int, *, seed: int, spread: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(keys, values fp32 [n, D] within fp16's range, positions int32 [n]); some tie, some are 0."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, n, dim, generator=generator) * spread + offset
    kv[torch.rand(kv.shape, generator=generator) < 0.1] = 0.0
    kv[torch.rand(kv.shape, generator=generator) < 0.05] *= -0.0
    kv[:, :, 0] = offset  # a constant channel
    kv = kv.clamp(-65504, 65504)
    return kv[0], kv[1], torch.randperm(1 << 16, generator=generator)[:n].to(torch.int32)


def _affine(x: npt.NDArray[np.float32], bits: int) -> tuple[np.float16, np.float16]:
    low, high = np.float32(min(x)), np.float32(max(x))
    zero = _down(low)
    steps = (high - np.float32(zero)) / np.float32((1 << bits) - 1)
    return np.float16(abs(_down(-steps))), zero


def _down(x: np.float32) -> np.float16:
    """The largest fp16 ≤ x, 0 without a sign."""
    half = np.float16(x)
    if np.float32(half) > x:
        half = np.nextafter(half, np.float16(-np.inf))
    return half if half else np.float16(0.0)


def _code(x: np.float32, scale: np.float16, zero: np.float16, bits: int) -> int:
    if not scale:
        return 0
    steps = (x - np.float32(zero)) / np.float32(scale)
    return int(min(max(np.floor(steps + np.float32(0.5)), 0), (1 << bits) - 1))


def _packed(codes: list[list[int]], dim: int, bits: int) -> bytes:
    rows = codes + [[0] * dim] * (ROWS - len(codes))
    if bits == 8:
        return b"".join(bytes(row) for row in rows)
    half = dim // 2
    return b"".join(bytes(row[j] + 16 * row[j + half] for j in range(half)) for row in rows)


def _codes(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int64]:
    rows = packed.reshape(ROWS, -1).astype(np.int64)
    return rows if bits == 8 else np.concatenate([rows % 16, rows // 16], 1)
