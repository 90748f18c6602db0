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
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.shared.cache.manifest import (
    Manifest,
    decode_manifest,
    encode_manifest,
    verify_segment,
)
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import (
    AuthenticationError,
    CancelledError,
    ConfigError,
    ContextNotFoundError,
    CorruptNodeError,
    CriticalKVError,
    DeadlineError,
    IdempotencyConflictError,
    InvalidRequestError,
    LeaseLostError,
    NodeMissingError,
    OverloadedError,
    QuotaExceededError,
    StoreFullError,
    StoreUnavailableError,
)
from criticalkv.shared.frames import (
    MAX_MESSAGE_BYTES,
    Buffer,
    FrameError,
    decode_get,
    encode_segment,
)
from criticalkv.shared.loopback import is_local_address

log = logging.getLogger(__name__)

SERVICE = "criticalkv.store.v1.CacheStore"
READ_TIMEOUT_S = 30.0
"""Default deadline of a read: the store keeps replaced segments this long."""
QUEUED_FRAMES = 4
"""Frames that a writer may be ahead of the network, 1 MiB each."""
MAX_IDS = 256
MIN_TOKEN_CHARS = 16
CHECK_S = 0.1
"""How often a waiting writer looks whether it should go on."""
ATTEMPTS = 4
BACKOFF_S = 0.05
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    # A restarted store is found again within seconds, not minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name the time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A store whose machine vanished is noticed in 15 s, also while a call waits for it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
]

_In = TypeVar("_In", bound=Message)
_Out = TypeVar("_Out", bound=Message)
_T = TypeVar("_T")


@dataclass(frozen=True)
class StoreCredentials:
    """What a client needs for a store on another machine.

    Attributes:
        tls_ca: PEM of the certificate authority to trust, or None for no TLS.
        token: bearer token of every call, or "".
    """

    tls_ca: bytes | None = None
    token: str = ""

    @classmethod
    def of(cls, config: StoreConfig) -> StoreCredentials | None:
        """Read the files that a configuration names; None if it names none.

        Raises:
            ConfigError: if a file cannot be read, or the token would go in the clear.
        """
        token = read_token(config.token_file)
        try:
            ca = Path(config.tls_ca).read_bytes() if config.tls_ca else None
        except OSError as error:
            raise ConfigError(f"cannot read store.tls_ca: {error}", param="store.tls_ca") from error
        if token and not ca and not is_local_address(config.address):
            raise ConfigError(
                "store.tls_ca is needed: the token must not travel in the clear",
                param="store.tls_ca",
            )
        return cls(ca, token) if ca or token else None


def read_token(path: str) -> str:
    """Return the bearer token in a file; "" without a path.

    Raises:
        ConfigError: if the file cannot be read, or holds less than 16 characters.
    """
    if not path:
        return ""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("cannot read store.token_file", param="store.token_file") from error
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"store.token_file must hold at least {MIN_TOKEN_CHARS} printable ASCII characters",
            param="store.token_file",
        )
    return token


class StoreClient:
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
    ) -> None:
        """Prepare a client.

        Args:
            address: `host:port` or `unix:path`.
            timeout_s: deadline of each call that moves no payload, with its retries.
            credentials: for a store on another machine.
        """
        self.address = address
        self.timeout_s = timeout_s
        self._credentials = credentials or StoreCredentials()
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._calls: dict[str, Callable[..., Any]] = {}
        self._closed = False

    @classmethod
    def of(cls, config: StoreConfig, timeout_s: float = 10.0) -> StoreClient:
        """Return a client for a configuration. Raises as StoreCredentials.of."""
        return cls(config.address, timeout_s=timeout_s, credentials=StoreCredentials.of(config))

    def close(self) -> None:
        """Close the channel; running calls end with an error. Idempotent."""
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
            self._calls.clear()
        if channel is not None:
            channel.close()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

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
        return NodeWriter(self._call("PutNode"), self._metadata(), begin, timeout_s, check)

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
            CorruptNodeError: if the manifest is damaged or of another node; it has
                then been dropped from the store.
        """
        if layers is not None and not layers:
            layers = range(1, 1)  # on the wire an end of 0 means all layers
        request = pb.GetNodeRequest(
            node_id=node_id,
            tier=tier or "",
            layer_begin=layers.start if layers is not None else 0,
            layer_end=layers.stop if layers is not None else 0,
            byte_limit=byte_limit or 0,
        )
        call = self._call("GetNode")(
            request, timeout=timeout_s or READ_TIMEOUT_S, metadata=self._metadata()
        )
        return NodeReader(self, call, request, layers)

    # --------------------------------------------------------------- nodes

    def stat(self, node_ids: Sequence[str]) -> list[pb.NodeStat]:
        """Describe nodes, in the order asked; absent ones have `present` False."""
        out: list[pb.NodeStat] = []
        for ids in _groups(node_ids):
            response = self._idempotent("StatNodes", pb.StatNodesRequest(node_ids=ids))
            out += response.nodes
        return out

    def delete_node(self, node_id: str, expected_attempt: str = "") -> bool:
        """Drop a node's KV, if its manifest names the attempt; return whether it went."""
        request = pb.DeleteNodeRequest(node_id=node_id, expected_attempt=expected_attempt)
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
        try:
            response = check(request, timeout=min(self.timeout_s, 2.0), metadata=self._metadata())
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

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
        try:
            return self._call(method)(request, timeout=timeout_s, metadata=self._metadata())
        except grpc.RpcError as error:
            raise typed_error(error, _subject(request)) from error
        except ValueError as error:  # grpc's answer to a call on a closed channel
            raise StoreUnavailableError(f"the store client is closed: {error}") from error

    def _metadata(self) -> list[tuple[str, str]]:
        token = self._credentials.token
        return [("authorization", f"Bearer {token}")] if token else []

    def _call(self, method: str) -> Callable[..., Any]:
        self._open()
        with self._lock:
            if self._closed:
                raise StoreUnavailableError("the store client is closed")
            return self._calls[method]

    def _open(self) -> grpc.Channel:
        with self._lock:
            if self._closed:
                raise StoreUnavailableError("the store client is closed")
            if self._channel is None:
                self._channel = _channel(self.address, self._credentials.tls_ca)
                self._calls = _callables(self._channel)
            return self._channel


class NodeWriter:
    """Writes one node. Leaving the context without `commit` publishes nothing.

    Not for several threads at once.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        metadata: list[tuple[str, str]],
        begin: pb.PutBegin,
        timeout_s: float,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._node_id = begin.node_id
        self._check = check
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUED_FRAMES)
        self._ended = threading.Event()
        self._count = 0
        self._committed = False
        self._queue.put(pb.PutFrame(begin=begin).SerializeToString())
        self._future = call.future(self._frames(), timeout=timeout_s, metadata=metadata)  # type: ignore[attr-defined]
        self._future.add_done_callback(lambda _: self._end())

    def send(self, payload: Buffer) -> None:
        """Send the next segment; the buffer may be reused afterwards.

        Blocks while the network is more than a few frames behind.

        Raises:
            CriticalKVError: the typed error of the stream, if it has failed.
            Exception: whatever `check` raised; the put is aborted.
        """
        self._enqueue(encode_segment(self._count, payload))
        self._count += 1

    def commit(
        self, manifest: Manifest, token_record: TokenRecord, *, ttl_ms: int = 0
    ) -> pb.PutResult:
        """Publish the node and wait for the store's answer.

        Args:
            manifest: names exactly the segments that were sent.
            token_record: the node's tokens and identity.
            ttl_ms: life of the node; 0 = the store's default.

        Raises:
            LeaseLostError: if another holds the node's lease by now.
            StoreFullError: if the node does not fit.
            InvalidRequestError: if manifest and segments differ.
            NodeMissingError: if the parent was deleted meanwhile.
            Exception: whatever `check` raised. The put is aborted, but the node may have
                been published at that moment.
        """
        commit = pb.PutCommit(
            segment_count=self._count,
            manifest_parts=encode_manifest(manifest),
            token_record=token_record.encode(),
            ttl_ms=ttl_ms,
        )
        self._enqueue(pb.PutFrame(commit=commit).SerializeToString())
        self._committed = True
        self._enqueue(None)
        return self._result()

    def close(self) -> None:
        """Cancel the put unless it was committed. Idempotent."""
        if not self._committed:
            self._future.cancel()
        self._end()

    def __enter__(self) -> NodeWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _enqueue(self, frame: bytes | None) -> None:
        while not self._ended.is_set():
            try:
                self._queue.put(frame, timeout=CHECK_S)
                return
            except queue.Full:
                self._look()
        if frame is not None:
            self._result()
            raise StoreUnavailableError("the put has ended already")

    def _result(self) -> pb.PutResult:
        while True:
            try:
                result: pb.PutResult = self._future.result(CHECK_S)
            except grpc.FutureTimeoutError:
                self._look()
            except grpc.FutureCancelledError as error:
                raise CancelledError("the put was cancelled") from error
            except grpc.RpcError as error:
                raise typed_error(error, self._node_id) from error
            else:
                return result

    def _look(self) -> None:
        try:
            if self._check is not None:
                self._check()
        except BaseException:
            self._future.cancel()
            self._end()
            raise

    def _frames(self) -> Iterator[bytes]:
        # Runs in a thread of gRPC. Nothing but the end of the call stops it early.
        while not self._ended.is_set():
            try:
                frame = self._queue.get(timeout=0.5)
            except queue.Empty:
                continue
            if frame is None:
                return
            yield frame

    def _end(self) -> None:
        self._ended.set()


class NodeReader:
    """Reads one node. Leaving the context cancels what was not read.

    Attributes:
        manifest: checked, and of the node that was asked for.
        tier: the tier that is read.
        generation: of the manifest that this read is served from.
    """

    def __init__(
        self, client: StoreClient, call: Any, request: pb.GetNodeRequest, layers: range | None
    ) -> None:
        self._client = client
        self._call = call
        self._node_id = request.node_id
        self._attempt = ""
        try:
            self._read_header(layers)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[tuple[int, memoryview]]:
        """Yield (segment index, payload) in read order, each verified.

        Raises:
            NodeMissingError: if the node vanished meanwhile.
            CorruptNodeError: if a segment is damaged; the node has then been dropped.
        """
        for expected in self._order:
            frame, payload = self._next()
            if not frame.HasField("segment") or frame.segment.index != expected:
                self._refuse(f"segment {expected} is missing from the stream")
            try:
                verify_segment(self.manifest, expected, payload)
            except CorruptNodeError as error:
                self._refuse(error.message)
            yield expected, payload
        self._expect_end()

    def close(self) -> None:
        """Cancel the stream. Idempotent."""
        self._call.cancel()

    def __enter__(self) -> NodeReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _read_header(self, layers: range | None) -> None:
        frame, _ = self._next()
        if not frame.HasField("header"):
            self._refuse("the stream does not begin with a header")
        try:
            self.manifest = decode_manifest(frame.header.manifest_parts)
        except CorruptNodeError as error:
            self._refuse(error.message)
        self._attempt = self.manifest.attempt
        if self.manifest.node_id != self._node_id:
            self._refuse("the manifest is of another node")
        self.tier = frame.header.tier
        self.generation = frame.header.generation
        if self.tier not in self.manifest.tiers:
            self._refuse("the tier served is not stored")
        self._order = self.manifest.read_order(
            self.tier, range(self.manifest.num_layers) if layers is None else layers
        )
        if frame.header.segment_count != len(self._order):
            self._refuse("the stream has a wrong number of segments")

    def _next(self) -> tuple[pb.GetFrame, memoryview]:
        try:
            return decode_get(next(self._call))
        except StopIteration:
            self._refuse("the stream ended early")
        except grpc.RpcError as error:
            raise typed_error(error, self._node_id) from error
        except FrameError as error:
            self._refuse(str(error))

    def _expect_end(self) -> None:
        try:
            next(self._call)
        except StopIteration:
            return
        except grpc.RpcError as error:
            raise typed_error(error, self._node_id) from error
        self._refuse("the stream has more segments than announced")

    def _refuse(self, why: str) -> NoReturn:
        # Damaged for us is damaged for all: dropped, unless a newer writer replaced it.
        self.close()
        try:
            self._client.delete_node(self._node_id, self._attempt)
        except CriticalKVError as error:
            log.warning("cannot drop the damaged node %s: %s", self._node_id[:16], error)
        raise CorruptNodeError.of(self._node_id, why)


_BY_STATUS: dict[grpc.StatusCode, type[CriticalKVError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.NOT_FOUND: NodeMissingError,
    grpc.StatusCode.ALREADY_EXISTS: IdempotencyConflictError,
    grpc.StatusCode.FAILED_PRECONDITION: LeaseLostError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: StoreUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledError,
}
_BY_CODE: dict[str, type[CriticalKVError]] = {
    kind.code: kind for kind in (StoreFullError, QuotaExceededError, ContextNotFoundError)
}


def typed_error(error: grpc.RpcError, subject: str | None = None) -> CriticalKVError:
    """Return the typed error of a failed call.

    Args:
        error: as raised by grpc.
        subject: the node or field that the call was about.
    """
    status, message = error.code(), error.details() or "no details"
    trailing: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
    kind = _BY_CODE.get(str(trailing.get("ckv-code", ""))) or _BY_STATUS.get(
        status, CriticalKVError
    )
    retry_after_s = 1.0 if issubclass(kind, OverloadedError | StoreUnavailableError) else None
    return kind(f"store: {message}", param=subject, retry_after_s=retry_after_s)


def _subject(request: Message) -> str | None:
    value = getattr(request, "node_id", None) or None
    return str(value) if value else None


def _channel(address: str, tls_ca: bytes | None) -> grpc.Channel:
    if tls_ca is None:
        return grpc.insecure_channel(address, OPTIONS)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(tls_ca), OPTIONS)


def _callables(channel: grpc.Channel) -> dict[str, Callable[..., Any]]:
    service = pb.DESCRIPTOR.services_by_name["CacheStore"]
    out: dict[str, Callable[..., Any]] = {}
    for method in service.methods:
        reply = getattr(pb, method.output_type.name)
        path = f"/{SERVICE}/{method.name}"
        if method.name == "PutNode":
            out[method.name] = channel.stream_unary(path, None, reply.FromString)
        elif method.name == "GetNode":
            out[method.name] = channel.unary_stream(path, _serialize, None)
        else:
            out[method.name] = channel.unary_unary(path, _serialize, reply.FromString)
    return out


def _serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data


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
