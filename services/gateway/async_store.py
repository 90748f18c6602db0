"""The store's control plane for an event loop: the blocking client in threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.leftovers import Leftovers
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.identity import NodeId
from criticalkv.shared.store_client import StoreClient

Value = TypeVar("Value")
HEALTH_THREADS = 2
LEASE_THREADS = 4

log = logging.getLogger(__name__)


class AsyncStore:
    """Awaitable calls of a `StoreClient`; at most `threads` at once.

    Health checks, and what renews leases and gives them back, have threads of their own:
    they must not wait behind calls that hang.

    Args:
        client: closed with this.
        threads: calls at once.
        longest_s: what a request may take at most.

    Attributes:
        leftovers: nodes that are to be removed once nobody can be reading them.
    """

    def __init__(self, client: StoreClient, threads: int = 16, longest_s: float = 600.0) -> None:
        self._client = client
        self.leftovers = Leftovers(self.delete_unreferenced, longest_s)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="store")
        self._health = ThreadPoolExecutor(HEALTH_THREADS, thread_name_prefix="store-health")
        self._leases = ThreadPoolExecutor(LEASE_THREADS, thread_name_prefix="store-lease")

    def close(self) -> None:
        """Stop the threads and close the client."""
        for pool in (self._pool, self._health, self._leases):
            pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    async def stat(self, node_ids: Sequence[NodeId]) -> list[pb.NodeStat]:
        """Look up nodes; answers in the order asked."""
        await self.leftovers.met(node_ids)
        return await self._call(lambda: self._client.stat(node_ids))

    async def token_records(self, node_ids: Sequence[NodeId]) -> list[TokenRecord | None]:
        """Return the nodes' token records, None where there is none."""
        return await self._call(lambda: self._client.token_records(node_ids))

    async def touch(self, node_id: NodeId, ttl_ms: int) -> bool:
        """Extend the life of a node and its ancestors."""
        return await self._call(lambda: self._client.touch(node_id, ttl_ms))

    async def pin(self, tenant: str, node_id: NodeId) -> int:
        """Keep a node until unpinned; return its number of pins."""
        return await self._call(lambda: self._client.pin(tenant, node_id))

    async def unpin(self, tenant: str, node_id: NodeId) -> int:
        """Take a tenant's pin away; return the number of pins left."""
        return await self._call(lambda: self._client.unpin(tenant, node_id))

    async def bind_handle(
        self, handle: str, tenant: str, node_id: NodeId, metadata: bytes, ttl_ms: int
    ) -> pb.Handle:
        """Give a node a name that the tenant holds."""
        return await self._call(
            lambda: self._client.bind_handle(handle, tenant, node_id, metadata, ttl_ms)
        )

    async def resolve_handle(self, tenant: str, handle: str) -> pb.Handle:
        """Return a tenant's handle, or raise ContextNotFoundError."""
        return await self._call(lambda: self._client.resolve_handle(tenant, handle))

    async def move_handle(
        self, tenant: str, handle: str, from_node: NodeId, to_node: NodeId, metadata: bytes | None
    ) -> pb.MoveHandleResponse.Outcome:
        """Lead a handle to a better node, unless somebody went on from the first."""
        return await self._call(
            lambda: self._client.move_handle(tenant, handle, from_node, to_node, metadata)
        )

    async def link_better(self, node_id: NodeId, better_id: NodeId) -> bool:
        """Have a node's removal remove another one; False if it has been removed."""
        return await self._call(lambda: self._client.link_better(node_id, better_id))

    async def delete_unreferenced(self, node_id: NodeId) -> bool:
        """Remove a node unless a handle, pin or child refers to it."""
        return await self._call(lambda: self._client.delete_unreferenced(node_id))

    async def list_handles(self, tenant: str, prefix: str, limit: int) -> list[pb.Handle]:
        """Return a tenant's handles, newest first."""
        return await self._call(lambda: self._client.list_handles(tenant, prefix, limit))

    async def delete_handle(self, tenant: str, handle: str) -> list[NodeId]:
        """Remove a handle and what nothing references any more."""
        return await self._call(lambda: self._client.delete_handle(tenant, handle))

    async def put_alias(self, alias: str, node_id: NodeId, view: Sequence[str]) -> None:
        """Let a digest of conversation text lead to a node."""
        await self._call(lambda: self._client.put_alias(alias, node_id, view))

    async def resolve_aliases(self, aliases: Sequence[str]) -> list[list[pb.AliasTarget]]:
        """Return where aliases lead, in the order asked."""
        return await self._call(lambda: self._client.resolve_aliases(aliases))

    async def begin_request(
        self, tenant: str, key: str, request: str, handle: str, lease_ms: int, ttl_ms: int
    ) -> pb.BeginRequestResponse:
        """Claim an idempotency key; a claim that nobody awaits any more is given back."""

        def undo(answer: pb.BeginRequestResponse) -> None:
            if answer.lease_token:
                self._client.finish_request(tenant, key, answer.lease_token, b"")

        return await self._call(
            lambda: self._client.begin_request(tenant, key, request, handle, lease_ms, ttl_ms), undo
        )

    async def renew_request(
        self,
        tenant: str,
        key: str,
        request: str,
        handle: str,
        lease_ms: int,
        ttl_ms: int,
        token: str,
    ) -> bool:
        """Extend a claim; False if the token no longer holds it."""

        def call() -> bool:
            answer = self._client.begin_request(
                tenant, key, request, handle, lease_ms, ttl_ms, lease_token=token
            )
            return answer.state == pb.BeginRequestResponse.RUN

        return await self._call(call, pool=self._leases)

    async def finish_request(self, tenant: str, key: str, token: str, answer: bytes) -> bool:
        """Store a request's answer; empty = forget the attempt."""
        return await self._call(
            lambda: self._client.finish_request(tenant, key, token, answer), pool=self._leases
        )

    async def acquire_lease(self, node_id: NodeId, ttl_ms: int) -> pb.AcquireLeaseResponse:
        """Ask for the right to prefill; one that nobody awaits any more is given back."""

        def undo(answer: pb.AcquireLeaseResponse) -> None:
            if answer.acquired:
                self._client.release_lease(node_id, answer.lease_token)

        return await self._call(lambda: self._client.acquire_lease(node_id, ttl_ms), undo)

    async def renew_lease(self, node_id: NodeId, ttl_ms: int, token: str) -> bool:
        """Extend a lease; False if the token no longer holds it."""
        return await self._call(
            lambda: self._client.acquire_lease(node_id, ttl_ms, lease_token=token).acquired,
            pool=self._leases,
        )

    async def release_lease(self, node_id: NodeId, token: str) -> bool:
        """Give a lease back."""
        return await self._call(
            lambda: self._client.release_lease(node_id, token), pool=self._leases
        )

    async def healthy(self) -> bool:
        """Whether the store answers."""
        return await self._call(self._client.healthy, pool=self._health)

    async def _call(
        self,
        call: Callable[[], Value],
        undo: Callable[[Value], None] | None = None,
        pool: ThreadPoolExecutor | None = None,
    ) -> Value:
        future = (pool or self._pool).submit(call)
        try:
            # Shielded: a call that runs cannot be stopped, only undone.
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if undo is not None:
                future.add_done_callback(lambda done: self._undo_later(done, undo))
            raise

    def _undo_later(self, done: Future[Value], undo: Callable[[Value], None]) -> None:
        # Called by whoever comes last, the event loop's thread included: only submits.
        if done.cancelled() or done.exception() is not None:
            return
        try:
            self._leases.submit(_undo, undo, done.result())
        except RuntimeError:
            log.info("the gateway stops; a lease is left to expire")


def _undo(undo: Callable[[Value], None], value: Value) -> None:
    try:
        undo(value)
    except CriticalKVError as error:
        log.warning("a lease could not be given back: %s", error.code)
