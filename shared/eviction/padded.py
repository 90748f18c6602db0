"""Entries of heads of different length as one dense block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.shared.cache.ragged import RaggedLayer, cu_seqlens_of


@dataclass(frozen=True)
class Padded:
    """A ragged layer and the dense tokens after it, padded on the left; 3 heads, 2 tokens:

        . a b c 1 2
        . . . d 1 2
        e f g h 1 2

    So the last columns are the last tokens of every head.

    Attributes:
        keys: [num_kv_heads, n, head_dim], zero where there is none.
        values: like keys.
        positions: int64 [num_kv_heads, n]; of padding −1.
        padding: leading columns without an entry, by head.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    padding: tuple[int, ...]

    @classmethod
    def of(cls, before: RaggedLayer, keys: Tensor, values: Tensor, first_position: int) -> Padded:
        """Put dense tokens [num_kv_heads, T, head_dim] after a layer in position order."""
        lens = before.lens.tolist()
        heads, count, dim = keys.shape
        start = max(lens)
        out_keys = keys.new_zeros(heads, start + count, dim)
        out_values = torch.zeros_like(out_keys)
        positions = torch.full(out_keys.shape[:2], -1, dtype=torch.int64, device=keys.device)
        for h, length in enumerate(lens):
            row = slice(start - length, start)
            out_keys[h, row], out_values[h, row], positions[h, row] = before.head(h)
        out_keys[:, start:], out_values[:, start:] = keys, values
        positions[:, start:] = torch.arange(first_position, first_position + count)
        return cls(out_keys, out_values, positions, tuple(start - length for length in lens))

    @property
    def n(self) -> int:
        """Columns."""
        return self.keys.shape[1]

    @property
    def real(self) -> Tensor:
        """Where the entries are, bool [num_kv_heads, n]."""
        return self.positions >= 0

    def take(self, mask: Tensor) -> RaggedLayer:
        """Return the entries of a mask [num_kv_heads, n], in position order."""
        return RaggedLayer(
            self.keys[mask],
            self.values[mask],
            self.positions[mask].to(torch.int32),
            cu_seqlens_of(mask.sum(-1).tolist()),
        )
