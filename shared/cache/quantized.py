"""Quantized KV of one layer in memory, in groups as kernels hold them (`group_layout`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.kernels.group_layout import MAX_MAGNITUDE, GroupLayout
from criticalkv.shared.cache.group_table import GroupTable
from criticalkv.shared.cache.ragged import RaggedLayer

PIECE = 1024
"""Groups that are expanded at once: bounds the fp32 copies."""


@dataclass(frozen=True)
class QuantizedLayer:
    """Quantized entries of one layer, head after head, best groups of each head first.

    A head's groups are those of its tiers, ascending: a smaller tier is a prefix of them.

    Attributes:
        key_groups: uint8 [N, layout.key_bytes].
        value_groups: uint8 [N, layout.value_bytes]; they hold the positions, too.
        fills: int32 [N], entries of each group.
        group_cu: int32 [num_kv_heads + 1], cumulative groups per head from 0, on the CPU.
        layout: of the groups.
    """

    key_groups: Tensor
    value_groups: Tensor
    fills: Tensor
    group_cu: Tensor
    layout: GroupLayout

    @property
    def lens(self) -> Tensor:
        """Entries per head, int64 [num_kv_heads], on the CPU."""
        return self._cu_seqlens().to(torch.int64).diff()

    def prefix(self, groups: Sequence[int]) -> QuantizedLayer:
        """Return a copy with only the first `groups[h]` groups of each head: what a reader of
        a smaller tier gets."""
        begin = self.group_cu[:-1].tolist()
        runs = [torch.arange(b, b + n) for b, n in zip(begin, groups, strict=True)]
        rows = torch.cat(runs).to(self.fills.device)
        cu = torch.tensor([0, *groups]).cumsum(0).to(torch.int32)
        parts = (self.key_groups[rows], self.value_groups[rows], self.fills[rows])
        return QuantizedLayer(*parts, cu, self.layout)

    def ragged(self, dtype: torch.dtype) -> RaggedLayer:
        """Return the entries in rank order, zero + scale · code, rounded to `dtype`."""
        dim, device = self.layout.head_dim, self.fills.device
        cu_seqlens = self._cu_seqlens()
        rows = int(cu_seqlens[-1])
        keys, values = (torch.empty(rows, dim, dtype=dtype, device=device) for _ in range(2))
        positions = torch.empty(rows, dtype=torch.int32, device=device)
        done = 0
        for piece in _pieces(self.fills.shape[0]):
            parts = (self.key_groups[piece], self.value_groups[piece], self.fills[piece])
            entries = ops.dequantize(*parts, self.layout)
            run = slice(done, done + entries[2].shape[0])
            keys[run], values[run] = (_fitting(x, dtype) for x in entries[:2])
            positions[run] = entries[2]
            done = run.stop
        return RaggedLayer(keys, values, positions, cu_seqlens)

    def to(self, device: torch.device) -> QuantizedLayer:
        """Return the layer on a device."""
        keys, values = self.key_groups.to(device), self.value_groups.to(device)
        fills = self.fills.to(device)
        return QuantizedLayer(keys, values, fills, self.group_cu, self.layout)

    def _cu_seqlens(self) -> Tensor:
        ends = torch.zeros(self.fills.shape[0] + 1, dtype=torch.int32)
        ends[1:] = self.fills.cpu().cumsum(0)
        return ends[self.group_cu.long()]


def quantize_layer(layer: RaggedLayer, tier_lens: Tensor, layout: GroupLayout) -> QuantizedLayer:
    """Quantize a layer on its device.

    Args:
        layer: entries in rank order, holding the highest tier; finite, |x| ≤ 65504.
        tier_lens: int64 [tiers, num_kv_heads], ascending along tiers; the last row
            equals the layer's head lengths.
        layout: of the groups to make.
    """
    table, device = GroupTable.of(tier_lens.to("cpu", torch.int64).numpy()), layer.keys.device
    starts, fills = (torch.from_numpy(x).to(device) for x in (table.starts, table.fills))
    entries = (layer.keys.detach(), layer.values.detach(), layer.positions)
    keys, values = ops.quantize(*entries, starts, fills, layout.bits)
    cu = torch.from_numpy(table.head_cu).to(torch.int32)
    return QuantizedLayer(keys, values, fills.to(torch.int32), cu, layout)


def _pieces(groups: int) -> Iterator[slice]:
    return (slice(at, min(at + PIECE, groups)) for at in range(0, groups, PIECE))


def _fitting(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to `dtype`; scales are rounded outwards, which may pass fp16's range."""
    return (x.clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE) if dtype == torch.float16 else x).to(dtype)
