"""What the engines need of a store: write a node, read a node. Nothing else.

`StoreClient` speaks to the real store over gRPC; `services.local` keeps nodes in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.identity import NodeId


class PutOutcome(Protocol):
    """What a commit did."""

    @property
    def published(self) -> bool:
        """False if an equal or better node was there already."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Bytes of segments stored by this writer."""
        ...


class Writer(Protocol):
    """Writes one node; leaving the context without a commit publishes nothing."""

    def __enter__(self) -> Writer: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def send(self, payload: bytes | bytearray | memoryview) -> None:
        """Send the next segment; may block for flow control."""
        ...

    def commit(
        self, manifest: Manifest, token_record: TokenRecord, *, ttl_ms: int = 0
    ) -> PutOutcome:
        """Publish the node."""
        ...


class Reader(Protocol):
    """Reads one node at one tier of one generation."""

    manifest: Manifest
    tier: str

    def __enter__(self) -> Reader: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def __iter__(self) -> Iterator[tuple[int, memoryview]]:
        """Yield (segment index, verified payload) by layer, then tier, then piece."""
        ...


class NodeStore(Protocol):
    """The data plane of a store."""

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
    ) -> Writer:
        """Start to write a node.

        Args:
            node_id: its name.
            attempt: random id of this writer.
            lease_token: proves the right to publish, if a lease is held.
            ancestors: root first; kept alive while this node is written.
            expected_bytes: of payload, for an early refusal; 0 = unknown.
            tenant: digest of whose quota it counts against; "" = nobody's.
            timeout_s: of the whole put.
            check: called while waiting; what it raises ends the put.
        """
        ...

    def open_get(
        self,
        node_id: NodeId,
        *,
        tier: str | None = None,
        layers: range | None = None,
        timeout_s: float | None = None,
    ) -> Reader:
        """Start to read a node; an empty range of layers reads the manifest only.

        Raises:
            NodeMissingError: if it is absent or unusable.
        """
        ...
