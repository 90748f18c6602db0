"""Hostile bytes at every border: a typed error at most, and no memory beyond the limit."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import fuzz_targets
import msgpack
import pytest
from fuzz_targets import TARGETS, VALUE, pack_parts, split_parts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from criticalkv.shared.cache.manifest import MAX_PART_BYTES, decode_manifest
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.errors import CorruptNodeError, InvalidRequestError
from criticalkv.shared.frames import FrameError, decode_put, varint

quick = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LEAST = 1 << 18  # bytes of memory that anything may take, whatever its size
PER_BYTE = 16  # bytes of memory per byte received: Python's objects; measured 9 at most
NUMBERS = st.sampled_from([-1, 0, 1, 2, 255, 1 << 16, 1 << 24, 1 << 31, (1 << 64) - 1])


def hostile(name: str) -> st.SearchStrategy[bytes]:
    """Bytes near to valid ones, and bytes of no kind at all."""
    near = st.builds(
        _damage,
        st.sampled_from(TARGETS[name].seeds),
        st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.binary(max_size=8)), max_size=4),
    )
    return near | st.binary(max_size=300)


def _damage(seed: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    data = bytearray(seed)
    for place, kind, new in edits:
        at = int(place * len(data))
        if kind == 0:
            data[at : at + len(new)] = new
        elif kind == 1:
            data[at:at] = new
        elif kind == 2:
            del data[at : at + len(new)]
        else:
            del data[at:]
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_valid_bytes_pass(name: str) -> None:
    for seed in TARGETS[name].seeds:
        TARGETS[name].run(seed)


@pytest.mark.parametrize("name", TARGETS)
@quick
@given(data=st.data())
def test_damaged_bytes_are_refused_with_the_typed_error(name: str, data: st.DataObject) -> None:
    TARGETS[name].run(data.draw(hostile(name)))


VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)


@quick
@given(data=st.data())
def test_manifests_with_any_fields(data: st.DataObject) -> None:
    parts = split_parts(TARGETS["manifest"].seeds[0])
    header = msgpack.unpackb(parts[0])
    for field in data.draw(st.sets(st.sampled_from(sorted(header)), min_size=1, max_size=3)):
        header[field] = data.draw(VALUES)
    tables = data.draw(st.lists(st.binary(max_size=64), max_size=3) | st.just(parts[1:]))
    fuzz_targets.manifest(pack_parts([msgpack.packb(header), *tables]))


@quick
@given(data=st.data())
def test_records_with_any_fields(data: st.DataObject) -> None:
    fields = msgpack.unpackb(TARGETS["record"].seeds[0])
    for field in data.draw(st.sets(st.sampled_from(sorted(fields)), min_size=1, max_size=3)):
        fields[field] = data.draw(VALUES)
    fuzz_targets.record(msgpack.packb(fields))


@quick
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 3, 15]) | st.integers(0, 16),
            st.just(2) | st.integers(0, 7),
            st.just(-1) | NUMBERS,
            st.binary(max_size=40),
        ),
        max_size=5,
    )
)
def test_frames_of_any_fields(fields: list[tuple[int, int, int, bytes]]) -> None:
    """Each a field number, a wire type, a claimed length (−1: the real one) and bytes."""
    data = b"".join(
        varint(number << 3 | kind) + varint(len(raw) if claimed < 0 else claimed) + raw
        for number, kind, claimed, raw in fields
    )
    fuzz_targets.frame(data)


JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*fuzz_targets.CHAT, "role", "content", "text", "type", "ttl", "x"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@quick
@given(st.data())
def test_bodies_of_any_fields(data: st.DataObject) -> None:
    body = dict(fuzz_targets.CHAT)
    for field in data.draw(st.sets(st.sampled_from([*body, "input", "text", "n"]), max_size=3)):
        body[field] = data.draw(JSON)
    fuzz_targets.body(json.dumps(body).encode())


REPLIES = st.sampled_from(
    [
        b"+OK\r\n",
        b"$-1\r\n",
        b"-OOM no\r\n",
        b"-ERR \xff\r\n",
        b"-MOVED 1 h:1\r\n",
        b"-ASK 1 :\r\n",
        b"$64\r\n",
        b"$1\r\n",
        b"$99999999999\r\n",
        b"*1000000\r\n",
        b"v" * VALUE,
        b"\r\n",
        b"\r",
        b"-" + b"x" * 5000,
    ]
)


@quick
@given(st.sampled_from([b"\x00", b"\xff"]), st.lists(REPLIES | st.binary(max_size=9), max_size=6))
def test_redis_may_answer_anything(call: bytes, replies: list[bytes]) -> None:
    fuzz_targets.resp(call + b"".join(replies))


def peak_of(call: Callable[[], Any]) -> int:
    """Most bytes that Python had allocated at once during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refused(call: Callable[[], Any], error: type[Exception]) -> Callable[[], None]:
    def run() -> None:
        with pytest.raises(error):
            call()

    return run


def header_with(**fields: Any) -> list[bytes]:
    parts = split_parts(TARGETS["manifest"].seeds[0])
    return [msgpack.packb(msgpack.unpackb(parts[0]) | fields), *parts[1:]]


CLAIMS = {
    # Few bytes that claim many: nothing may be allocated for what has not come.
    "array": [b"\xdd" + struct.pack(">I", 1 << 31)],
    "map": [b"\xdf" + struct.pack(">I", 1 << 31)],
    "string": [b"\xdb" + struct.pack(">I", 1 << 31)],
    "binary": [b"\xc6" + struct.pack(">I", 1 << 31)],
    "extension": [b"\xc9" + struct.pack(">I", 1 << 31) + b"\x01"],
    "nesting": [b"\x91" * MAX_PART_BYTES],
    "segments": header_with(segments=1 << 16),
    "layers": header_with(num_layers=512, num_kv_heads=1024),
    "tiers": header_with(tiers=[str(i / 100) for i in range(1, 32)], num_layers=512),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_manifest_allocates_for_what_came_not_for_what_it_claims(claim: str) -> None:
    parts = CLAIMS[claim]
    received = sum(map(len, parts))
    peak = peak_of(refused(lambda: decode_manifest(parts), CorruptNodeError))
    assert peak <= LEAST + PER_BYTE * received


def test_the_largest_manifest_stays_within_its_bound() -> None:
    """Full tables of nonsense: as many bytes as its own counts allow, and all refused."""
    rows = 1 << 16
    lens = struct.pack("<i", 1) * (2 * 512 * 1024)
    table = lens + b"\x01" * (16 * rows)
    parts = header_with(segments=rows, num_layers=512, num_kv_heads=1024)[:1]
    parts += [table[at : at + MAX_PART_BYTES] for at in range(0, len(table), MAX_PART_BYTES)]
    peak = peak_of(refused(lambda: decode_manifest(parts), CorruptNodeError))
    assert peak <= LEAST + PER_BYTE * len(table)


@pytest.mark.parametrize(
    "data",
    [b"\xdd" + b"\x7f" * 4, b"\xc6\x7f\xff\xff\xff", b"\x81\xa9token_ids\xc6\xff\xff\xff\xff"],
)
def test_a_record_allocates_for_what_came(data: bytes) -> None:
    assert peak_of(refused(lambda: TokenRecord.decode(data), CorruptNodeError)) <= LEAST


@pytest.mark.parametrize("claimed", [1 << 20, 1 << 30, (1 << 35) - 1])
def test_a_frame_allocates_nothing_for_a_payload_that_did_not_come(claimed: int) -> None:
    data = b"\x7a" + varint(claimed) + b"few"
    assert peak_of(refused(lambda: decode_put(data), FrameError)) <= LEAST


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b"[" + b"1," * 300_000 + b"1]",
        json.dumps({"messages": [{"role": "user", "content": "x"}] * 3000}).encode(),
    ],
    ids=["open", "nested", "values", "messages"],
)
def test_a_body_costs_a_multiple_of_its_bytes(body: bytes) -> None:
    assert peak_of(lambda: fuzz_targets.body(body)) <= LEAST + PER_BYTE * len(body)


@pytest.mark.parametrize(
    "reply", [b"$99999999999\r\n", b"-" + b"x" * (4 << 20), b"*9999999\r\n"], ids=len
)
def test_redis_cannot_make_us_allocate(reply: bytes) -> None:
    for call in (b"\x00", b"\xff"):
        data = call + reply
        assert peak_of(lambda data=data: fuzz_targets.resp(data)) <= LEAST + 3 * len(data)


def test_the_typed_error_is_asked_for() -> None:
    """The targets themselves: a defect must not pass as a refusal."""
    with pytest.raises(InvalidRequestError):
        fuzz_targets.parse_chat([], fuzz_targets.LIMITS)
    with pytest.raises(CorruptNodeError):
        decode_manifest([])
