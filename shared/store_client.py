"""The store's client: synchronous, thread-safe, one lazy channel.

It hides the transport and maps every gRPC status to a typed error, here and nowhere
else. Every call has a deadline. What is read is verified: identity, length, checksum.

Example:
    with StoreClient("127.0.0.1:50051") as store:
        with store.open_put(manifest.node_id, manifest.attempt) as writer:
            for payload in payloads:
                writer.send(payload)
            writer.commit(manifest, record)
        with store.open_get(manifest.node_id, tier="0.2") as reader:
            for index, payload in reader:
                ...
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.shared import failpoints
from criticalkv.shared.breaker import Breaker, CircuitOpenError, Passage
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.closing import Closing
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.direct_read import DirectReads
from criticalkv.shared.errors import (
    CorruptNodeError,
    DeadlineError,
    InvalidRequestError,
    StoreUnavailableError,
)
from criticalkv.shared.node_reader import NodeReader, ReadPaths
from criticalkv.shared.node_writer import NodeWriter
from criticalkv.shared.store_channel import SERVICE, StoreCredentials, callables, typed_error

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 30.0
"""Default deadline of a read: the store keeps replaced segments this long."""
MAX_IDS = 256
ATTEMPTS = 4
BACKOFF_S = 0.05


class StoreClient(Closing):
    """A connection to the store. Share one per process; all methods are thread-safe.

    The channel is made at the first call, never before, so that it does not cross a
    fork or an actor's start.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 10.0,
        credentials: StoreCredentials | None = None,
        direct: DirectReads | None = None,
    ) -> None:
        """Prepare a client.

        Args:
            address: `host:port` or `unix:path`.
            timeout_s: deadline of each call that moves no payload, with its retries.
            credentials: for a store on another machine.
            direct: reads segments from the store's Redis where the store offers that; None
                = they always come through the store. Closed with this.
        """
        self.address = address
        self.timeout_s = timeout_s
        self._credentials = credentials or StoreCredentials()
        self._direct = direct
        self._breaker = Breaker("the store")
        self._paths = ReadPaths(self._breaker.begin, self._start_get, self.delete_node, direct)
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._calls: dict[str, Callable[..., Any]] = {}
        self._closed = False

    @classmethod
    def of(cls, config: StoreConfig, timeout_s: float = 10.0) -> StoreClient:
        """Return a client for a configuration. Raises as StoreCredentials.of."""
        return cls(
            config.address,
            timeout_s=timeout_s,
            credentials=StoreCredentials.of(config),
            direct=DirectReads(config.redis_ca) if config.read_path == "direct" else None,
        )

    def close(self) -> None:
        """Close all connections; running calls end with an error. Idempotent."""
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
            self._calls.clear()
        if channel is not None:
            channel.close()
        if self._direct is not None:
            self._direct.close()

    # ------------------------------------------------------------ payloads

    def open_put(
        self,
        node_id: str,
        attempt: str,
        *,
        lease_token: str = "",
        expected_bytes: int = 0,
        timeout_s: float = 600.0,
        ancestors: Sequence[str] = (),
        tenant: str = "",
        check: Callable[[], None] | None = None,
    ) -> NodeWriter:
        """Start writing a node; nothing is visible before NodeWriter.commit.

        Args:
            node_id: the node's content address.
            attempt: fresh random hex, as in the manifest that will be committed.
            lease_token: from `acquire_lease`, or empty.
            expected_bytes: payload bytes to come, for early refusal; 0 = unknown.
            timeout_s: deadline of the whole put.
            ancestors: the node's, root first; the store keeps them while the put runs.
            tenant: digest of whose quota the node counts against; "" = nobody's.
            check: called often while the writer waits for the network or the store;
                what it raises aborts the put and is raised by `send` or `commit`.
        """
        begin = pb.PutBegin(
            node_id=node_id,
            attempt=attempt,
            lease_token=lease_token,
            expected_bytes=expected_bytes,
            ancestors=ancestors,
            tenant=tenant,
        )
        call, passage = self._call("PutNode"), self._begin_put(timeout_s)
        return NodeWriter(call, self._credentials.metadata, begin, timeout_s, passage, check)

    def open_get(
        self,
        node_id: str,
        *,
        tier: str | None = None,
        layers: range | None = None,
        byte_limit: int | None = None,
        timeout_s: float | None = None,
    ) -> NodeReader:
        """Start reading a node; returns once the manifest is there.

        Args:
            node_id: the node's content address.
            tier: highest tier wanted; None = the highest stored.
            layers: only these, a range with step 1; empty = the manifest only; None = all.
            byte_limit: highest tier whose bytes, of all layers, fit; None = no limit.
            timeout_s: deadline of the whole read; None = 30 s.

        Raises:
            NodeMissingError: if the node is not stored.
            CorruptNodeError: if the manifest is of another node, which has then been
                dropped from the store; or if it does not decode, as one of a newer
                version. The store itself drops what is damaged.
        """
        if layers is not None and not layers:
            layers = range(1, 1)  # on the wire an end of 0 means all layers
        request = pb.GetNodeRequest(
            node_id=node_id,
            tier=tier or "",
            layer_begin=layers.start if layers is not None else 0,
            layer_end=layers.stop if layers is not None else 0,
            byte_limit=byte_limit or 0,
            direct=self._direct is not None and self._direct.open,
        )
        return NodeReader(self._paths, request, layers, timeout_s or READ_TIMEOUT_S)

    # --------------------------------------------------------------- nodes

    def stat(self, node_ids: Sequence[str]) -> list[pb.NodeStat]:
        """Describe nodes, in the order asked; absent ones have `present` False."""
        out: list[pb.NodeStat] = []
        for ids in _groups(node_ids):
            response = self._idempotent("StatNodes", pb.StatNodesRequest(node_ids=ids))
            out += response.nodes
        return out

    def delete_node(
        self, node_id: str, expected_attempt: str = "", expected_generation: int = 0
    ) -> bool:
        """Drop a node's KV, if it is still this attempt and generation; whether it went."""
        request = pb.DeleteNodeRequest(
            node_id=node_id,
            expected_attempt=expected_attempt,
            expected_generation=expected_generation,
        )
        return bool(self._idempotent("DeleteNode", request).deleted)

    def link_better(self, node_id: str, better_id: str) -> bool:
        """Have the removal of a node remove a better one; False if it has been removed."""
        request = pb.LinkBetterRequest(node_id=node_id, better_id=better_id)
        return bool(self._idempotent("LinkBetter", request).linked)

    def delete_unreferenced(self, node_id: str) -> bool:
        """Remove a node, record included, unless a handle, pin or child refers to it."""
        request = pb.DeleteNodeRequest(node_id=node_id, unreferenced=True)
        return bool(self._idempotent("DeleteNode", request).deleted)

    def pin(self, tenant: str, node_id: str) -> int:
        """Keep a node and its ancestors; return its number of pins.

        Raises:
            NodeMissingError: if the node is not stored.
        """
        request = pb.PinRequest(tenant=tenant, node_id=node_id)
        return int(self._idempotent("Pin", request).pins)

    def unpin(self, tenant: str, node_id: str) -> int:
        """Take a pin back; return how many remain."""
        request = pb.PinRequest(tenant=tenant, node_id=node_id)
        return int(self._idempotent("Unpin", request).pins)

    def touch(self, node_id: str, ttl_ms: int) -> bool:
        """Extend a node and its ancestors to `ttl_ms` from now; False if absent."""
        request = pb.TouchRequest(node_id=node_id, ttl_ms=ttl_ms)
        return bool(self._idempotent("Touch", request).present)

    def token_records(self, node_ids: Sequence[str]) -> list[TokenRecord | None]:
        """Return token records, in the order asked; None where there is none.

        A record that does not decode, or belongs to another node, counts as none.
        """
        return [
            record for ids in _groups(node_ids) for record in map(_record, ids, self._records(ids))
        ]

    # ------------------------------------------------------------- handles

    def bind_handle(
        self, handle: str, tenant: str, node_id: str, metadata: bytes, ttl_ms: int = 0
    ) -> pb.Handle:
        """Bind a handle to a node; the same binding again is no error.

        Raises:
            NodeMissingError: if neither node nor token record is stored.
            IdempotencyConflictError: if the handle names another node.
        """
        request = pb.BindHandleRequest(
            handle=handle, tenant=tenant, node_id=node_id, metadata=metadata, ttl_ms=ttl_ms
        )
        bound: pb.Handle = self._idempotent("BindHandle", request)
        return bound

    def resolve_handle(self, tenant: str, handle: str) -> pb.Handle:
        """Return a handle and keep its nodes alive.

        Raises:
            ContextNotFoundError: if it is unknown, expired or another tenant's.
        """
        request = pb.ResolveHandleRequest(tenant=tenant, handle=handle)
        found: pb.Handle = self._idempotent("ResolveHandle", request)
        return found

    def move_handle(
        self,
        tenant: str,
        handle: str,
        from_node: str,
        to_node: str,
        metadata: bytes | None = None,
    ) -> pb.MoveHandleResponse.Outcome:
        """Bind a handle to another node, if it is still on a childless `from_node`.

        Raises:
            ContextNotFoundError: if it is unknown, expired or another tenant's.
            NodeMissingError: if nothing of `to_node` is stored.
        """
        request = pb.MoveHandleRequest(
            tenant=tenant, handle=handle, from_node=from_node, to_node=to_node, metadata=metadata
        )
        outcome: pb.MoveHandleResponse.Outcome = self._idempotent("MoveHandle", request).outcome
        return outcome

    def list_handles(self, tenant: str, prefix: str = "", limit: int = 100) -> list[pb.Handle]:
        """Return a tenant's handles with a prefix, newest first, at most 1,000."""
        request = pb.ListHandlesRequest(tenant=tenant, prefix=prefix, limit=limit)
        return list(self._idempotent("ListHandles", request).handles)

    def delete_handle(self, tenant: str, handle: str) -> list[str]:
        """Remove a handle, then the nodes that nothing refers to; return those.

        Raises:
            ContextNotFoundError: if it is unknown, expired or another tenant's.
        """
        request = pb.DeleteHandleRequest(tenant=tenant, handle=handle)
        return list(self._once("DeleteHandle", request).deleted_nodes)

    # ------------------------------------------- idempotency, aliases, leases

    def begin_request(
        self,
        tenant: str,
        key_digest: str,
        request_digest: str,
        handle: str,
        lease_ms: int,
        ttl_ms: int,
        lease_token: str = "",
    ) -> pb.BeginRequestResponse:
        """Start a request under an idempotency key, or learn that it runs or is done.

        With the `lease_token` of a running attempt, extend that one instead: RUN and the
        same token if it still holds it, otherwise RUNNING or DONE.

        Raises:
            IdempotencyConflictError: if the key was used with another request.
        """
        request = pb.BeginRequestRequest(
            tenant=tenant,
            key_digest=key_digest,
            request_digest=request_digest,
            handle=handle,
            lease_ms=lease_ms,
            ttl_ms=ttl_ms,
            lease_token=lease_token,
        )
        call = self._idempotent if lease_token else self._once
        response: pb.BeginRequestResponse = call("BeginRequest", request)
        return response

    def finish_request(self, tenant: str, key_digest: str, lease_token: str, answer: bytes) -> bool:
        """Store the answer, or forget the key if it is empty; False if taken over."""
        request = pb.FinishRequestRequest(
            tenant=tenant, key_digest=key_digest, lease_token=lease_token, answer=answer
        )
        return bool(self._idempotent("FinishRequest", request).stored)

    def put_alias(self, alias: str, node_id: str, view: Sequence[str]) -> None:
        """Let a digest of conversation text lead to a node read at a view."""
        target = pb.AliasTarget(node_id=node_id, view=view)
        self._idempotent("PutAlias", pb.PutAliasRequest(alias=alias, target=target))

    def resolve_aliases(self, aliases: Sequence[str]) -> list[list[pb.AliasTarget]]:
        """Return the living targets of each alias, newest first."""
        out: list[list[pb.AliasTarget]] = []
        for names in _groups(aliases):
            request = pb.ResolveAliasesRequest(aliases=names)
            response = self._idempotent("ResolveAliases", request)
            out += [list(entry.targets) for entry in response.entries]
        return out

    def acquire_lease(
        self, node_id: str, ttl_ms: int, lease_token: str = ""
    ) -> pb.AcquireLeaseResponse:
        """Take the lease to prefill a node, or learn how long another has it.

        With a `lease_token`, extend the lease that it holds to at least `ttl_ms` from
        now; `acquired` is False if it no longer does.
        """
        request = pb.AcquireLeaseRequest(node_id=node_id, ttl_ms=ttl_ms, lease_token=lease_token)
        call = self._idempotent if lease_token else self._once
        response: pb.AcquireLeaseResponse = call("AcquireLease", request)
        return response

    def release_lease(self, node_id: str, lease_token: str) -> bool:
        """Give a lease back; False if the token no longer holds it."""
        request = pb.ReleaseLeaseRequest(node_id=node_id, lease_token=lease_token)
        return bool(self._idempotent("ReleaseLease", request).released)

    def healthy(self) -> bool:
        """Whether the store answers and reaches its Redis."""
        check = health_pb2_grpc.HealthStub(self._open()).Check
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        timeout_s = min(self.timeout_s, 2.0)
        try:  # past the breaker: a store that has come back is found at once
            response = check(request, timeout=timeout_s, metadata=self._credentials.metadata)
        except (grpc.RpcError, ValueError):  # a ValueError: closed meanwhile
            return False
        serving = bool(response.status == health_pb2.HealthCheckResponse.SERVING)
        if serving:
            self._breaker.answered()
        return serving

    # ------------------------------------------------------------ transport

    def _records(self, ids: Sequence[str]) -> list[bytes]:
        try:
            request = pb.GetTokenRecordsRequest(node_ids=ids)
            return list(self._idempotent("GetTokenRecords", request).records)
        except InvalidRequestError:
            if len(ids) == 1:
                raise
        half = len(ids) // 2  # together they exceed one message
        return self._records(ids[:half]) + self._records(ids[half:])

    def _idempotent(self, method: str, request: Message) -> Any:
        # Retried on UNAVAILABLE only: nothing else says that trying again may help.
        deadline = time.monotonic() + self.timeout_s
        unavailable: StoreUnavailableError | None = None
        for attempt in range(ATTEMPTS):
            try:
                return self._once(method, request, deadline - time.monotonic())
            except CircuitOpenError:
                raise
            except StoreUnavailableError as error:
                unavailable = error
                pause = BACKOFF_S * 4**attempt * random.uniform(0.5, 1.5)
                if attempt + 1 == ATTEMPTS or time.monotonic() + pause >= deadline:
                    raise
                time.sleep(pause)
            except DeadlineError:
                if unavailable is None:
                    raise
                raise unavailable from None  # the retry came too late to say more
        raise AssertionError("unreachable")

    def _once(self, method: str, request: Message, timeout_s: float | None = None) -> Any:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        call, metadata = self._call(method), self._credentials.metadata
        with self._breaker.begin(timeout_s):
            failpoints.hit("client.call")
            try:
                return call(request, timeout=timeout_s, metadata=metadata)
            except grpc.RpcError as error:
                raise typed_error(error, _subject(request)) from error
            except ValueError as error:  # grpc's answer to a call on a closed channel
                raise _closed() from error

    def _begin_put(self, timeout_s: float) -> Passage:
        # What becomes of a put shows only at its end: a short call has to be the probe.
        passage = self._breaker.begin(timeout_s)
        if not passage.probe:
            return passage
        with passage:
            if not self.healthy():
                raise StoreUnavailableError("the store does not serve", retry_after_s=1.0)
        return self._breaker.begin(timeout_s)

    def _start_get(self, request: pb.GetNodeRequest, timeout_s: float) -> Any:
        call = self._call("GetNode")
        try:
            return call(request, timeout=timeout_s, metadata=self._credentials.metadata)
        except ValueError as error:
            raise _closed() from error

    def _call(self, method: str) -> Callable[..., Any]:
        self._open()
        with self._lock:
            if self._closed:
                raise _closed()
            return self._calls[method]

    def _open(self) -> grpc.Channel:
        with self._lock:
            if self._closed:
                raise _closed()
            if self._channel is None:
                self._channel = self._credentials.channel(self.address)
                self._calls = callables(self._channel)
            return self._channel


def _closed() -> StoreUnavailableError:
    return StoreUnavailableError("the store client is closed")


def _subject(request: Message) -> str | None:
    value = getattr(request, "node_id", None) or None
    return str(value) if value else None


def _groups(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(ids), MAX_IDS):
        yield ids[at : at + MAX_IDS]


def _record(node_id: str, data: bytes) -> TokenRecord | None:
    if not data:
        return None
    try:
        record = TokenRecord.decode(data)
    except CorruptNodeError as error:
        log.warning("token record of %s is damaged: %s", node_id[:16], error)
        return None
    return record if record.identity.node_id == node_id else None
