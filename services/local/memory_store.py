"""A NodeStore in this process's memory: the real wire format, no server.

It expires nothing and knows no tenants; it is for one researcher in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from criticalkv.shared.cache.manifest import (
    Manifest,
    decode_manifest,
    encode_manifest,
    verify_segment,
)
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.errors import CorruptNodeError, NodeMissingError
from criticalkv.shared.identity import NodeId, resolve_tier


@dataclass(frozen=True)
class _Stored:
    manifest_parts: list[bytes]
    segments: list[bytearray]


@dataclass(frozen=True)
class MemoryPutResult:
    """What a commit did."""

    published: bool
    stored_bytes: int


class MemoryStore:
    """Nodes by id."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, _Stored] = {}
        self._lock = threading.Lock()

    def open_put(
        self,
        node_id: NodeId,
        attempt: str,
        *,
        lease_token: str = "",
        ancestors: Sequence[NodeId] = (),
        expected_bytes: int = 0,
        tenant: str = "",
        timeout_s: float = 600.0,
        check: Callable[[], None] | None = None,
    ) -> MemoryWriter:
        """See NodeStore."""
        return MemoryWriter(self, node_id)

    def open_get(
        self,
        node_id: NodeId,
        *,
        tier: str | None = None,
        layers: range | None = None,
        timeout_s: float | None = None,
    ) -> MemoryReader:
        """See NodeStore."""
        with self._lock:
            stored = self._nodes.get(node_id)
        if stored is None:
            raise NodeMissingError.of(node_id, "not in memory")
        manifest = decode_manifest(stored.manifest_parts)
        return MemoryReader(manifest, stored.segments, resolve_tier(manifest.tiers, tier), layers)

    def manifest(self, node_id: NodeId) -> Manifest:
        """Return a node's manifest."""
        return self.open_get(node_id).manifest

    def delete(self, node_id: NodeId) -> None:
        """Forget a node."""
        with self._lock:
            self._nodes.pop(node_id, None)

    def clear(self) -> None:
        """Forget all nodes."""
        with self._lock:
            self._nodes.clear()

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self._nodes)

    def publish(self, node_id: NodeId, manifest: Manifest, segments: list[bytearray]) -> bool:
        """Make a node visible; a higher top tier replaces, otherwise the first wins."""
        if manifest.node_id != node_id or len(segments) != len(manifest.segments):
            raise CorruptNodeError("manifest does not match what was sent")
        with self._lock:
            present = self._nodes.get(node_id)
            if present is not None:
                top = decode_manifest(present.manifest_parts).tiers[-1]
                if float(top) >= float(manifest.tiers[-1]):
                    return False
            self._nodes[node_id] = _Stored(encode_manifest(manifest), segments)
        return True


class MemoryWriter:
    """See node_store.Writer."""

    def __init__(self, store: MemoryStore, node_id: NodeId) -> None:
        self._store = store
        self._node_id = node_id
        self._segments: list[bytearray] = []

    def __enter__(self) -> MemoryWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._segments = []

    def send(self, payload: bytes | bytearray | memoryview) -> None:
        """See node_store.Writer."""
        self._segments.append(payload if isinstance(payload, bytearray) else bytearray(payload))

    def commit(
        self, manifest: Manifest, token_record: TokenRecord, *, ttl_ms: int = 0
    ) -> MemoryPutResult:
        """See node_store.Writer."""
        published = self._store.publish(self._node_id, manifest, self._segments)
        size = sum(len(s) for s in self._segments)
        return MemoryPutResult(published, size if published else 0)


class MemoryReader:
    """See node_store.Reader."""

    def __init__(
        self, manifest: Manifest, segments: list[bytearray], tier: str, layers: range | None
    ) -> None:
        self.manifest = manifest
        self.tier = tier
        self._segments = segments
        self._layers = layers if layers is not None else range(manifest.num_layers)

    def __enter__(self) -> MemoryReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return

    def __iter__(self) -> Iterator[tuple[int, memoryview]]:
        """See node_store.Reader."""
        for index in self.manifest.read_order(self.tier, self._layers):
            payload = memoryview(self._segments[index])
            verify_segment(self.manifest, index, payload)
            yield index, payload
