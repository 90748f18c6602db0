"""Throughput of the store's data paths against bare gRPC and against a plain socket.

What is compared, in alternating rounds:
  grpc    StoreClient → store server → Valkey (unix socket), each in its own process,
          with checksums, the publication of the manifest, and the client's checks;
  direct  the same, but the client reads segments from Valkey itself;
  bare    the same frames through a gRPC server without Redis and checks (see `peers`);
  socket  the same bytes over a unix and a TCP loopback socket, nothing else.
Reported are medians, and ratios of medians. Several streams are threads of one client.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import xxhash

from criticalkv.services.bench import peers
from criticalkv.services.bench.process_cost import ProcessCost
from criticalkv.services.store.process import StoreProcess, start_store
from criticalkv.shared.cache.manifest import MAX_SEGMENT_BYTES, Manifest, Segment
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.frames import encode_segment
from criticalkv.shared.identity import Identity, tokens_digest
from criticalkv.shared.malloc import tune_malloc
from criticalkv.shared.report import median
from criticalkv.shared.store_client import StoreClient

HEAD_DIM = 64
ENTRY_BYTES = 2 * HEAD_DIM * 4 + 4
ROWS = MAX_SEGMENT_BYTES // ENTRY_BYTES
SEGMENT_BYTES = ROWS * ENTRY_BYTES
TIMEOUT_S = 120.0
KINDS = ("grpc_put", "bare_put", "grpc_get", "bare_get", "direct_get", "unix_copy", "tcp_copy")
RATIOS = {
    "grpc_put_vs_bare_grpc": ("grpc_put", "bare_put"),
    "grpc_get_vs_bare_grpc": ("grpc_get", "bare_get"),
    "direct_get_vs_socket": ("direct_get", "unix_copy"),
}


@dataclass(frozen=True)
class Case:
    """One size at one number of streams.

    Attributes:
        mib: segments, of nearly 1 MiB each, per node.
        streams: nodes that are moved at the same time.
        rounds: measured; one more comes first and warms up.
    """

    mib: int
    streams: int
    rounds: int


@dataclass
class Measured:
    """What came of a case.

    Attributes:
        gb_s: samples in GB/s, all streams together, by kind.
        cpu_s_per_gb: CPU seconds per GB in each process, by kind.
        peak_mib: peak memory of each process.
    """

    gb_s: dict[str, list[float]]
    cpu_s_per_gb: dict[str, dict[str, float]]
    peak_mib: dict[str, float]

    def medians(self) -> dict[str, float]:
        """Median GB/s by kind."""
        return {kind: median(samples) for kind, samples in self.gb_s.items()}

    def ratios(self) -> dict[str, float]:
        """Ratios of medians."""
        at = self.medians()
        return {name: at[over] / at[under] for name, (over, under) in RATIOS.items()}


def measure(quick: bool) -> dict[str, Any]:
    """Measure one stream of 64 MiB, in 15 rounds; `quick`: of 16 MiB, in 5.

    Returns:
        `store_put_vs_bare_grpc` and `store_get_vs_bare_grpc` (ratios of medians, higher
        is better), the medians in GB/s, and all samples.
    """
    case = Case(16, 1, 5) if quick else Case(64, 1, 15)
    with running(case.mib) as paths:
        found = paths.measure(case)
    at, ratios = found.medians(), found.ratios()
    return {
        "store_put_vs_bare_grpc": ratios["grpc_put_vs_bare_grpc"],
        "store_get_vs_bare_grpc": ratios["grpc_get_vs_bare_grpc"],
        "store_put_gb_s": at["grpc_put"],
        "store_get_gb_s": at["grpc_get"],
        "bare_put_gb_s": at["bare_put"],
        "bare_get_gb_s": at["bare_get"],
        "node_mib": case.mib * SEGMENT_BYTES / 2**20,
        "samples": found.gb_s,
    }


@contextmanager
def running(most_mib: int) -> Iterator[Paths]:
    """Run the store and its peers.

    Args:
        most_mib: of all nodes that are stored at the same time.
    """
    tune_malloc()
    config = StoreConfig(
        address="127.0.0.1:0",
        memory_limit_mb=64 + 2 * most_mib,
        max_node_mb=max(1024, most_mib),
        read_path="direct",
    )
    with ExitStack() as stack:
        store = stack.enter_context(start_store(config))
        found = {
            kind: stack.enter_context(peers.running(kind, SEGMENT_BYTES))
            for kind in ("bare", "unix", "tcp")
        }
        paths = Paths(store, found)
        stack.callback(paths.close)
        yield paths


class Paths:
    """The store and its peers, ready to be measured."""

    def __init__(self, store: StoreProcess, found: dict[str, peers.Peer]) -> None:
        self._direct = store.client(TIMEOUT_S)
        self._grpc = StoreClient(store.address, timeout_s=TIMEOUT_S)
        self._bare = peers.BareClient(found["bare"].address)
        self._peers = found
        payloads = [os.urandom(SEGMENT_BYTES) for _ in range(peers.DISTINCT)]
        self._payloads = payloads
        self._checksums = [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
        self._frames = [encode_segment(i, payload) for i, payload in enumerate(payloads)]
        server = psutil.Process(store.process.pid)
        self._cost = ProcessCost(
            {
                "client": os.getpid(),
                "store": server.pid,
                "valkey": server.children()[0].pid,
                **{name: peer.pid for name, peer in found.items()},
            }
        )

    def close(self) -> None:
        """Close the clients."""
        for client in (self._direct, self._grpc, self._bare):
            client.close()

    def measure(self, case: Case, kinds: Sequence[str] = KINDS) -> Measured:
        """Run all kinds in turn, round after round."""
        self._cost.forget_peaks()
        total = case.streams * case.mib * SEGMENT_BYTES / 1e9
        gb_s: dict[str, list[float]] = {kind: [] for kind in kinds}
        cpu: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
        nodes = [""] * case.streams
        with ThreadPoolExecutor(case.streams) as pool:
            for at in range(case.rounds + 1):
                for kind in kinds:
                    before = self._cost.cpu_s()
                    seconds = self._timed(kind, case, nodes, pool)
                    if at:  # the first round warms up
                        gb_s[kind].append(total / seconds)
                        _add(cpu[kind], before, self._cost.cpu_s(), total * case.rounds)
        for node_id in filter(None, nodes):
            self._grpc.delete_node(node_id)
        return Measured(gb_s, cpu, self._cost.peak_mib())

    def _timed(self, kind: str, case: Case, nodes: list[str], pool: ThreadPoolExecutor) -> float:
        if kind == "grpc_put":
            return self._put_all(case, nodes, pool)
        runs: dict[str, Callable[[int], None]] = {
            "bare_put": lambda _: self._bare.put(self._frames, case.mib),
            "bare_get": lambda _: self._bare.get(case.mib),
            "grpc_get": lambda i: _read(self._grpc, nodes[i]),
            "direct_get": lambda i: _read(self._direct, nodes[i]),
            "unix_copy": lambda _: self._copy("unix", case.mib),
            "tcp_copy": lambda _: self._copy("tcp", case.mib),
        }
        return _seconds(runs[kind], case.streams, pool)

    def _copy(self, kind: str, count: int) -> None:
        peers.copy_from_socket(self._peers[kind].address, SEGMENT_BYTES, count)

    def _put_all(self, case: Case, nodes: list[str], pool: ThreadPoolExecutor) -> float:
        for node_id in filter(None, nodes):
            self._grpc.delete_node(node_id)
        fresh = [self._node(case.mib) for _ in nodes]
        nodes[:] = [manifest.node_id for manifest, _ in fresh]
        return _seconds(lambda i: self._put(*fresh[i]), case.streams, pool)

    def _put(self, manifest: Manifest, record: TokenRecord) -> None:
        count = manifest.num_layers
        with self._grpc.open_put(
            manifest.node_id,
            manifest.attempt,
            timeout_s=TIMEOUT_S,
            expected_bytes=count * SEGMENT_BYTES,
        ) as writer:
            for i in range(count):
                writer.send(self._payloads[i % peers.DISTINCT])
            if not writer.commit(manifest, record).published:
                raise RuntimeError("the node was there already")

    def _node(self, count: int) -> tuple[Manifest, TokenRecord]:
        # One segment per layer: a context of 2,032 tokens at tier 1 with one KV head.
        ids = tuple(secrets.randbelow(1 << 20) for _ in range(ROWS))
        identity = identity_of(ids)
        sums = self._checksums
        manifest = Manifest(
            identity=identity,
            attempt=secrets.token_hex(8),
            num_tokens=ROWS,
            next_position=ROWS,
            num_layers=count,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            tiers=("1",),
            tier_lens=(((ROWS,),) * count,),
            segments=tuple(
                Segment(layer=i, tier=0, rows=ROWS, checksum=sums[i % peers.DISTINCT])
                for i in range(count)
            ),
        )
        return manifest, TokenRecord(identity=identity, token_ids=ids)


def identity_of(
    ids: tuple[int, ...], parent: str | None = None, view: tuple[str, ...] = ()
) -> Identity:
    """Return an identity of tokens after a parent, of no real model."""
    digest = hashlib.sha256(b"bench").hexdigest()
    return Identity(
        model_digest=digest,
        tokenizer_digest=digest,
        dtype="float32",
        policy="dense",
        salt=digest,
        parent=parent,
        view=view,
        tokens=tokens_digest(ids),
    )


def _read(store: StoreClient, node_id: str) -> None:
    with store.open_get(node_id, timeout_s=TIMEOUT_S) as reader:
        for _ in reader:
            pass


def _seconds(run: Callable[[int], None], streams: int, pool: ThreadPoolExecutor) -> float:
    began = time.perf_counter()
    if streams == 1:
        run(0)
    else:
        list(pool.map(run, range(streams)))
    return time.perf_counter() - began


def _add(
    into: dict[str, float], before: dict[str, float], after: dict[str, float], gb: float
) -> None:
    for name, seconds in after.items():
        into[name] = into.get(name, 0.0) + (seconds - before[name]) / gb
