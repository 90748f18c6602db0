"""A layer on the wire: cut into pieces that every message has room for."""

from __future__ import annotations

import torch

from criticalkv.shared.cache.manifest import MAX_SEGMENT_BYTES
from criticalkv.shared.cache.ragged import RaggedLayer, cu_seqlens_of
from criticalkv.shared.cache.wire import pack_layer

DIM, HEADS = 64, 2


def test_a_layer_larger_than_any_message_is_cut_between_entries() -> None:
    """10 MiB in two tiers: full pieces, one smaller at each tier's end, all entries in order."""
    low, high = 3000, 10_000
    rows = HEADS * high
    numbers = torch.arange(rows, dtype=torch.int32)
    keys = numbers.to(torch.float32)[:, None].expand(rows, DIM).contiguous()
    layer = RaggedLayer(keys, -keys, numbers, cu_seqlens_of([high] * HEADS))
    lens = torch.tensor([[low] * HEADS, [high] * HEADS])
    packed = list(pack_layer(0, layer, lens))
    entry = 2 * DIM * 4 + 4
    assert sum(segment.rows for segment, _ in packed) == rows
    for segment, payload in packed:
        assert len(payload) == segment.rows * entry <= MAX_SEGMENT_BYTES
    for tier in (0, 1):
        *full, _ = [len(payload) for segment, payload in packed if segment.tier == tier]
        assert all(MAX_SEGMENT_BYTES - entry < nbytes for nbytes in full)
    positions = [
        torch.frombuffer(payload[-4 * segment.rows :], dtype=torch.int32)
        for segment, payload in packed
    ]
    head = numbers.view(HEADS, high)
    expected = torch.cat([head[:, :low].flatten(), head[:, low:].flatten()])
    assert torch.equal(torch.cat(positions), expected)
