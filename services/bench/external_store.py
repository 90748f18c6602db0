"""A store on a Valkey that outlives it, so that each can be killed by itself."""

from __future__ import annotations

import secrets
from types import TracebackType

import redis
import xxhash

from criticalkv.services.bench.store_path import identity_of
from criticalkv.services.store.process import StoreProcess, start_store
from criticalkv.services.store.valkey import Valkey
from criticalkv.shared.cache.manifest import Manifest, Segment
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.loopback import free_port
from criticalkv.shared.store_client import StoreClient

MEMORY_MB = 1024
TINY_TOKENS = 16
TINY_HEAD_DIM = 8


class ExternalStore:
    """A store server at a fixed address, and a Valkey of its own. Leave the context to end."""

    def __init__(self) -> None:
        """Start both. Raises as start_store."""
        self._valkey = Valkey("", MEMORY_MB << 20)
        user = self._valkey.store
        self.metrics_port = free_port()
        self._config = StoreConfig(
            address=f"127.0.0.1:{free_port()}",
            redis_url=f"unix://{user.username}:{user.password}@{user.path}",
            memory_limit_mb=MEMORY_MB // 2,
            lease_ttl_s=2,
            janitor_interval_s=0.5,
            metrics_port=self.metrics_port,
        )
        try:
            self._server = start_store(self._config)
        except BaseException:
            self._valkey.stop()
            raise

    def client(self, timeout_s: float = 10.0) -> StoreClient:
        """Return a new client."""
        return self._server.client(timeout_s)

    def admin(self) -> redis.Redis:
        """Return a client of Valkey that may do all."""
        who = self._valkey.admin
        return redis.Redis(unix_socket_path=who.path, username=who.username, password=who.password)

    def restart_server(self) -> StoreProcess:
        """Kill the server as `kill -9` does, and start another."""
        self._server.process.kill()
        self._server.process.wait()
        self._server = start_store(self._config)
        return self._server

    def restart_valkey(self) -> None:
        """Kill Valkey as `kill -9` does, and start it again, empty."""
        self._valkey.process.kill()
        self._valkey.process.wait()
        self._valkey.process = self._valkey._spawn(MEMORY_MB << 20)
        self._valkey._await_ready()

    def put_tiny(self, client: StoreClient) -> tuple[str, str]:
        """Put a node of one small segment; return its id and attempt."""
        manifest, record, payload = tiny_node()
        with client.open_put(manifest.node_id, manifest.attempt) as writer:
            writer.send(payload)
            writer.commit(manifest, record)
        return manifest.node_id, manifest.attempt

    def __enter__(self) -> ExternalStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._server.stop()
        self._valkey.stop()


def tiny_node() -> tuple[Manifest, TokenRecord, bytes]:
    """Make a node of 16 tokens in one segment, with its record and payload."""
    ids = tuple(secrets.randbelow(1 << 20) for _ in range(TINY_TOKENS))
    identity = identity_of(ids)
    payload = secrets.token_bytes(TINY_TOKENS * (2 * TINY_HEAD_DIM * 4 + 4))
    segment = Segment(layer=0, tier=0, rows=TINY_TOKENS, checksum=xxhash.xxh3_64_intdigest(payload))
    manifest = Manifest(
        identity=identity,
        attempt=secrets.token_hex(8),
        num_tokens=TINY_TOKENS,
        next_position=TINY_TOKENS,
        num_layers=1,
        num_kv_heads=1,
        head_dim=TINY_HEAD_DIM,
        tiers=("1",),
        tier_lens=(((TINY_TOKENS,),),),
        segments=(segment,),
    )
    return manifest, TokenRecord(identity=identity, token_ids=ids), payload
