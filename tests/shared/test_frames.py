"""Hand-made frames equal protobuf's own, and hostile bytes raise one error."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.shared.frames import (
    FrameError,
    decode_get,
    decode_put,
    encode_segment,
    segment_head,
    varint,
)

INDEXES = st.integers(0, 2**32 - 1)
PAYLOADS = st.binary(max_size=300)


@given(INDEXES, PAYLOADS)
def test_segments_equal_the_generated_encoding(index, payload):
    frame = encode_segment(index, payload)
    put = pb.PutFrame(segment=pb.PutSegment(index=index), payload=payload)
    get = pb.GetFrame(segment=pb.GetSegment(index=index), payload=payload)
    assert frame == put.SerializeToString() == get.SerializeToString()
    assert pb.PutFrame.FromString(frame) == put
    assert pb.GetFrame.FromString(frame) == get
    assert frame == segment_head(index, len(payload)) + payload


@given(INDEXES, PAYLOADS)
def test_decoding_equals_the_generated_one(index, payload):
    data = pb.PutFrame(segment=pb.PutSegment(index=index), payload=payload).SerializeToString()
    message, view = decode_put(data)
    assert message == pb.PutFrame(segment=pb.PutSegment(index=index))
    assert view == payload
    message, view = decode_get(data)
    assert message == pb.GetFrame(segment=pb.GetSegment(index=index))
    assert view == payload


@pytest.mark.parametrize(
    "frame",
    [
        pb.PutFrame(begin=pb.PutBegin(node_id="0" * 64, attempt="a" * 16, expected_bytes=7)),
        pb.PutFrame(commit=pb.PutCommit(segment_count=3, manifest_parts=[b"a", b"bc"])),
        pb.PutFrame(),
    ],
    ids=["begin", "commit", "empty"],
)
def test_other_put_frames(frame):
    message, payload = decode_put(frame.SerializeToString())
    assert message == frame
    assert len(payload) == 0


def test_header_frame():
    frame = pb.GetFrame(header=pb.GetHeader(manifest_parts=[b"x" * 70000], tier="0.4"))
    assert decode_get(frame.SerializeToString())[0] == frame


def test_payload_is_not_copied():
    data = encode_segment(3, b"x" * 1000)
    _, payload = decode_put(data)
    assert payload.obj is data


def test_any_buffer_of_any_shape_is_taken():
    array = bytearray(range(16))
    view = memoryview(array).cast("I")
    assert encode_segment(1, view) == encode_segment(1, array) == encode_segment(1, bytes(array))


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_hostile_bytes_raise_one_error(data):
    for decode, kind in ((decode_put, pb.PutFrame), (decode_get, pb.GetFrame)):
        try:
            message, payload = decode(data)
        except FrameError:
            continue
        # What we accept, protobuf reads in the same way.
        message.payload = bytes(payload)
        assert kind.FromString(data) == message


@given(st.data())
def test_cut_or_changed_frames(data):
    frame = bytearray(encode_segment(data.draw(INDEXES), data.draw(PAYLOADS)))
    at = data.draw(st.integers(0, len(frame) - 1))
    changed = frame[:at] if data.draw(st.booleans()) else frame
    if changed is frame:
        changed[at] = data.draw(st.integers(0, 255))
    try:
        message, payload = decode_put(bytes(changed))
    except FrameError:
        return
    message.payload = bytes(payload)
    try:
        assert pb.PutFrame.FromString(bytes(changed)) == message
    except DecodeError:  # pragma: no cover
        pytest.fail("accepted what protobuf refuses")


@pytest.mark.parametrize(
    "data",
    [
        b"\x7a\x05abc",  # truncated payload
        b"\x7a\x02ab\x12\x00",  # payload not last
        b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # absurd length
        b"\x7a\xff\xff\xff\x7f",  # 256 MiB claimed
        b"\x08\x01",  # not length-delimited
        b"\x22\x00",  # unknown field
        b"\x12\x02\x08",  # cut inside the head
        b"\x80" * 20,
    ],
)
def test_malformed_frames(data):
    with pytest.raises(FrameError):
        decode_put(data)


@given(st.integers(0, 2**35 - 1))
def test_varint(value):
    data = varint(value)
    assert sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data)) == value
    assert all(byte & 0x80 for byte in data[:-1])
    assert data[-1] < 0x80
