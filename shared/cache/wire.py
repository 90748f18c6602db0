"""Layers to segments and back: the payload bytes of a node.

A layer's entries are laid out tier-major (what tier 0 keeps, head by head; then
what tier 1 adds; …) and cut into segments that never mix two tiers. A segment
holds keys [rows, head_dim], values [rows, head_dim] and int32 positions [rows],
back to back, in the machine's little-endian order. Quantized segments: `group_wire`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from criticalkv.shared.cache.codec import layout_of
from criticalkv.shared.cache.group_wire import GroupParts, pack_groups
from criticalkv.shared.cache.manifest import (
    MAX_SEGMENT_BYTES,
    Manifest,
    Segment,
    verify_segment,
)
from criticalkv.shared.cache.quantized import QuantizedLayer, quantize_layer
from criticalkv.shared.cache.ragged import RaggedCache, RaggedLayer, cu_seqlens_of
from criticalkv.shared.errors import CorruptNodeError
from criticalkv.shared.identity import CODEC_RAW

TORCH_DTYPE = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def pack_layer(
    layer_index: int, layer: RaggedLayer, tier_lens: Tensor, codec: str = CODEC_RAW
) -> Iterator[tuple[Segment, bytearray]]:
    """Yield the segments of one layer with their payloads, tier by tier.

    Args:
        layer_index: decoder layer.
        layer: entries in rank order, holding the highest tier; for a quantized codec
            finite and of |x| ≤ 65504.
        tier_lens: int64 [tiers, kv_heads], ascending along tiers; the last row
            equals the layer's head lengths.
        codec: raw, int8 or int4.

    Raises:
        ValueError: if the codec is unknown, or cannot hold the layer's head_dim.
    """
    layout = layout_of(codec, layer.keys.shape[1])
    if layout is None:
        yield from _pack_raw(layer_index, layer, tier_lens)
    else:
        groups = quantize_layer(layer, tier_lens, layout)
        yield from pack_groups(layer_index, groups, tier_lens)


def _pack_raw(
    layer_index: int, layer: RaggedLayer, tier_lens: Tensor
) -> Iterator[tuple[Segment, bytearray]]:
    layer = _to_cpu(layer)
    lens = tier_lens.to("cpu", torch.int64)
    entry = 2 * layer.keys.shape[1] * layer.keys.element_size() + 4
    limit = max(1, MAX_SEGMENT_BYTES // entry)
    for tier in range(lens.shape[0]):
        rows = tier_rows(layer.cu_seqlens, lens, tier)
        for piece in rows.split(limit) if rows.numel() else ():
            payload = _payload(layer, piece)
            segment = Segment(
                layer=layer_index,
                tier=tier,
                rows=piece.numel(),
                checksum=xxhash.xxh3_64_intdigest(payload),
            )
            yield segment, payload


def tier_rows(cu_seqlens: Tensor, tier_lens: Tensor, tier: int) -> Tensor:
    """Return the row indexes, int64, of what `tier` adds, head by head."""
    runs = [torch.arange(a, b) for a, b in tier_runs(cu_seqlens, tier_lens, tier)]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)


def tier_runs(cu_seqlens: Tensor, tier_lens: Tensor, tier: int) -> list[tuple[int, int]]:
    """Return the [begin, end) rows of what `tier` adds, head by head, none empty."""
    begin = cu_seqlens[:-1].tolist()
    low = tier_lens[tier - 1].tolist() if tier else [0] * len(begin)
    rows = zip(begin, low, tier_lens[tier].tolist(), strict=True)
    return [(b + lo, b + hi) for b, lo, hi in rows if hi > lo]


class LayerAssembler:
    """Puts the segments of one layer of a read back into rank order.

    Allocates once, from a manifest that has been checked; refuses any segment whose
    length or checksum differs from it.
    """

    def __init__(self, manifest: Manifest, layer: int, tier: str) -> None:
        self._manifest = manifest
        self._tier = manifest.tier_index(tier)
        self._layer = layer
        self._dtype = TORCH_DTYPE[manifest.identity.dtype]
        lens = manifest.lens[: self._tier + 1, layer]
        end = manifest.next_position
        positions = range(end - manifest.num_tokens, end)
        self._parts: _RowParts | GroupParts = (
            GroupParts(manifest.layout, lens, positions)
            if manifest.layout
            else _RowParts(manifest, torch.from_numpy(lens), positions)
        )
        self._missing = int(lens[-1].sum())

    def add(self, index: int, payload: bytearray | memoryview | bytes) -> None:
        """Place the payload of segment `index`.

        Raises:
            CorruptNodeError: if it is not a segment of this layer and tier, its length or
                checksum is wrong, or a quantized one's content is impossible.
        """
        if not 0 <= index < len(self._manifest.segments):
            raise CorruptNodeError(f"segment {index} does not exist")
        segment = self._manifest.segments[index]
        if segment.layer != self._layer or segment.tier > self._tier:
            raise CorruptNodeError(f"segment {index} does not belong to this read")
        verify_segment(self._manifest, index, payload)
        self._parts.place(index, segment, payload)
        self._missing -= segment.rows

    def finish(self) -> RaggedLayer:
        """Return the layer, in the node's dtype.

        Raises:
            CorruptNodeError: if segments are missing or positions are impossible.
        """
        self._check_complete()
        layer = self._parts.finish()
        return layer if isinstance(layer, RaggedLayer) else layer.ragged(self._dtype)

    def finish_groups(self) -> QuantizedLayer:
        """Return the layer of a quantized node as it is stored.

        Raises:
            CorruptNodeError: if segments are missing.
            TypeError: if the node is not quantized.
        """
        self._check_complete()
        layer = self._parts.finish()
        if isinstance(layer, RaggedLayer):
            raise TypeError("a raw node has no groups")
        return layer

    def _check_complete(self) -> None:
        if self._missing:
            raise CorruptNodeError(f"layer {self._layer}: {self._missing} entries are missing")


class _RowParts:
    """Puts raw segments back into rank order."""

    def __init__(self, manifest: Manifest, lens: Tensor, positions: range) -> None:
        self._manifest = manifest
        self._positions = positions
        top = lens[-1].tolist()
        dtype = TORCH_DTYPE[manifest.identity.dtype]
        rows, dim = sum(top), manifest.head_dim
        self._out = RaggedLayer(
            torch.empty(rows, dim, dtype=dtype),
            torch.empty(rows, dim, dtype=dtype),
            torch.empty(rows, dtype=torch.int32),
            cu_seqlens_of(top),
        )
        arrays = (self._out.keys, self._out.values, self._out.positions)
        self._rows = [_bytes_of(array) for array in arrays]
        # Per tier, the rows of the output that it fills next: one run per head.
        self._runs = [deque(tier_runs(self._out.cu_seqlens, lens, t)) for t in range(lens.shape[0])]

    def place(self, index: int, segment: Segment, payload: bytearray | memoryview | bytes) -> None:
        """Place a segment's payload, whose length is right.

        Raises:
            CorruptNodeError: if there is no room left for it.
        """
        pieces = _parse(payload, segment.rows, self._manifest)
        runs = self._runs[segment.tier]
        done = 0
        while done < segment.rows:
            if not runs:
                raise CorruptNodeError(f"segment {index} is there twice")
            begin, end = runs[0]
            count = min(end - begin, segment.rows - done)
            for target, piece in zip(self._rows, pieces, strict=True):
                target[begin : begin + count] = piece[done : done + count]
            done += count
            runs[0] = (begin + count, end)
            if begin + count == end:
                runs.popleft()

    def finish(self) -> RaggedLayer:
        """Return the layer; the caller knows that it is complete.

        Raises:
            CorruptNodeError: if a position is outside the node.
        """
        found, allowed = self._out.positions, self._positions
        if found.numel() and not (
            allowed.start <= int(found.min()) <= int(found.max()) < allowed.stop
        ):
            raise CorruptNodeError("a position is outside the node")
        return self._out


def assemble(
    manifest: Manifest, tier: str, segments: Iterable[tuple[int, bytearray | memoryview | bytes]]
) -> RaggedCache:
    """Build a whole node from the segments of a read, in any order.

    Raises:
        CorruptNodeError: as LayerAssembler does.
    """
    assemblers = [LayerAssembler(manifest, layer, tier) for layer in range(manifest.num_layers)]
    for index, payload in segments:
        if not 0 <= index < len(manifest.segments):
            raise CorruptNodeError(f"segment {index} does not exist")
        assemblers[manifest.segments[index].layer].add(index, payload)
    return cache_of(manifest, tier, [a.finish() for a in assemblers])


def cache_of(manifest: Manifest, tier: str, layers: Sequence[RaggedLayer]) -> RaggedCache:
    """Wrap the layers of a read at `tier` with the manifest's table."""
    top = manifest.tier_index(tier) + 1
    return RaggedCache(
        tuple(layers),
        manifest.num_tokens,
        manifest.next_position,
        manifest.tiers[:top],
        torch.from_numpy(manifest.lens[:top].copy()),
    )


def _to_cpu(layer: RaggedLayer) -> RaggedLayer:
    return RaggedLayer(
        layer.keys.detach().cpu(),
        layer.values.detach().cpu(),
        layer.positions.cpu(),
        layer.cu_seqlens.cpu(),
    )


def _payload(layer: RaggedLayer, rows: Tensor) -> bytearray:
    # One gather per array, straight into the buffer that will be sent.
    n, dim = rows.numel(), layer.keys.shape[1]
    size = n * dim * layer.keys.element_size()
    out = bytearray(2 * size + 4 * n)
    dtype = layer.keys.dtype
    key_view = torch.frombuffer(out, dtype=dtype, count=n * dim).view(n, dim)
    value_view = torch.frombuffer(out, dtype=dtype, count=n * dim, offset=size).view(n, dim)
    position_view = torch.frombuffer(out, dtype=torch.int32, count=n, offset=2 * size)
    torch.index_select(layer.keys, 0, rows, out=key_view)
    torch.index_select(layer.values, 0, rows, out=value_view)
    torch.index_select(layer.positions, 0, rows, out=position_view)
    return out


def _bytes_of(rows: Tensor) -> NDArray[np.uint8]:
    """A CPU tensor's own memory, uint8 [rows, bytes of a row]."""
    width = rows.element_size() * (rows.shape[1] if rows.dim() == 2 else 1)
    out: NDArray[np.uint8] = rows.view(torch.uint8).view(rows.shape[0], width).numpy()
    return out


def _parse(
    payload: bytearray | memoryview | bytes, rows: int, manifest: Manifest
) -> list[NDArray[np.uint8]]:
    """View keys, values and positions of a payload as bytes, uint8 [rows, bytes of a row].

    Bytes, because numpy has no bfloat16, and torch none that it may not write to, as
    payloads from gRPC are.
    """
    size = manifest.head_dim * TORCH_DTYPE[manifest.identity.dtype].itemsize
    offset, out = 0, []
    for width in (size, size, 4):
        view = np.frombuffer(payload, np.uint8, count=rows * width, offset=offset)
        out.append(view.reshape(rows, width))
        offset += rows * width
    return out
