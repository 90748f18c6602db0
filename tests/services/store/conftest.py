"""Small nodes, made without a model."""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import xxhash
from store_rig import Rig
from valkey_servers import admin_of

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store.process import StoreProcess, start_store
from criticalkv.services.store.valkey import Valkey
from criticalkv.shared.cache.manifest import Manifest, Segment
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.identity import Identity, tokens_digest
from criticalkv.shared.store_client import StoreClient


@dataclass(frozen=True)
class Node:
    """One node ready to be stored."""

    manifest: Manifest
    record: TokenRecord
    payloads: list[bytes]

    @property
    def node_id(self) -> str:
        return self.manifest.node_id

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.payloads))

    def put(
        self, store: StoreClient, *, ttl_ms: int = 0, lease_token: str = "", tenant: str = ""
    ) -> pb.PutResult:
        attempt = self.manifest.attempt
        with store.open_put(
            self.node_id, attempt, lease_token=lease_token, tenant=tenant
        ) as writer:
            for payload in self.payloads:
                writer.send(payload)
            return writer.commit(self.manifest, self.record, ttl_ms=ttl_ms)

    def segment_key(self, index: int) -> str:
        return f"ckv:{{{self.node_id}}}:s:{self.manifest.attempt}:{index}"


MakeNode = Callable[..., Node]


def build(
    *,
    seed: int | None = None,
    parent: Node | None = None,
    tiers: tuple[str, ...] = ("0.1", "0.4"),
    layers: int = 2,
    rows: int = 6,
    head_dim: int = 8,
    prefill_ms: float = 0.0,
    tokens: int = 64,
) -> Node:
    """Build a node of `layers` × `tiers` × one segment of `rows` entries, 2 KV heads."""
    rng = random.Random(secrets.randbits(64) if seed is None else seed)
    ids = tuple(rng.randrange(1000) for _ in range(tokens))
    chain = (*parent.manifest.ancestors, parent.node_id) if parent else ()
    view = (*parent.manifest.identity.view, parent.manifest.tiers[-1]) if parent else ()
    digest = hashlib.sha256(b"model").hexdigest()
    identity = Identity(
        model_digest=digest,
        tokenizer_digest=digest,
        dtype="float32",
        policy="dense",
        salt=digest,
        parent=parent.node_id if parent else None,
        view=view,
        tokens=tokens_digest(ids, (7,)),
    )
    nbytes = rows * (8 * head_dim + 4)
    payloads = [rng.randbytes(nbytes) for _ in range(layers * len(tiers))]
    manifest = Manifest(
        identity=identity,
        attempt=secrets.token_hex(8),
        ancestors=chain,
        num_tokens=tokens,
        next_position=tokens + (parent.manifest.next_position if parent else 0),
        pending_ids=(7,),
        num_layers=layers,
        num_kv_heads=2,
        head_dim=head_dim,
        tiers=tiers,
        prefill_ms=prefill_ms,
        tier_lens=tuple(
            tuple((rows // 2 * (t + 1),) * 2 for _ in range(layers)) for t in range(len(tiers))
        ),
        segments=tuple(
            Segment(
                layer=i // len(tiers),
                tier=i % len(tiers),
                rows=rows,
                checksum=xxhash.xxh3_64_intdigest(payload),
            )
            for i, payload in enumerate(payloads)
            if payload
        ),
    )
    record = TokenRecord(identity=identity, token_ids=ids, ancestors=chain, pending_ids=(7,))
    return Node(manifest, record, payloads)


@pytest.fixture
def make_node() -> MakeNode:
    """Build nodes; see `build`."""
    return build


@pytest.fixture(scope="session")
def valkey(store_process: StoreProcess) -> Iterator[redis.Redis]:
    """The Valkey behind `store_process`, for looking and for breaking things."""
    with admin_of(store_process.config.data_dir) as client:
        yield client


@pytest.fixture
def small_store(tmp_path: object) -> Iterator[StoreProcess]:
    """A store of its own with a memory limit of 16 MiB, in which nodes go and never shrink."""
    config = StoreConfig(
        address="127.0.0.1:0",
        data_dir=str(tmp_path),
        memory_limit_mb=16,
        high_watermark=1,
        low_watermark=1,
        shrink_floor="1",
        lease_ttl_s=2,
        read_deadline_s=1.0,
        janitor_interval_s=0.2,
    )
    with start_store(config) as process:
        yield process


@pytest.fixture(params=["grpc", "direct"])
def each_path(request: pytest.FixtureRequest, store_process: StoreProcess) -> Iterator[StoreClient]:
    """A client that reads by one path, then another by the other, which never falls back."""
    config = store_process.config.model_copy(
        update={"address": store_process.address, "read_path": request.param}
    )
    with StoreClient.of(config) as client:
        yield client
        assert client._direct is None or client._direct.open


@pytest.fixture(scope="module")
def own_valkey() -> Iterator[Valkey]:
    """A Valkey for the rigs of one file."""
    with Valkey("", 1 << 30) as running:
        yield running


@pytest.fixture
def emptied(own_valkey: Valkey) -> Iterator[redis.Redis]:
    """A client of `own_valkey`, which is empty again after the test."""
    with admin_of(own_valkey.directory) as client:
        yield client
        client.flushall()


@pytest.fixture
async def rigs(own_valkey: Valkey, emptied: redis.Redis) -> AsyncIterator[Callable[..., Rig]]:  # noqa: ARG001
    """Make rigs on `own_valkey`; see Rig."""
    made: list[Rig] = []

    def make(config: StoreConfig, *arguments: Any) -> Rig:
        made.append(Rig(own_valkey.store, config, *arguments))
        return made[-1]

    yield make
    for rig in made:
        await rig.close()
