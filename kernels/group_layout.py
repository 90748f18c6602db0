"""The bytes of quantized KV: groups of up to 32 entries of one (head, tier).

Keys share a scale and a zero per channel, over the entries of a group; values per entry,
over a run of channels (KIVI, arXiv 2402.02750, §3.2). An element is zero + scale · code,
computed in fp32. No torch here: the store reads sizes without it.

A group as kernels and the decode pool hold it, little-endian, rows beyond its fill 0:

    key bytes:    codes [32, D·bits/8] | scale fp16 [D] | zero fp16 [D]
    value bytes:  codes [32, D·bits/8] | scale, zero fp16 [32, V, 2] | positions int32 [32]

With 4 bits, byte j of a row holds channel j in its low half and channel j + D/2 in its
high half.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 32
"""Most entries of a group."""
VALUE_RUN = {8: 1 << 30, 4: 32}
"""Most channels of a value that share a scale, by bits: all, or so many."""
MAX_MAGNITUDE = 65504.0
"""Largest finite fp16: what scales and zeros can hold."""


@dataclass(frozen=True)
class GroupLayout:
    """Sizes and offsets, in bytes, of the groups of one codec and head_dim.

    Args:
        bits: of a code, 8 or 4.
        head_dim: D; even.
    """

    bits: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.bits not in VALUE_RUN:
            raise ValueError(f"codes have 8 or 4 bits, not {self.bits}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def code_bytes(self) -> int:
        """Codes of one key or value."""
        return self.head_dim * self.bits // 8

    @property
    def value_run(self) -> int:
        """Channels of a value that share a scale; the last run may be shorter."""
        return min(self.head_dim, VALUE_RUN[self.bits])

    @property
    def value_runs(self) -> int:
        """V: runs of channels of a value."""
        return -(-self.head_dim // self.value_run)

    @property
    def affine_at(self) -> int:
        """Where scales and zeros begin, in key and value bytes alike."""
        return ROWS * self.code_bytes

    @property
    def positions_at(self) -> int:
        """Where positions begin, in value bytes."""
        return self.affine_at + ROWS * self.value_runs * 4

    @property
    def key_bytes(self) -> int:
        """Key bytes of a group."""
        return self.affine_at + 4 * self.head_dim

    @property
    def value_bytes(self) -> int:
        """Value bytes of a group."""
        return self.positions_at + 4 * ROWS

    @property
    def wire_row_bytes(self) -> int:
        """Stored bytes of one entry, without its share of the group's."""
        return 2 * self.code_bytes + 4 * self.value_runs + 4

    @property
    def wire_group_bytes(self) -> int:
        """Stored bytes of one group, without its entries'."""
        return 4 * self.head_dim
