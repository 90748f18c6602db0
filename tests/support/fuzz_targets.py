"""What a hostile peer reaches with bytes of its own, one function each.

A target takes any bytes and returns. It swallows the one typed error that its callers
expect; anything else that it raises is a defect. Knows nothing of who makes the bytes.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import msgpack
import numpy as np

from criticalkv.services.gateway.body import _parse as parse_body
from criticalkv.services.gateway.response_schemas import parse_response
from criticalkv.services.gateway.schemas import parse_chat, parse_context
from criticalkv.shared import resp as resp_module
from criticalkv.shared.cache.manifest import (
    Manifest,
    Segment,
    decode_manifest,
    encode_manifest,
)
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.config import GatewayConfig
from criticalkv.shared.errors import (
    ConfigError,
    CorruptNodeError,
    InvalidRequestError,
    PolicyError,
    StoreFullError,
    StoreUnavailableError,
)
from criticalkv.shared.eviction.policy import ALIASES, Policy, parse_turn_policy
from criticalkv.shared.frames import FrameError, decode_get, decode_put, encode_segment
from criticalkv.shared.identity import Identity, tokens_digest
from criticalkv.shared.redis_location import Deployment, Location
from criticalkv.shared.resp import DataConnection, LengthMismatch

LIMITS = GatewayConfig()
DIGEST = "ab" * 32
IDS = tuple(range(64))
VALUE = 64  # bytes that the RESP target asks for
REPLY_TIMEOUT_S = 5.0


def _identity(codec: str = "raw") -> Identity:
    return Identity(
        model_digest=DIGEST,
        tokenizer_digest=DIGEST,
        dtype="float32",
        codec=codec,
        policy="dense",
        salt=DIGEST,
        parent=None,
        view=(),
        tokens=tokens_digest(IDS),
    )


def _manifest(codec: str = "raw") -> Manifest:
    """Two tiers of 3 and 13 entries in each of 2 heads."""
    segments = tuple(
        Segment(layer=layer, tier=tier, rows=rows, checksum=7, groups=2 * (codec != "raw"))
        for layer in range(2)
        for tier, rows in ((0, 6), (1, 20))
    )
    return Manifest(
        identity=_identity(codec),
        attempt="cd" * 16,
        num_tokens=len(IDS),
        next_position=len(IDS),
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        tiers=("0.1", "0.4"),
        tier_lens=np.array([[[3, 3]] * 2, [[13, 13]] * 2]).tolist(),
        segments=segments,
    )


def pack_parts(parts: list[bytes]) -> bytes:
    """Join a manifest's parts as the manifest target splits them: 4 bytes of length each."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def split_parts(data: bytes) -> list[bytes]:
    """Undo `pack_parts`; a wrong length takes what is there."""
    parts = []
    while data:
        length, data = int.from_bytes(data[:4], "little"), data[4:]
        parts.append(data[:length])
        data = data[length:]
    return parts


def manifest(data: bytes) -> None:
    try:
        found = decode_manifest(split_parts(data))
    except CorruptNodeError:
        return
    assert decode_manifest(encode_manifest(found)) == found
    assert (
        sum(found.segment_bytes(i) for i in range(len(found.segments))) == (found.tier_bytes()[-1])
    )


def frame(data: bytes) -> None:
    for decode in (decode_put, decode_get):
        try:
            message, payload = decode(data)
        except FrameError:
            continue
        assert len(payload) <= len(data)
        assert message.ByteSize() <= 2 * len(data)


def record(data: bytes) -> None:
    try:
        found = TokenRecord.decode(data)
    except CorruptNodeError:
        return
    assert tokens_digest(found.token_ids, found.pending_ids) == found.identity.tokens


def redis_url(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    for parse in (Deployment.parse, Location.parse):
        try:
            parse(text).check()
        except ConfigError as error:
            refusal = error.message
            # Not even a part of the URL may come back: it may be the password.
            if not ("expected" in refusal or "another machine" in refusal):
                raise AssertionError(refusal) from error


def policy(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    for parse in (Policy.parse, parse_turn_policy):
        try:
            found = parse(text)
        except PolicyError:
            continue
        if found is not None:
            assert Policy.parse(found.canonical()).canonical() == found.canonical()


def body(data: bytes) -> None:
    try:
        value = parse_body(data)
    except (ValueError, InvalidRequestError):
        return  # `read_json` turns the first into the second
    for parse in (parse_chat, parse_context, parse_response):
        try:
            parse(value, LIMITS)
        except InvalidRequestError as error:
            if len(error.message) > 2000:
                raise AssertionError("an error as long as the request") from error


def resp(data: bytes) -> None:
    """The first byte chooses the call, the others are what Redis answers."""
    ours, peer = socket.socketpair()
    sender = threading.Thread(target=_answer, args=(peer, data[1:]))
    sender.start()
    connection = _connected(ours)
    try:
        if data[:1] < b"\x80":
            values = connection.get_many([("k", VALUE), ("l", 1)])
            assert [len(v) if v is not None else None for v in values] in (
                [[a, b] for a in (VALUE, None) for b in (1, None)]
            )
        else:
            connection.set_many([("k", b"v"), ("l", b"w")], 1000)
    except (StoreUnavailableError, StoreFullError, LengthMismatch):
        pass
    finally:
        connection.close()
        sender.join()


def _connected(end: socket.socket) -> DataConnection:
    with mock.patch.object(resp_module, "_connect", return_value=end):
        return DataConnection(Location(), REPLY_TIMEOUT_S)


def _answer(peer: socket.socket, data: bytes) -> None:
    with peer:
        try:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(1 << 16):
                pass
        except OSError:
            pass  # the other end has had enough


@dataclass(frozen=True)
class Target:
    """What is fuzzed, and bytes to begin with."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "max_tokens": 3,
    "stop": ["a"],
    "temperature": 0.5,
    "criticalkv": {"read_tier": 0.4, "policy": "default"},
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
}
TARGETS = {
    "manifest": Target(
        manifest,
        tuple(pack_parts(encode_manifest(_manifest(codec))) for codec in ("raw", "int8", "int4")),
    ),
    "frame": Target(
        frame, (encode_segment(3, b"payload"), b"\x0a\x02\x0a\x00", b"\x1a\x00\x7a\x01x")
    ),
    "record": Target(
        record,
        (
            TokenRecord(identity=_identity(), token_ids=IDS).encode(),
            msgpack.packb({"token_ids": b"", "identity": {}}),
        ),
    ),
    "redis_url": Target(
        redis_url,
        (
            b"rediss://user:p%40ss@host:6380/2",
            b"unix:///run/x.sock?db=3",
            b"rediss+sentinel://u:p@a:1,b:2/service?db=1&sentinel_password=q",
            b"redis+cluster://127.0.0.1:1,[::1]:2",
        ),
    ),
    "policy": Target(
        policy,
        (
            *(name.encode() for name in list(ALIASES)[:4]),
            b"window+adakv+twostage:window=32,interval=64,keep=0.5",
            b"default:codec=int8",
        ),
    ),
    "body": Target(
        body,
        (
            _json(CHAT),
            _json({"text": "hello", "ttl": "1h", "codec": "int8"}),
            _json({"model": "m", "input": [{"role": "user", "content": "x"}], "store": False}),
        ),
    ),
    "resp": Target(
        resp,
        (
            b"\x00$64\r\n" + b"v" * 64 + b"\r\n$1\r\nw\r\n",
            b"\x00$-1\r\n$-1\r\n",
            b"\x00-MOVED 1 host:1\r\n",
            b"\xff+OK\r\n+OK\r\n",
            b"\xff-OOM no\r\n+OK\r\n",
        ),
    ),
}
