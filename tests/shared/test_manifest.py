"""Manifests and token records from untrusted bytes: accepted whole, or one error."""

from __future__ import annotations

import hashlib
import time
import tracemalloc
from dataclasses import replace

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from criticalkv.shared.cache import manifest as m
from criticalkv.shared.cache.manifest import (
    Manifest,
    Segment,
    decode_manifest,
    encode_manifest,
    unpack_small,
    verify_segment,
)
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.errors import CorruptNodeError
from criticalkv.shared.identity import FORMAT_VERSION, Identity, tokens_digest

DIGEST = hashlib.sha256(b"x").hexdigest()
IDS = tuple(range(20))
ROOT = hashlib.sha256(b"root").hexdigest()
GOLDEN = "354f62f2f59ea0bc15b314e222030e5b3b6103183c385cdef7b1bcfdf9506c99"


def identity(**changes):
    fields = {
        "model_digest": DIGEST,
        "tokenizer_digest": DIGEST,
        "dtype": "bfloat16",
        "policy": "dense",
        "salt": DIGEST,
        "parent": ROOT,
        "view": ("0.4",),
        "tokens": tokens_digest(IDS, (3, 4)),
    }
    return Identity(**{**fields, **changes})


def manifest(**changes):
    fields = {
        "identity": identity(),
        "attempt": "ab" * 8,
        "ancestors": (ROOT,),
        "num_tokens": 20,
        "next_position": 30,
        "pending_ids": (3, 4),
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 4,
        "tiers": ("0.1", "0.5"),
        "prefill_ms": 12.5,
        "tier_lens": (((1, 2), (0, 2)), ((5, 2), (8, 9))),
        "segments": (
            Segment(layer=0, tier=0, rows=3, checksum=1),
            Segment(layer=0, tier=1, rows=4, checksum=2),
            Segment(layer=1, tier=0, rows=2, checksum=2**64 - 1),
            Segment(layer=1, tier=1, rows=10, checksum=4),
            Segment(layer=1, tier=1, rows=5, checksum=5),
        ),
    }
    return Manifest(**{**fields, **changes})


def record():
    return TokenRecord(identity=identity(), token_ids=IDS, ancestors=(ROOT,), pending_ids=(3, 4))


def test_roundtrip():
    node = manifest()
    again = decode_manifest(encode_manifest(node))
    assert again == node
    assert again.node_id == node.node_id
    assert again.lens.tolist() == [[[1, 2], [0, 2]], [[5, 2], [8, 9]]]
    assert again == node  # also once the table is cached on one side
    assert again != manifest(prefill_ms=1.0)
    assert len({again, node}) == 1


def test_a_copy_derives_its_numbers_anew():
    node = manifest()
    assert node.segment_bytes(0) == 60
    segments = (replace(node.segments[0], rows=1), *node.segments[1:])
    assert node.model_copy(update={"segments": segments}).segment_bytes(0) == 20


def test_derived_numbers():
    node = manifest()
    assert node.entry_bytes == 2 * 4 * 2 + 4
    assert node.tier_entries() == [5, 24]
    assert node.tier_bytes() == [100, 480]
    assert node.full_entries == 20 * 2 * 2
    assert node.read_order("0.1", range(2)) == [0, 2]
    assert node.read_order("0.5", range(2)) == [0, 1, 2, 3, 4]
    assert node.read_order("0.5", range(1, 2)) == [2, 3, 4]


def test_a_shrunk_manifest_keeps_the_places_of_its_segments():
    node, low = manifest(), manifest().shrunk_to("0.1")
    assert low.tiers == ("0.1",)
    assert low.dropped_tiers == 1
    assert low.segments == node.segments
    assert low.tier_bytes() == node.tier_bytes()[:1] == [100]
    assert low.read_order("0.1", range(2)) == node.read_order("0.1", range(2)) == [0, 2]
    assert [low.segments_of(tier) for tier in range(2)] == [[0, 2], [1, 3, 4]]
    assert [low.added_bytes(tier) for tier in range(2)] == [100, 380]
    assert node.shrunk_to("0.5") == node
    with pytest.raises(ValueError, match="not in tuple"):
        node.shrunk_to("0.2")
    assert decode_manifest(encode_manifest(low)) == low


def test_two_shrinks_are_one():
    segments = tuple(Segment(layer=0, tier=t, rows=1, checksum=t) for t in range(3))
    lens = (((1,),), ((2,),), ((3,),))
    tall = manifest(
        num_layers=1, num_kv_heads=1, tiers=("0.1", "0.2", "0.4"), tier_lens=lens, segments=segments
    )
    assert tall.shrunk_to("0.2").shrunk_to("0.1") == tall.shrunk_to("0.1")
    assert tall.shrunk_to("0.1").dropped_tiers == 2


def test_readers_of_an_older_version_see_no_new_field():
    assert "dropped_tiers" not in msgpack.unpackb(encode_manifest(manifest())[0])
    shrunk = encode_manifest(manifest().shrunk_to("0.1"))[0]
    assert msgpack.unpackb(shrunk)["dropped_tiers"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"dropped_tiers": 0},  # a segment of a tier that does not exist
        {"dropped_tiers": -1},
        {"dropped_tiers": m.MAX_TIERS},
        {"dropped_tiers": m.MAX_TIERS - 1, "tiers": ("0.1", "0.5"), "tier_lens": None},
        {"segments": manifest().segments[1:]},  # one of those that are left is missing
    ],
    ids=str,
)
def test_inconsistent_shrunk_manifests_are_refused(change):
    low = manifest().shrunk_to("0.1")
    fields = {name: getattr(low, name) for name in Manifest.model_fields}
    change = {k: manifest().tier_lens if v is None else v for k, v in change.items()}
    with pytest.raises(ValidationError):
        Manifest(**{**fields, **change})


def test_large_tables_are_cut_into_parts():
    lens = ((20,) * 1024,) * 20
    segments = tuple(Segment(layer=i, tier=0, rows=20 * 1024, checksum=i) for i in range(20))
    node = manifest(
        num_layers=20, num_kv_heads=1024, tiers=("1",), tier_lens=(lens,), segments=segments
    )
    parts = encode_manifest(node)
    assert len(parts) > 2
    assert max(map(len, parts)) <= m.MAX_PART_BYTES
    assert decode_manifest(parts) == node


@pytest.mark.parametrize(
    "change",
    [
        {"tiers": ("0.5", "0.1")},
        {"tiers": ("0.1", "0.1")},
        {"tiers": ("0.10", "0.5")},
        {"tiers": ("abc", "0.5")},
        {"tiers": ("NaN", "0.5")},
        {"tiers": ("0.1", "1.5")},
        {"tiers": ("", "0.5")},
        {"tier_lens": (((1, 2), (0, 2)), ((0, 2), (8, 9)))},
        {"tier_lens": (((1, 2), (0, 2)), ((21, 2), (8, 9)))},
        {"tier_lens": (((-1, 2), (0, 2)), ((5, 2), (8, 9)))},
        {"tier_lens": (((1, 2), (0, 2)),)},
        {"tier_lens": (((1, 2), (0,)), ((5, 2), (8, 9)))},
        {"segments": ()},
        {"segments": (Segment(layer=5, tier=0, rows=3, checksum=1),)},
        {"ancestors": ()},
        {"ancestors": (DIGEST,)},
        {"ancestors": ("../" * 21 + "x",)},
        {"num_tokens": 0},
        {"num_tokens": 31},
        {"next_position": 10},
        {"pending_ids": (-1,)},
        {"pending_ids": (1 << 31,)},
        {"prefill_ms": float("nan")},
        {"prefill_ms": float("inf")},
        {"prefill_ms": 1e300},
        {"attempt": "short"},
        {"attempt": "AB" * 8},
        {"identity": identity(format_version=FORMAT_VERSION + 1)},
        {"identity": identity(dtype="float8")},
        {"identity": identity(view=("0.40",))},
        {"identity": identity(view=("x",))},
        {"extra": 1},
    ],
    ids=str,
)
def test_inconsistent_manifests_are_refused(change):
    with pytest.raises(ValidationError):
        manifest(**change)


def header(**changes):
    fields = msgpack.unpackb(encode_manifest(manifest())[0])
    fields.update(changes)
    return msgpack.packb(fields)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"\xdf\xff\xff\xff\xff"],  # a map that claims 4 G entries in five bytes
        [b"\xdd\xff\xff\xff\xff"],
        [b"\xdb\xff\xff\xff\xff"],
        [b"\x91" * 60000 + b"\x00"],  # nested 60,000 deep
        [b"\xc7\x08\x01" + b"x" * 8],  # ext
        [b"\xd6\xff" + b"\0" * 4],  # timestamp
        [b"x" * (m.MAX_PART_BYTES + 1)],
        [b"\x80"] * (m.MAX_PARTS + 1),
        [header(segments=1 << 31), b""],
        [header(segments=-1), b""],
        [header(segments=True), b""],
        [header(num_layers=1 << 40), b""],
        [header(num_layers=512, num_kv_heads=1024, tiers=["1"] * 32), b""],
        [header(num_layers="2"), b""],
        [header(tiers="0.1"), b""],
        [header(tiers=["a", "b"]), *encode_manifest(manifest())[1:]],
        [header(tiers=["sNaN", "1"]), *encode_manifest(manifest())[1:]],
        [header(identity=None), *encode_manifest(manifest())[1:]],
        [header(pending_ids=[[[[[[1]]]]]]), *encode_manifest(manifest())[1:]],
        [header(prefill_ms="nan"), *encode_manifest(manifest())[1:]],
        [encode_manifest(manifest())[0]],
        [*encode_manifest(manifest()), b"x"],
    ],
    ids=range(25),
)
def test_hostile_parts_are_refused_quickly_and_cheaply(parts):
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(CorruptNodeError):
            decode_manifest(parts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert time.perf_counter() - began < 2


def test_table_and_segment_limits():
    tiers = [str(t / 32) for t in range(1, 33)]
    shape = {"tiers": tiers, "num_layers": 512, "num_kv_heads": 1024, "segments": 0}
    with pytest.raises(CorruptNodeError, match="tier table"):
        decode_manifest([header(**shape), b""])
    with pytest.raises(CorruptNodeError, match="segment count"):
        decode_manifest([header(segments=m.MAX_SEGMENTS + 1), b""])


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_fuzzed_parts(parts):
    with pytest.raises(CorruptNodeError):
        decode_manifest(parts)


def quantized(**changes):
    """The same tier table in groups; each head's part of a tier is one group."""
    groups = (2, 1, 1, 2, 0)  # layer 0: heads keep 1+4, 2+0; layer 1: 0+8, 2+7
    kept = [s for s, n in zip(manifest().segments, groups, strict=True) if n]
    kept[-1] = replace(kept[-1], rows=15)
    segments = [replace(s, groups=n) for s, n in zip(kept, filter(None, groups), strict=True)]
    return manifest(**{"identity": identity(codec="int4"), "segments": segments, **changes})


def test_raw_manifests_are_the_bytes_that_they_always_were():
    """Computed before there were codecs; the format's version was 2."""
    name, version = b"format_version", bytes([FORMAT_VERSION])
    data = b"".join(encode_manifest(manifest()))
    assert data.count(name + version) == 1
    assert hashlib.sha256(data.replace(name + version, name + b"\x02")).hexdigest() == GOLDEN


def test_quantized_numbers():
    """Rows of 2·2 code bytes, one scale and zero, a position; groups of 4 scales and zeros."""
    node = quantized()
    assert node.entry_bytes == 2 * 2 + 4 + 4
    assert node.group_counts.tolist() == [[[1, 1], [0, 1]], [[1, 0], [1, 1]]]
    sizes = [3 * 12 + 2 * 16, 4 * 12 + 16, 2 * 12 + 16, 15 * 12 + 2 * 16]
    assert [node.segment_bytes(i) for i in range(4)] == sizes
    assert node.tier_bytes() == [sizes[0] + sizes[2], sum(sizes)]
    assert [node.added_bytes(t) for t in range(2)] == [sizes[0] + sizes[2], sizes[1] + sizes[3]]
    assert decode_manifest(encode_manifest(node)) == node


@pytest.mark.parametrize("make", [manifest, quantized])
@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_changed_manifests_stay_consistent_or_are_refused(make, data):
    parts = [bytearray(part) for part in encode_manifest(make())]
    part = parts[data.draw(st.integers(0, len(parts) - 1))]
    for _ in range(data.draw(st.integers(1, 4))):
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    try:
        node = decode_manifest([bytes(part) for part in parts])
    except CorruptNodeError:
        return
    # Whatever is accepted may differ in names and checksums, never in arithmetic.
    order = node.read_order(node.tiers[-1], range(node.num_layers))
    assert sum(node.segment_bytes(i) for i in order) == node.tier_bytes()[-1]
    assert decode_manifest(encode_manifest(node)) == node


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 99), inner),
    max_leaves=20,
)  # fmt: skip
FIELDS = [*Manifest.model_fields]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(FIELDS), JSONISH)
def test_any_value_in_any_field(name, value):
    try:
        node = decode_manifest([header(**{name: value}), *encode_manifest(manifest())[1:]])
    except (CorruptNodeError, UnicodeEncodeError):  # the latter from packing surrogates
        return
    assert isinstance(node, Manifest)


def test_unpack_small_allows_what_manifests_need():
    assert unpack_small(msgpack.packb({"a": [1, {"b": [b"c"]}]})) == {"a": [1, {"b": [b"c"]}]}


def test_verify_segment():
    payload = b"p" * 60
    import xxhash

    good = Segment(layer=0, tier=0, rows=3, checksum=xxhash.xxh3_64_intdigest(payload))
    node = manifest(segments=(good, *manifest().segments[1:]))
    verify_segment(node, 0, payload)
    verify_segment(node, 0, memoryview(bytearray(payload)))
    for bad in (payload[:-1], payload + b"p", b"q" + payload[1:], b""):
        with pytest.raises(CorruptNodeError):
            verify_segment(node, 0, bad)


def test_record_roundtrip():
    assert TokenRecord.decode(record().encode()) == record()


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_fuzzed_records(data):
    with pytest.raises(CorruptNodeError):
        TokenRecord.decode(data)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_changed_records(data):
    packed = bytearray(record().encode())
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    try:
        changed = TokenRecord.decode(bytes(packed))
    except CorruptNodeError:
        return
    assert changed.token_ids == IDS  # the digest guards the ids
    assert changed.pending_ids == (3, 4)
    assert tokens_digest(changed.token_ids, changed.pending_ids) == changed.identity.tokens


@pytest.mark.parametrize("name", [*TokenRecord.model_fields, "extra"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(value=JSONISH)
def test_any_value_in_any_record_field(name, value):
    fields = msgpack.unpackb(record().encode())
    fields[name] = value
    try:
        TokenRecord.decode(msgpack.packb(fields))
    except (CorruptNodeError, UnicodeEncodeError):
        return


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": b"abc"},
        {"token_ids": [1, 2]},
        {"token_ids": b""},
        {"ancestors": ["../x"]},
        {"pending_ids": [-1]},
        {"store_tier": "x" * 1000},
    ],
    ids=str,
)
def test_inconsistent_records(changes):
    fields = msgpack.unpackb(record().encode())
    fields.update(changes)
    with pytest.raises(CorruptNodeError):
        TokenRecord.decode(msgpack.packb(fields))
