"""Quantized layers to segments and back: the payload bytes of a quantized node.

A segment holds whole groups of one (layer, tier), head by head, in rank order, and no
empty rows. Its payload, for g groups and r entries, back to back, little-endian:

    keys:      scale, zero fp16 [g, 2, D] | codes [r, D·bits/8]
    values:    scale, zero fp16 [r, V, 2] | codes [r, D·bits/8]
    positions: int32 [r]
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from criticalkv.kernels.group_layout import ROWS, GroupLayout
from criticalkv.shared.cache.group_table import GroupTable, Ints
from criticalkv.shared.cache.manifest import MAX_SEGMENT_BYTES, Segment
from criticalkv.shared.cache.quantized import QuantizedLayer
from criticalkv.shared.errors import CorruptNodeError

Bytes = npt.NDArray[np.uint8]
MAGNITUDE, INFINITY, MINUS_ZERO = 0x7FFF, 0x7C00, 0x8000
"""Bits of fp16: all but the sign; infinity, above which is NaN; −0."""


def pack_groups(
    layer_index: int, layer: QuantizedLayer, tier_lens: Tensor
) -> Iterator[tuple[Segment, bytearray]]:
    """Yield the segments of one quantized layer with their payloads, tier by tier.

    Args:
        layer_index: decoder layer.
        layer: all of its groups.
        tier_lens: int64 [tiers, num_kv_heads], that the layer was quantized with.
    """
    layer = layer.to(torch.device("cpu"))
    table = GroupTable.of(tier_lens.to("cpu", torch.int64).numpy())
    areas = _Areas(layer.layout, layer.key_groups.numpy(), layer.value_groups.numpy())
    for tier in range(tier_lens.shape[0]):
        for piece in _pieces(table.of_tier(tier), table.fills, layer.layout):
            fills = table.fills[piece]
            payload = areas.payload(piece, fills)
            segment = Segment(
                layer=layer_index,
                tier=tier,
                rows=int(fills.sum()),
                checksum=xxhash.xxh3_64_intdigest(payload),
                groups=piece.size,
            )
            yield segment, payload


class GroupParts:
    """Puts the segments of one layer of a read back into groups.

    Args:
        layout: of the node's groups.
        lens: int64 [tiers, num_kv_heads], of the tiers that are read.
        positions: that the node's entries may have.
    """

    def __init__(self, layout: GroupLayout, lens: Ints, positions: range) -> None:
        self._table = GroupTable.of(lens)
        self._layout = layout
        self._positions = positions
        n = self._table.fills.size
        self._keys = np.zeros((n, layout.key_bytes), np.uint8)
        self._values = np.zeros((n, layout.value_bytes), np.uint8)
        self._areas = _Areas(layout, self._keys, self._values)
        self._left = [self._table.of_tier(tier) for tier in range(lens.shape[0])]

    def place(self, index: int, segment: Segment, payload: bytearray | memoryview | bytes) -> None:
        """Place a segment's payload, whose length is right.

        Raises:
            CorruptNodeError: if its groups are not those that come next, or a scale, a zero
                or a position is impossible.
        """
        left = self._left[segment.tier]
        piece, self._left[segment.tier] = left[: segment.groups], left[segment.groups :]
        fills = self._table.fills[piece]
        if piece.size != segment.groups or fills.sum() != segment.rows:
            raise CorruptNodeError(f"segment {index} does not hold the groups that come next")
        views = _views(payload, piece.size, segment.rows, self._layout)
        _check_affine(index, views, self._layout)
        self._check_positions(index, views[-1])
        self._areas.fill(piece, fills, views)

    def finish(self) -> QuantizedLayer:
        """Return the layer; the caller knows that it is complete."""
        return QuantizedLayer(
            torch.from_numpy(self._keys),
            torch.from_numpy(self._values),
            torch.from_numpy(self._table.fills).to(torch.int32),
            torch.from_numpy(self._table.head_cu).to(torch.int32),
            self._layout,
        )

    def _check_positions(self, index: int, view: Bytes) -> None:
        positions = view.view("<i4")
        if positions.min() < self._positions.start or positions.max() >= self._positions.stop:
            raise CorruptNodeError(f"segment {index}: a position is outside the node")


class _Areas:
    """Parts of groups in memory, as views in the order of a payload.

    Attributes:
        key_affine: uint8 [N, 4·D].
        rows: uint8 [N, 32, bytes]: key codes, value scales and zeros, value codes, positions.
    """

    def __init__(self, layout: GroupLayout, keys: Bytes, values: Bytes) -> None:
        at, end = layout.affine_at, layout.positions_at
        parts = (keys[:, :at], values[:, at:end], values[:, :at], values[:, end:])
        self.key_affine = keys[:, at:]
        self.rows = [part.reshape(len(part), ROWS, part.shape[1] // ROWS) for part in parts]
        self._layout = layout

    def payload(self, piece: Ints, fills: Ints) -> bytearray:
        """Copy groups into the buffer that will be sent."""
        rows, layout = int(fills.sum()), self._layout
        out = bytearray(piece.size * layout.wire_group_bytes + rows * layout.wire_row_bytes)
        affine, *views = _views(out, piece.size, rows, layout)
        affine[:] = self.key_affine[piece]
        used = _used(fills)
        for area, view in zip(self.rows, views, strict=True):
            view[:] = area[piece][used]
        return out

    def fill(self, piece: Ints, fills: Ints, views: list[Bytes]) -> None:
        """Copy a payload's parts into groups; what lies beyond a group's fill stays."""
        affine, *rows = views
        self.key_affine[piece] = affine
        group, place = np.nonzero(_used(fills))
        for area, view in zip(self.rows, rows, strict=True):
            area[piece[group], place] = view


def _views(
    payload: bytearray | memoryview | bytes, groups: int, rows: int, layout: GroupLayout
) -> list[Bytes]:
    """View a payload's five parts as bytes, uint8 [groups or rows, bytes of each]."""
    code, affine = layout.code_bytes, 4 * layout.value_runs
    out, offset = [], 0
    for count, width in (
        (groups, layout.wire_group_bytes),
        (rows, code),
        (rows, affine),
        (rows, code),
        (rows, 4),
    ):
        view = np.frombuffer(payload, np.uint8, count=count * width, offset=offset)
        out.append(view.reshape(count, width))
        offset += count * width
    return out


def _check_affine(index: int, views: list[Bytes], layout: GroupLayout) -> None:
    """Refuse scales and zeros that no quantizer writes, whatever the checksum says.

    Raises:
        CorruptNodeError: if one is not finite, or a scale is negative.
    """
    keys = views[0].view("<u2").reshape(-1, 2, layout.head_dim)
    values = views[2].view("<u2").reshape(-1, layout.value_runs, 2)
    for affine in (keys.swapaxes(0, 1), np.moveaxis(values, -1, 0)):  # scales, zeros
        # Above the bits of −0 lie the negative numbers.
        if (affine & MAGNITUDE).max() >= INFINITY or affine[0].max() > MINUS_ZERO:
            raise CorruptNodeError(f"segment {index} has an impossible scale or zero")


def _used(fills: Ints) -> npt.NDArray[np.bool_]:
    """Which rows of groups are in use, bool [groups, 32]."""
    return np.arange(ROWS) < fills[:, None]


def _pieces(groups: Ints, fills: Ints, layout: GroupLayout) -> Iterator[Ints]:
    """Cut a tier's groups into segments of at most 1 MiB."""
    sizes = fills[groups] * layout.wire_row_bytes + layout.wire_group_bytes
    ends, begin = sizes.cumsum(), 0
    while begin < groups.size:
        limit = MAX_SEGMENT_BYTES + (ends[begin - 1] if begin else 0)
        end = int(np.searchsorted(ends, limit, side="right"))
        yield groups[begin:end]
        begin = end
