"""Frames of PutNode and GetNode, encoded by hand so that payloads are not copied.

A frame is a valid protobuf message (PutFrame or GetFrame) whose `payload` is the last
field. The small fields in front are parsed by protobuf; the payload stays a view of
the received bytes. A segment has the same encoding in both messages, so the store
keeps and returns the very bytes that the writer sent.

This module knows nothing of manifests, tensors or Redis.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from criticalkv.proto import cache_store_pb2 as pb

Buffer = bytes | bytearray | memoryview
MAX_MESSAGE_BYTES = 24 * 1024 * 1024
"""Largest gRPC message either side accepts: a commit with manifest and token record."""

_SEGMENT_TAG = (2 << 3) | 2
_PAYLOAD_TAG = (15 << 3) | 2
_M = TypeVar("_M", bound=Message)


class FrameError(ValueError):
    """Bytes that are no frame: truncated, of an unknown field, or payload not last."""


def segment_head(index: int, nbytes: int) -> bytes:
    """Return what precedes the `nbytes` of payload in the frame of segment `index`."""
    inner = b"\x08" + varint(index) if index else b""
    head = bytes((_SEGMENT_TAG, len(inner))) + inner
    return head + bytes((_PAYLOAD_TAG,)) + varint(nbytes) if nbytes else head


def encode_segment(index: int, payload: Buffer) -> bytes:
    """Return the frame of segment `index`, valid as PutFrame and as GetFrame.

    One copy of the payload: gRPC takes nothing but `bytes`.
    """
    view = memoryview(payload).cast("B")
    return b"".join((segment_head(index, len(view)), view))


def decode_put(data: bytes) -> tuple[pb.PutFrame, memoryview]:
    """Split a frame of PutNode into its kind and a view of its payload.

    Raises:
        FrameError: if the bytes are no such frame.
    """
    return _decode(pb.PutFrame, data)


def decode_get(data: bytes) -> tuple[pb.GetFrame, memoryview]:
    """Split a frame of GetNode into its kind and a view of its payload.

    Raises:
        FrameError: if the bytes are no such frame.
    """
    return _decode(pb.GetFrame, data)


def varint(value: int) -> bytes:
    """Return a non-negative integer in protobuf's base-128 encoding."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _decode(kind: type[_M], data: bytes) -> tuple[_M, memoryview]:
    head_end, payload_start = _split(data)
    message = kind()
    try:
        message.ParseFromString(data[:head_end])
    except DecodeError as error:
        raise FrameError("the frame's head is malformed") from error
    return message, memoryview(data)[payload_start:]


def _split(data: bytes) -> tuple[int, int]:
    # Walks the top-level fields, which are few and length-delimited throughout.
    at, end = 0, len(data)
    while at < end:
        tag, begin = _read_varint(data, at)
        if tag & 7 != 2 or tag >> 3 not in (1, 2, 3, 15):
            raise FrameError(f"the frame has an unknown field (tag {tag})")
        length, start = _read_varint(data, begin)
        if start + length > end:
            raise FrameError("the frame is truncated")
        if tag == _PAYLOAD_TAG:
            if start + length != end:
                raise FrameError("the payload is not the last field")
            return at, start
        at = start + length
    return end, end


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            raise FrameError("the frame is truncated")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise FrameError("a number in the frame is too long")
