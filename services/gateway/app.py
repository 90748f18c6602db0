"""The HTTP routes. Each reads, checks, calls the core, and shapes the answer."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from criticalkv.services.gateway.answer import Collector, Reply
from criticalkv.services.gateway.auth import Tenant
from criticalkv.services.gateway.body import BodyTimeoutError, read_json
from criticalkv.services.gateway.chat import Chat
from criticalkv.services.gateway.contexts import Contexts
from criticalkv.services.gateway.core import GatewayCore
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.idempotency import Idempotency, Key
from criticalkv.services.gateway.schemas import ChatRequest, parse_chat, parse_context
from criticalkv.services.gateway.stream import Client, EventStream, error_body
from criticalkv.shared.errors import (
    CriticalKVError,
    InvalidRequestError,
    NodeMissingError,
    OverloadedError,
    StoreUnavailableError,
)

MIB = 1024 * 1024
RETRY_AFTER_S = 1.0
MAX_LISTED = 1000

log = logging.getLogger(__name__)


def build_app(core: GatewayCore) -> FastAPI:
    """Return the gateway as an ASGI application; it closes the core when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await core.aclose()

    app = FastAPI(
        title="CriticalKV", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan
    )
    _add_chat(app, core)
    _add_contexts(app, core)
    _add_models(app, core)
    _add_status(app, core)
    app.add_exception_handler(CriticalKVError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_middleware(Gate, core=core)
    return app


class Gate:
    """In front of every route: authentication, admission, counting. Deny by default."""

    def __init__(self, app: ASGIApp, core: GatewayCore) -> None:
        self._app = app
        self._core = core
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started: list[int] = []
        counted = self._counted(scope, send, started)
        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                return await error_response(refusal)(scope, receive, counted)
            if scope["method"] != "POST":
                return await self._app(scope, receive, counted)
            return await self._admitted(scope, receive, counted)
        except Exception as error:
            log.error("request failed: %s", type(error).__name__)
            if started:
                raise  # too late for an answer: the connection is cut
            return await error_response(CriticalKVError("internal error"))(scope, receive, counted)

    def _refusal(self, scope: Scope) -> CriticalKVError | None:
        core, path = self._core, _path(scope)
        try:
            if not core.auth.is_open(path):
                scope.setdefault("state", {})["tenant"] = core.auth.tenant(_authorization(scope))
        except CriticalKVError as error:
            return error
        if scope["method"] == "POST" and self._running >= core.config.gateway.max_ongoing:
            return OverloadedError("too many requests are running", retry_after_s=RETRY_AFTER_S)
        return None

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._running += 1
        self._core.metrics.running.inc()
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
            self._core.metrics.running.dec()

    def _counted(self, scope: Scope, send: Send, started: list[int]) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._core.metrics.answered(route, message["status"])
                started.append(message["status"])
            await send(message)

        return counted


def _add_chat(app: FastAPI, core: GatewayCore) -> None:
    chat = Chat(core)
    idempotency = Idempotency(core.store, core.config.store.record_ttl_s * 1000)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        deadline = Deadline.after(core.config.gateway.request_timeout_s)
        data = await read_json(request, core.config.gateway.max_body_mb * MIB)
        body = parse_chat(data, core.config.gateway)
        tenant = _tenant(request)
        key = request.headers.get("idempotency-key")

        async def start(handle: str) -> Reply:
            return await chat.start(tenant, body, handle, deadline, is_retry=key is not None)

        async def run() -> Reply:
            if key is None:
                return await start(core.new_handle("resp"))
            name = Key.of(tenant, key, data)
            return await idempotency.run(name, body.logprobs, deadline, start)

        return await _answer(body, run, Client(request.receive), deadline)


async def _answer(
    body: ChatRequest, run: Callable[[], Awaitable[Reply]], client: Client, deadline: Deadline
) -> Response:
    try:
        reply = await client.wait_for(deadline.bound(run()))
    except BaseException:
        client.release()
        raise
    if body.stream:  # which now owns client and reply
        usage = body.stream_options.include_usage
        return EventStream(reply, client, deadline, include_usage=usage)
    try:
        completion = await client.wait_for(_collect(reply, body.logprobs))
    finally:
        client.release()
        await reply.aclose()
    return Response(completion, media_type="application/json")


async def _collect(reply: Reply, wants_logprobs: bool) -> str:
    collector = Collector(reply, wants_logprobs)
    async with aclosing(reply.events()) as events:
        async for event in events:
            collector.add(event)
    return collector.completion().model_dump_json(exclude_unset=True)


def _add_contexts(app: FastAPI, core: GatewayCore) -> None:
    contexts = Contexts(core)

    @app.post("/v1/contexts")
    async def create(request: Request) -> Response:
        deadline = Deadline.after(core.config.gateway.request_timeout_s)
        data = await read_json(request, core.config.gateway.max_body_mb * MIB)
        body = parse_context(data, core.config.gateway)
        client = Client(request.receive)
        try:
            work = deadline.bound(contexts.create(_tenant(request), body, deadline))
            return JSONResponse(await client.wait_for(work))
        finally:
            client.release()

    @app.get("/v1/contexts")
    async def list_(request: Request) -> dict[str, Any]:
        return await contexts.all(_tenant(request), _list_limit(request))

    @app.get("/v1/contexts/{handle}")
    async def get(request: Request, handle: str) -> dict[str, Any]:
        return await contexts.get(_tenant(request), handle)

    @app.delete("/v1/contexts/{handle}")
    async def delete(request: Request, handle: str) -> dict[str, Any]:
        return await contexts.delete(_tenant(request), handle)

    @app.post("/v1/contexts/{handle}/pin")
    async def pin(request: Request, handle: str) -> dict[str, Any]:
        return await contexts.pin(_tenant(request), handle, keep=True)

    @app.post("/v1/contexts/{handle}/unpin")
    async def unpin(request: Request, handle: str) -> dict[str, Any]:
        return await contexts.pin(_tenant(request), handle, keep=False)


def _add_models(app: FastAPI, core: GatewayCore) -> None:
    model = {"id": core.model.name, "object": "model", "created": 0, "owned_by": "criticalkv"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one(name: str) -> dict[str, Any]:
        core.check_model(name)
        return model


def _add_status(app: FastAPI, core: GatewayCore) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        well = await core.store.healthy()
        status = "ok" if well else "store unavailable"
        return JSONResponse({"status": status}, status_code=200 if well else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(core.metrics.text(), media_type="text/plain; version=0.0.4")


def error_response(error: CriticalKVError) -> JSONResponse:
    """Return an error as OpenAI's JSON with its status."""
    if isinstance(error, NodeMissingError):
        error = StoreUnavailableError("a stored context kept vanishing; retry")
    headers = {}
    if error.http_status in (429, 503):
        seconds = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    if isinstance(error, BodyTimeoutError):
        headers["connection"] = "close"  # the rest of the body is no next request
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, CriticalKVError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:200]}: {error.detail}"
    body = error_body(InvalidRequestError(text))
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def _tenant(request: Request) -> Tenant:
    tenant = request.state.tenant
    assert isinstance(tenant, Tenant)
    return tenant


def _list_limit(request: Request) -> int:
    text = request.query_params.get("limit", "100")
    if not (text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= MAX_LISTED):
        raise InvalidRequestError(f"limit: 1 to {MAX_LISTED}", param="limit")
    return int(text)


def _path(scope: Scope) -> str:
    """The path below the mount point, as routes see it."""
    root = scope.get("root_path", "")
    return str(scope["path"]).removeprefix(root) if root else str(scope["path"])


def _authorization(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value).decode("latin-1")
    return ""
