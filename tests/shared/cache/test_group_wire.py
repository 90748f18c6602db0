"""Quantized layers on the wire: what the documented bytes say, at every tier, or one error."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from coded_nodes import TIERS, CodedNode, coded_node, random_layer
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_quantize import group_bytes
from pydantic import ValidationError

from criticalkv.kernels.group_layout import GroupLayout
from criticalkv.shared.cache import quantized
from criticalkv.shared.cache.manifest import (
    MAX_SEGMENT_BYTES,
    Manifest,
    Segment,
    decode_manifest,
    encode_manifest,
)
from criticalkv.shared.cache.quantized import QuantizedLayer, quantize_layer
from criticalkv.shared.cache.ragged import RaggedLayer
from criticalkv.shared.cache.wire import TORCH_DTYPE, LayerAssembler, pack_layer
from criticalkv.shared.errors import CorruptNodeError

CODECS = ("int8", "int4")
BITS = {"int8": 8, "int4": 4}


@st.composite
def tables(draw: Any, most: int = 70, layers: int = 2) -> torch.Tensor:
    """int64 [layers, tiers, heads]: ascending lengths, many of them awkward."""
    tiers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    length = st.sampled_from([0, 0, 1, 31, 32, 33, 64]) | st.integers(0, most)
    added = [draw(length) for _ in range(layers * tiers * heads)]
    shape = (layers, tiers, heads)
    return torch.tensor(added).reshape(shape).cumsum(1).div(tiers, rounding_mode="floor")


def naive_payload(layer: RaggedLayer, table: torch.Tensor, tier: int, bits: int) -> bytes:
    """All of a tier's payload in one, by loops."""
    dim, low = layer.keys.shape[1], table[tier - 1].tolist() if tier else [0] * table.shape[1]
    code, affine = dim * bits // 8, 4 * (1 if bits == 8 else -(-dim // 32))
    parts: list[list[bytes]] = [[] for _ in range(5)]
    for head, (begin, end) in enumerate(zip(low, table[tier].tolist(), strict=True)):
        keys, values, positions = layer.head(head)
        for at in range(begin, end, 32):
            rows = slice(at, min(at + 32, end))
            n = rows.stop - at
            key, value = group_bytes(keys[rows], values[rows], positions[rows].tolist(), bits)
            parts[0].append(key[32 * code :])
            parts[1].append(key[: n * code])
            parts[2].append(value[32 * code : 32 * code + n * affine])
            parts[3].append(value[: n * code])
            parts[4].append(struct.pack(f"<{n}i", *positions[rows].tolist()))
    return b"".join(itertools.chain.from_iterable(parts))


def assembled(node: CodedNode, layer: int, tier: str) -> LayerAssembler:
    assembler = LayerAssembler(node.manifest, layer, tier)
    for index, payload in node.read(tier):
        if node.manifest.segments[index].layer == layer:
            assembler.add(index, payload)
    return assembler


def equal(a: QuantizedLayer, b: QuantizedLayer) -> bool:
    names = ("key_groups", "value_groups", "fills", "group_cu")
    return a.layout == b.layout and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in names
    )


@settings(deadline=None, max_examples=25)
@given(tables(most=40, layers=1), st.sampled_from([2, 6, 34]), st.sampled_from(CODECS))
def test_payloads_are_what_the_documented_layout_says(
    table: torch.Tensor, dim: int, codec: str
) -> None:
    layer = random_layer(table[0, -1].tolist(), dim, "float32", 1)
    for segment, payload in pack_layer(0, layer, table[0], codec):
        assert bytes(payload) == naive_payload(layer, table[0], segment.tier, BITS[codec])


@settings(deadline=None, max_examples=100)
@given(
    tables(),
    st.integers(1, 80).map(lambda half: 2 * half),
    st.sampled_from(CODECS),
    st.sampled_from(list(TORCH_DTYPE)),
)
def test_every_tier_is_a_prefix_and_weighs_what_the_manifest_says(
    table: torch.Tensor, dim: int, codec: str, dtype: str
) -> None:
    node = coded_node(table, dim, codec, dtype)
    manifest, layout = node.manifest, GroupLayout(BITS[codec], dim)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    sent = [len(payload) for payload in node.payloads]
    assert sent == [manifest.segment_bytes(i) for i in range(len(sent))]
    counts = torch.from_numpy(manifest.group_counts.cumsum(0))
    for t, tier in enumerate(manifest.tiers):
        assert sum(len(payload) for _, payload in node.read(tier)) == manifest.tier_bytes()[t]
        assert manifest.added_bytes(t) == sum(sent[i] for i in manifest.segments_of(t))
        for shown in (manifest, manifest.shrunk_to(tier)):
            seen = CodedNode(shown, node.record, node.layers, node.payloads)
            for i, layer in enumerate(node.layers):
                assembler = assembled(seen, i, tier)
                whole = quantize_layer(layer, table[i], layout)
                expected = whole.prefix(counts[t, i].tolist())
                assert equal(assembler.finish_groups(), expected)
                got, kept = assembler.finish(), layer.prefix(table[i, t].tolist())
                assert torch.equal(got.keys, expected.ragged(TORCH_DTYPE[dtype]).keys)
                assert got.values.dtype == TORCH_DTYPE[dtype]
                assert torch.equal(got.positions, kept.positions)
                assert torch.equal(got.cu_seqlens, kept.cu_seqlens)
                assert torch.equal(expected.lens, kept.lens)
                near(got, kept, layout)


def near(got: RaggedLayer, kept: RaggedLayer, layout: GroupLayout) -> None:
    """Entries are within a step and a half of what they were; the range is that of the data."""
    for ours, theirs in ((got.keys, kept.keys), (got.values, kept.values)):
        if theirs.numel():
            low, high = theirs.float().aminmax()
            step = (high - low) / layout.levels + theirs.float().abs().max() / 100
            assert (ours.float() - theirs.float()).abs().max() <= 1.5 * step


@pytest.mark.parametrize("codec", CODECS)
def test_a_layer_larger_than_any_message_is_cut_between_groups(codec: str) -> None:
    table = torch.tensor([[[3001, 17, 40], [12_345, 18, 9000]]])
    node = coded_node(table, 128, codec)
    sizes = [len(payload) for payload in node.payloads]
    assert max(sizes) <= MAX_SEGMENT_BYTES
    for tier in (0, 1):
        *full, _ = [sizes[i] for i in node.manifest.segments_of(tier)]
        assert tier == 0 or len(full) > 1
        assert all(size > MAX_SEGMENT_BYTES - 32 * 1024 for size in full)  # no further group
    whole = quantize_layer(node.layers[0], table[0], GroupLayout(BITS[codec], 128))
    assert equal(assembled(node, 0, "0.2").finish_groups(), whole)


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, table = random_layer([100, 0, 33], 6, "float32", 3), torch.tensor([[100, 0, 33]])
    layout = GroupLayout(4, 6)
    whole = quantize_layer(layer, table, layout)
    entries = whole.ragged(torch.float32)
    monkeypatch.setattr(quantized, "PIECE", 2)
    assert equal(quantize_layer(layer, table, layout), whole)
    assert torch.equal(whole.ragged(torch.float32).values, entries.values)


def test_a_rounded_scale_does_not_leave_the_range_of_fp16() -> None:
    keys = torch.tensor([[-65504.0, 1.0], [65504.0, 2.0]])
    layer = RaggedLayer(keys, keys, torch.arange(2, dtype=torch.int32), torch.tensor([0, 2]))
    whole = quantize_layer(layer, torch.tensor([[2]]), GroupLayout(8, 2))
    assert whole.ragged(torch.float32).keys.max() > 65504
    assert torch.isfinite(whole.ragged(torch.float16).keys).all()


# ------------------------------------------------------------------- refusals

ONE = torch.tensor([[[33, 2], [40, 2]]])
DIM = 6
GROUPS, ROWS = 3, 35
"""Of the first segment."""
HALF = {
    "NaN": b"\x00\x7e",
    "negative NaN": b"\x00\xfe",
    "inf": b"\x00\x7c",
    "-inf": b"\x00\xfc",
}
NEGATIVE = {"negative": b"\x00\xbc", "least negative": b"\x01\x80"}


def offsets(codec: str) -> dict[str, int]:
    """Where things are in the first segment's payload."""
    code = DIM * BITS[codec] // 8
    values = GROUPS * 4 * DIM + ROWS * code
    return {
        "key scale": 2 * (2 * DIM * (GROUPS - 1) + DIM - 1),
        "key zero": 2 * (2 * DIM * (GROUPS - 1) + 2 * DIM - 1),
        "value scale": values + 4 * (ROWS - 1),
        "value zero": values + 4 * (ROWS - 1) + 2,
        "position": values + ROWS * (4 + code) + 4 * (ROWS - 1),
    }


def with_bytes(node: CodedNode, at: int, new: bytes) -> tuple[LayerAssembler, bytes]:
    """The first segment with other bytes, under a checksum that fits."""
    payload = bytearray(node.payloads[0])
    payload[at : at + len(new)] = new
    first, *others = node.manifest.segments
    changed = replace(first, checksum=xxhash.xxh3_64_intdigest(payload))
    fields = {name: getattr(node.manifest, name) for name in Manifest.model_fields}
    manifest = Manifest(**{**fields, "segments": (changed, *others)})
    return LayerAssembler(manifest, 0, "0.2"), bytes(payload)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("what", "new"),
    [
        *itertools.product(("key scale", "key zero", "value scale", "value zero"), HALF.values()),
        *itertools.product(("key scale", "value scale"), NEGATIVE.values()),
        ("position", struct.pack("<i", -1)),
        ("position", struct.pack("<i", 42)),
        ("position", struct.pack("<i", -(1 << 31))),
    ],
)
def test_impossible_content_is_refused_whatever_the_checksum(
    codec: str, what: str, new: bytes
) -> None:
    node = coded_node(ONE, DIM, codec)
    assembler, payload = with_bytes(node, offsets(codec)[what], new)
    with pytest.raises(CorruptNodeError, match=r"impossible|outside"):
        assembler.add(0, payload)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("what", "new"),
    [
        ("key scale", b"\x00\x80"),  # −0
        ("value scale", b"\xff\x7b"),  # the largest
        ("key zero", b"\xff\xfb"),
        ("position", struct.pack("<i", 41)),
        ("position", struct.pack("<i", 0)),
    ],
)
def test_the_edges_of_what_is_possible_are_read(codec: str, what: str, new: bytes) -> None:
    node = coded_node(ONE, DIM, codec)
    assert node.manifest.num_tokens == 42
    assembler, payload = with_bytes(node, offsets(codec)[what], new)
    assembler.add(0, payload)
    assembler.add(1, node.payloads[1])
    assert torch.isfinite(assembler.finish().keys).all()


def changed(node: CodedNode, *segments: tuple[int, int, int]) -> dict[str, Any]:
    """Fields with (tier, rows, groups) as the only segments."""
    fields = {name: getattr(node.manifest, name) for name in Manifest.model_fields}
    made = [
        Segment(layer=0, tier=tier, rows=rows, groups=groups, checksum=0)
        for tier, rows, groups in segments
    ]
    return {**fields, "segments": tuple(made)}


@pytest.mark.parametrize(
    "segments",
    [
        [(0, 35, 3), (1, 7, 1)],
        [(0, 32, 1), (0, 1, 1), (0, 2, 1), (1, 7, 1)],
        [(1, 7, 1), (0, 33, 2), (0, 2, 1)],
    ],
)
def test_whole_groups_may_be_cut_anywhere(segments: list[tuple[int, int, int]]) -> None:
    node = coded_node(ONE, DIM)
    manifest = Manifest(**changed(node, *segments))
    assert decode_manifest(encode_manifest(manifest)) == manifest


@pytest.mark.parametrize(
    "segments",
    [
        [(0, 34, 2), (0, 1, 1), (1, 7, 1)],  # inside a group
        [(0, 31, 1), (0, 4, 2), (1, 7, 1)],
        [(0, 1, 1), (0, 32, 1), (0, 2, 1), (1, 7, 1)],  # not in rank order
        [(0, 35, 2), (1, 7, 1)],
        [(0, 35, 4), (1, 7, 1)],
        [(0, 35, 2), (1, 7, 2)],
        [(0, 33, 2), (0, 2, 0), (1, 7, 2)],
        [(0, 35, 3), (1, 4, 0), (1, 3, 1)],
        [(0, 35, 3), (1, 8, 1)],
        [(0, 35, 3)],
    ],
)
def test_segments_that_cut_groups_are_refused(segments: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValidationError, match=r"whole groups|add up"):
        Manifest(**changed(coded_node(ONE, DIM), *segments))


def test_a_cut_group_is_refused_from_untrusted_bytes() -> None:
    parts = encode_manifest(coded_node(ONE, DIM).manifest)
    kind = np.dtype(
        [("layer", "<u2"), ("tier", "<u2"), ("rows", "<u4"), ("checksum", "<u8"), ("groups", "<u4")]
    )
    lens, rest = parts[1][: 4 * 4], np.frombuffer(parts[1][4 * 4 :], kind).copy()
    assert decode_manifest([parts[0], lens + rest.tobytes()]).segments[0].groups == GROUPS
    rest["groups"][0] += 1
    with pytest.raises(CorruptNodeError, match="groups"):
        decode_manifest([parts[0], lens + rest.tobytes()])


def test_raw_segments_have_no_groups_and_odd_head_dims_no_codec() -> None:
    node = coded_node(ONE, DIM, "raw")
    with pytest.raises(ValidationError, match="add up"):
        Manifest(**changed(node, (0, 35, 3), (1, 7, 1)))
    fields = changed(coded_node(ONE, DIM), (0, 35, 3), (1, 7, 1))
    with pytest.raises(ValidationError, match="even"):
        Manifest(**{**fields, "head_dim": 5})


def test_segments_out_of_order_or_twice_are_refused() -> None:
    table = torch.tensor([[[9000, 33]]])
    node = coded_node(table, 128)
    assert len(node.payloads) > 2
    last = len(node.payloads) - 1
    for before, wrong in (([], last), (range(last + 1), 0), ([], last + 1)):
        assembler = LayerAssembler(node.manifest, 0, "0.1")
        for index in before:
            assembler.add(index, node.payloads[index])
        with pytest.raises(CorruptNodeError):
            assembler.add(wrong, node.payloads[min(wrong, last)])
    assembler = LayerAssembler(node.manifest, 0, "0.1")
    assembler.add(0, node.payloads[0])
    with pytest.raises(CorruptNodeError, match="missing"):
        assembler.finish_groups()


def test_what_is_missing_or_raw_has_no_groups() -> None:
    assembler = LayerAssembler(coded_node(ONE, DIM).manifest, 0, TIERS[0])
    with pytest.raises(CorruptNodeError, match="35 entries are missing"):
        assembler.finish_groups()
    raw = coded_node(ONE, DIM, "raw")
    with pytest.raises(TypeError, match="raw"):
        assembled(raw, 0, TIERS[0]).finish_groups()
