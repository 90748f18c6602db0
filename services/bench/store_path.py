"""Throughput of the store's data path against a bare gRPC stream of the same frames.

What is compared:
  store  StoreClient → store server → Valkey (unix socket), each in its own process,
         with checksums, the publication of the manifest, and the client's checks;
  bare   the same frames, made beforehand, through a grpc.aio server that only counts
         them (PUT) or holds them in memory (GET). No Redis, no checks, no decoding.
Both use the same channel options and malloc settings. The two take turns in every
round; reported are medians, and the ratio of the medians.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import xxhash

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store.process import start_store
from criticalkv.services.store.server import OPTIONS as SERVER_OPTIONS
from criticalkv.shared.cache.manifest import MAX_SEGMENT_BYTES, Manifest, Segment
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.frames import encode_segment
from criticalkv.shared.identity import Identity, tokens_digest
from criticalkv.shared.malloc import ENVIRONMENT, tune_malloc
from criticalkv.shared.store_client import OPTIONS as CLIENT_OPTIONS
from criticalkv.shared.store_client import StoreClient

HEAD_DIM = 64
ENTRY_BYTES = 2 * HEAD_DIM * 4 + 4
ROWS = MAX_SEGMENT_BYTES // ENTRY_BYTES
SEGMENT_BYTES = ROWS * ENTRY_BYTES
SERVICE = "bare"
TIMEOUT_S = 60.0


def measure(quick: bool) -> dict[str, Any]:
    """Measure both paths.

    Args:
        quick: 16 MiB and 5 rounds instead of 64 MiB and 15.

    Returns:
        `store_put_vs_bare_grpc` and `store_get_vs_bare_grpc` (ratios of medians, higher
        is better), the medians in GB/s, and all samples.
    """
    tune_malloc()
    segments, rounds = (16, 5) if quick else (64, 15)
    payloads = [os.urandom(SEGMENT_BYTES) for _ in range(segments)]
    samples: dict[str, list[float]] = {}
    with _store(segments) as store, _bare(segments) as channel:
        frames = [encode_segment(i, payload) for i, payload in enumerate(payloads)]
        runs: dict[str, Callable[[], float]] = {
            "store_put": lambda: _store_put(store, payloads),
            "bare_put": lambda: _bare_put(channel, frames),
            "store_get": lambda: _store_get(store),
            "bare_get": lambda: _bare_get(channel),
        }
        for at in range(rounds + 1):
            for name, run in runs.items():
                seconds = run()
                if at:  # the first round warms up
                    samples.setdefault(name, []).append(segments * SEGMENT_BYTES / seconds / 1e9)
    return _report(samples, segments)


def _report(samples: dict[str, list[float]], segments: int) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "store_put_vs_bare_grpc": median["store_put"] / median["bare_put"],
        "store_get_vs_bare_grpc": median["store_get"] / median["bare_get"],
        "store_put_gb_s": median["store_put"],
        "store_get_gb_s": median["store_get"],
        "bare_put_gb_s": median["bare_put"],
        "bare_get_gb_s": median["bare_get"],
        "node_mib": segments * SEGMENT_BYTES / 2**20,
        "samples": samples,
    }


# ------------------------------------------------------------------- the store

_current: list[str] = []


@contextmanager
def _store(segments: int) -> Iterator[StoreClient]:
    config = StoreConfig(address="127.0.0.1:0", memory_limit_mb=16 + 8 * segments)
    with start_store(config) as process, process.client(TIMEOUT_S) as client:
        yield client


def _store_put(store: StoreClient, payloads: list[bytes]) -> float:
    manifest, record = _node(payloads)
    began = time.perf_counter()
    with store.open_put(manifest.node_id, manifest.attempt, timeout_s=TIMEOUT_S) as writer:
        for payload in payloads:
            writer.send(payload)
        published = writer.commit(manifest, record).published
    seconds = time.perf_counter() - began
    if not published:
        raise RuntimeError("the node was there already")
    for node_id in _current:
        store.delete_node(node_id)
    _current[:] = [manifest.node_id]
    return seconds


def _store_get(store: StoreClient) -> float:
    began = time.perf_counter()
    with store.open_get(_current[0], timeout_s=TIMEOUT_S) as reader:
        for _ in reader:
            pass
    return time.perf_counter() - began


def _node(payloads: list[bytes]) -> tuple[Manifest, TokenRecord]:
    # One segment per layer: a context of 2,032 tokens at tier 1 with one KV head.
    ids = tuple(secrets.randbelow(1 << 20) for _ in range(ROWS))
    digest = hashlib.sha256(b"bench").hexdigest()
    identity = Identity(
        model_digest=digest,
        tokenizer_digest=digest,
        dtype="float32",
        policy="dense",
        salt=digest,
        tokens=tokens_digest(ids),
    )
    manifest = Manifest(
        identity=identity,
        attempt=secrets.token_hex(8),
        num_tokens=ROWS,
        next_position=ROWS,
        num_layers=len(payloads),
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        tiers=("1",),
        tier_lens=(((ROWS,),) * len(payloads),),
        segments=tuple(
            Segment(layer=i, tier=0, rows=ROWS, checksum=xxhash.xxh3_64_intdigest(payload))
            for i, payload in enumerate(payloads)
        ),
    )
    return manifest, TokenRecord(identity=identity, token_ids=ids)


# ------------------------------------------------------------------- bare gRPC


@contextmanager
def _bare(segments: int) -> Iterator[grpc.Channel]:
    command = [sys.executable, "-m", __name__, str(segments)]
    environment = {**os.environ, **ENVIRONMENT}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        try:
            with grpc.insecure_channel(address, CLIENT_OPTIONS) as channel:
                yield channel
        finally:
            process.kill()


def _bare_put(channel: grpc.Channel, frames: list[bytes]) -> float:
    call: Any = channel.stream_unary(f"/{SERVICE}/Put", None, None)
    return _timed(lambda: call(iter(frames), timeout=TIMEOUT_S))


def _bare_get(channel: grpc.Channel) -> float:
    call: Any = channel.unary_stream(f"/{SERVICE}/Get", None, None)
    return _timed(lambda: [None for _ in call(b"", timeout=TIMEOUT_S)])


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


async def _serve_bare(segments: int) -> None:
    frames = [encode_segment(i, os.urandom(SEGMENT_BYTES)) for i in range(segments)]

    async def put(requests: AsyncIterator[bytes], _: object) -> bytes:
        total = 0
        async for frame in requests:
            total += len(frame)
        return pb.PutResult(stored_bytes=total).SerializeToString()

    async def get(_: bytes, __: object) -> AsyncIterator[bytes]:
        for frame in frames:
            yield frame

    server = grpc.aio.server(options=SERVER_OPTIONS, compression=grpc.Compression.NoCompression)
    handlers: dict[str, Any] = {
        "Put": grpc.stream_unary_rpc_method_handler(put, None, None),
        "Get": grpc.unary_stream_rpc_method_handler(get, None, None),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent ends
    await server.stop(0)


if __name__ == "__main__":  # the bare server, in a process of its own
    tune_malloc()
    asyncio.run(_serve_bare(int(sys.argv[1])))
