"""The RPCs: each checks its request, calls one component, and answers.

Typed errors become a gRPC status here and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import checks
from criticalkv.services.store.aliases import Aliases
from criticalkv.services.store.get import Reader
from criticalkv.services.store.handles import Handles
from criticalkv.services.store.leases import Leases
from criticalkv.services.store.metrics import METRICS
from criticalkv.services.store.nodes import Nodes
from criticalkv.services.store.offer import Offer
from criticalkv.services.store.put import Writer
from criticalkv.services.store.requests import Requests
from criticalkv.services.store.running_calls import RunningCalls
from criticalkv.services.store.security import Security
from criticalkv.shared import errors
from criticalkv.shared.frames import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

SERVICE = "criticalkv.store.v1.CacheStore"
ERROR_CODE = "ckv-code"
"""Trailing metadata: the typed error's `code`."""
STATUS: list[tuple[type[errors.CriticalKVError], grpc.StatusCode]] = [
    (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.AuthenticationError, grpc.StatusCode.UNAUTHENTICATED),
    (errors.NodeMissingError, grpc.StatusCode.NOT_FOUND),
    (errors.ContextNotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.IdempotencyConflictError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.LeaseLostError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.StoreUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.CancelledError, grpc.StatusCode.CANCELLED),
]
_Context = grpc.aio.ServicerContext[Any, Any]
_In = TypeVar("_In", bound=Message)
_Out = TypeVar("_Out", bound=Message)


class Service:
    """All RPCs of the CacheStore."""

    def __init__(
        self,
        security: Security,
        writer: Writer,
        reader: Reader,
        nodes: Nodes,
        handles: Handles,
        requests: Requests,
        aliases: Aliases,
        leases: Leases,
        offer: Offer,
        calls: RunningCalls,
        node_ttl_ms: int,
        read_deadline_s: float,
    ) -> None:
        self._security = security
        self._writer = writer
        self._reader = reader
        self._nodes = nodes
        self._handles = handles
        self._requests = requests
        self._aliases = aliases
        self._leases = leases
        self._offer = offer
        self._calls = calls
        self._node_ttl_ms = node_ttl_ms
        self._read_deadline_s = read_deadline_s

    def handler(self) -> grpc.GenericRpcHandler:
        """The handlers by method name. Frames of both streams stay raw bytes."""
        unary: list[tuple[str, Callable[[Any], Awaitable[Message]], type[Message]]] = [
            ("StatNodes", self.stat_nodes, pb.StatNodesRequest),
            ("DeleteNode", self.delete_node, pb.DeleteNodeRequest),
            ("Pin", self.pin, pb.PinRequest),
            ("Unpin", self.unpin, pb.PinRequest),
            ("Touch", self.touch, pb.TouchRequest),
            ("BindHandle", self._handles.bind, pb.BindHandleRequest),
            ("ResolveHandle", self.resolve_handle, pb.ResolveHandleRequest),
            ("MoveHandle", self._handles.move, pb.MoveHandleRequest),
            ("ListHandles", self.list_handles, pb.ListHandlesRequest),
            ("DeleteHandle", self.delete_handle, pb.DeleteHandleRequest),
            ("BeginRequest", self._requests.begin, pb.BeginRequestRequest),
            ("FinishRequest", self.finish_request, pb.FinishRequestRequest),
            ("LinkBetter", self.link_better, pb.LinkBetterRequest),
            ("PutAlias", self.put_alias, pb.PutAliasRequest),
            ("ResolveAliases", self.resolve_aliases, pb.ResolveAliasesRequest),
            ("GetTokenRecords", self.get_token_records, pb.GetTokenRecordsRequest),
            ("AcquireLease", self._leases.acquire, pb.AcquireLeaseRequest),
            ("ReleaseLease", self.release_lease, pb.ReleaseLeaseRequest),
        ]
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: self._unary(function, kind) for name, function, kind in unary
        }
        methods["PutNode"] = grpc.stream_unary_rpc_method_handler(
            self._put_node, None, pb.PutResult.SerializeToString
        )
        methods["GetNode"] = grpc.unary_stream_rpc_method_handler(
            self._get_node, pb.GetNodeRequest.FromString, None
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def stat_nodes(self, request: pb.StatNodesRequest) -> pb.StatNodesResponse:
        """See the proto, as for all methods below."""
        return pb.StatNodesResponse(nodes=await self._nodes.stat(_ids(request.node_ids)))

    async def delete_node(self, request: pb.DeleteNodeRequest) -> pb.DeleteNodeResponse:
        if request.expected_attempt:
            checks.attempt(request.expected_attempt)
        node_id = checks.node_id(request.node_id)
        if request.unreferenced:
            gone = await self._nodes.delete_unreferenced(node_id)
            return pb.DeleteNodeResponse(deleted=node_id in gone)
        outcome, _ = await self._nodes.drop(
            node_id, request.expected_attempt, generation=request.expected_generation
        )
        return pb.DeleteNodeResponse(deleted=outcome == "dropped")

    async def link_better(self, request: pb.LinkBetterRequest) -> pb.LinkBetterResponse:
        node_id = checks.node_id(request.node_id)
        better_id = checks.node_id(request.better_id, "better_id")
        if node_id == better_id:
            raise errors.InvalidRequestError("both nodes are the same", param="better_id")
        return pb.LinkBetterResponse(linked=await self._nodes.link_better(node_id, better_id))

    async def pin(self, request: pb.PinRequest) -> pb.PinResponse:
        tenant, node_id = checks.tenant(request.tenant), checks.node_id(request.node_id)
        return pb.PinResponse(pins=await self._nodes.pin(tenant, node_id))

    async def unpin(self, request: pb.PinRequest) -> pb.PinResponse:
        tenant, node_id = checks.tenant(request.tenant), checks.node_id(request.node_id)
        return pb.PinResponse(pins=await self._nodes.unpin(tenant, node_id))

    async def touch(self, request: pb.TouchRequest) -> pb.TouchResponse:
        ttl_ms = checks.ttl(request.ttl_ms, self._node_ttl_ms)
        present = await self._nodes.touch(checks.node_id(request.node_id), ttl_ms)
        return pb.TouchResponse(present=present)

    async def resolve_handle(self, request: pb.ResolveHandleRequest) -> pb.Handle:
        return await self._handles.resolve(request.tenant, request.handle)

    async def list_handles(self, request: pb.ListHandlesRequest) -> pb.ListHandlesResponse:
        return pb.ListHandlesResponse(handles=await self._handles.list_of(request))

    async def delete_handle(self, request: pb.DeleteHandleRequest) -> pb.DeleteHandleResponse:
        gone = await self._handles.delete(request.tenant, request.handle)
        return pb.DeleteHandleResponse(deleted_nodes=gone)

    async def finish_request(self, request: pb.FinishRequestRequest) -> pb.FinishRequestResponse:
        return pb.FinishRequestResponse(stored=await self._requests.finish(request))

    async def put_alias(self, request: pb.PutAliasRequest) -> pb.PutAliasResponse:
        await self._aliases.put(request)
        return pb.PutAliasResponse()

    async def resolve_aliases(self, request: pb.ResolveAliasesRequest) -> pb.ResolveAliasesResponse:
        return pb.ResolveAliasesResponse(entries=await self._aliases.resolve(request.aliases))

    async def get_token_records(
        self, request: pb.GetTokenRecordsRequest
    ) -> pb.GetTokenRecordsResponse:
        response = pb.GetTokenRecordsResponse(
            records=await self._nodes.records(_ids(request.node_ids))
        )
        if response.ByteSize() > MAX_MESSAGE_BYTES:
            raise errors.InvalidRequestError(
                f"the records exceed one message ({MAX_MESSAGE_BYTES} bytes); ask for fewer",
                param="node_ids",
            )
        return response

    async def release_lease(self, request: pb.ReleaseLeaseRequest) -> pb.ReleaseLeaseResponse:
        return pb.ReleaseLeaseResponse(released=await self._leases.release(request))

    async def _put_node(self, frames: AsyncIterator[bytes], context: _Context) -> pb.PutResult:
        try:
            with self._admitted(context):
                return await self._writer.put(frames)
        except Exception as error:
            await _abort(context, error)

    async def _get_node(self, request: pb.GetNodeRequest, context: _Context) -> None:
        # No generator: its caller's limit would not reach it while a frame is being sent.
        try:
            with self._admitted(context):
                offered = await self._offered(request, context)
                async with (
                    asyncio.timeout(self._read_deadline_s),
                    aclosing(self._reader.get(request, offered)) as frames,
                ):
                    async for frame in frames:
                        await context.write(frame)
        except TimeoutError:
            limit = errors.DeadlineError(
                f"a read may take store.read_deadline_s ({self._read_deadline_s:g} s)"
            )
            await _abort(context, limit)
        except Exception as error:
            await _abort(context, error)

    def _unary(
        self, function: Callable[[_In], Awaitable[_Out]], kind: type[_In]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def call(request: _In, context: _Context) -> _Out:
            try:
                with self._admitted(context):
                    return await function(request)
            except Exception as error:
                await _abort(context, error)

        return grpc.unary_unary_rpc_method_handler(
            call, kind.FromString, lambda message: message.SerializeToString()
        )

    async def _offered(
        self, request: pb.GetNodeRequest, context: _Context
    ) -> pb.RedisLocation | None:
        if not request.direct:
            return None
        return await self._offer.location(request.node_id, context.peer())

    def _admitted(self, context: _Context) -> AbstractContextManager[None]:
        if not self._security.admits(context.invocation_metadata()):
            raise errors.AuthenticationError("the bearer token is missing or wrong")
        if context.time_remaining() is None:
            raise errors.InvalidRequestError("every call needs a deadline", param="deadline")
        return self._calls.one(context.peer())


async def _abort(context: _Context, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, errors.CriticalKVError):
        log.error("a call failed", exc_info=error)
        error = errors.CriticalKVError("internal error of the store")
    METRICS.errors.labels(error.code).inc()
    status = next((s for kind, s in STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    await context.abort(status, error.message, ((ERROR_CODE, error.code),))
    raise asyncio.CancelledError  # abort always raises; this is for type checkers


def _ids(values: Any) -> list[str]:
    return checks.node_ids(list(values))
