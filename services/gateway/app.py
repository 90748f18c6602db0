"""The HTTP routes. Each reads, checks, calls the core, and shapes the answer."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from criticalkv.services.gateway import request_id
from criticalkv.services.gateway.answer import Collector, Reply
from criticalkv.services.gateway.auth import Tenant
from criticalkv.services.gateway.body import BodyTimeoutError, read_json
from criticalkv.services.gateway.chat import Chat
from criticalkv.services.gateway.contexts import Contexts
from criticalkv.services.gateway.core import GatewayCore
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.edge import Edge
from criticalkv.services.gateway.idempotency import Idempotency, Key
from criticalkv.services.gateway.response_schemas import parse_response
from criticalkv.services.gateway.response_shape import Shape, echo, error_event
from criticalkv.services.gateway.responses import Responses
from criticalkv.services.gateway.schemas import parse_chat, parse_context
from criticalkv.services.gateway.stream import (
    Client,
    EventStream,
    Opening,
    error_body,
    error_line,
    event_lines,
    told,
)
from criticalkv.shared.errors import (
    CriticalKVError,
    InvalidRequestError,
    OverloadedError,
)

MIB = 1024 * 1024
RETRY_AFTER_S = 1.0
ALWAYS_ANSWERED = ("/health", "/metrics")  # also under full load
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
    idempotency = Idempotency(core.store, core.config.store.record_ttl_s * 1000)
    _add_chat(app, core, idempotency)
    _add_responses(app, core, idempotency)
    _add_contexts(app, core)
    _add_models(app, core)
    _add_status(app, core)
    app.add_exception_handler(CriticalKVError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_middleware(Gate, core=core)
    app.add_middleware(Edge, write_timeout_s=core.config.gateway.write_timeout_s)
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
            if _path(scope) in ALWAYS_ANSWERED:
                return await self._app(scope, receive, counted)
            return await self._admitted(scope, receive, counted)
        except Exception as error:
            name = request_id.current.get()
            log.error("request %s failed: %s", name, type(error).__name__)
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
        is_full = self._running >= core.config.gateway.max_ongoing
        if is_full and path not in ALWAYS_ANSWERED:
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


def _add_chat(app: FastAPI, core: GatewayCore, idempotency: Idempotency) -> None:
    chat = Chat(core)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = await _read(request, core)
        body = parse_chat(asked.data, core.config.gateway)

        async def start(handle: str) -> Reply:
            return await chat.start(
                asked.tenant, body, handle, asked.deadline, is_retry=asked.key is not None
            )

        run = asked.run(start, core, idempotency, body.logprobs)
        if not body.stream:
            return await _whole(asked, run, lambda reply: _collect(reply, body.logprobs))
        usage = body.stream_options.include_usage
        events = partial(event_lines, include_usage=usage)
        return await _streamed(asked, run, events, error_line)


def _add_responses(app: FastAPI, core: GatewayCore, idempotency: Idempotency) -> None:
    responses = Responses(core)

    @app.post("/v1/responses")
    async def create(request: Request) -> Response:
        asked = await _read(request, core)
        body = parse_response(asked.data, core.config.gateway)

        async def start(handle: str) -> Reply:
            return await responses.start(
                asked.tenant, body, handle, asked.deadline, is_retry=asked.key is not None
            )

        run, echoed = asked.run(start, core, idempotency, False), echo(body)
        if not body.stream:
            return await _whole(asked, run, lambda reply: Shape(reply, echoed).response())
        return await _streamed(
            asked,
            run,
            lambda reply: Shape(reply, echoed).events(),
            lambda error: error_event(error, 0),
        )

    @app.get("/v1/responses/{handle}")
    async def get(request: Request, handle: str) -> Response:
        _check_not_streamed(request)
        return JSONResponse(await responses.get(_tenant(request), handle))

    @app.delete("/v1/responses/{handle}")
    async def delete(request: Request, handle: str) -> Response:
        return JSONResponse(await responses.delete(_tenant(request), handle))


@dataclass(frozen=True)
class Asked:
    """A request that has been read.

    Attributes:
        data: its JSON.
        key: its `Idempotency-Key`.
    """

    tenant: Tenant
    data: Any
    key: str | None
    deadline: Deadline
    receive: Receive

    async def run(
        self,
        start: Callable[[str], Awaitable[Reply]],
        core: GatewayCore,
        idempotency: Idempotency,
        wants_logprobs: bool,
    ) -> Reply:
        """Start the turn under a fresh handle, or under its key's."""
        if self.key is None:
            return await start(core.new_handle("resp"))
        name = Key.of(self.tenant, self.key, self.data)
        return await idempotency.run(name, wants_logprobs, self.deadline, start)


async def _read(request: Request, core: GatewayCore) -> Asked:
    limits = core.config.gateway
    deadline = Deadline.after(limits.request_timeout_s)
    data = await read_json(request, limits.max_body_mb * MIB)
    key = request.headers.get("idempotency-key")
    return Asked(_tenant(request), data, key, deadline, request.receive)


async def _whole(
    asked: Asked, run: Awaitable[Reply], shape: Callable[[Reply], Awaitable[str]]
) -> Response:
    client, opening = Client(asked.receive), Opening(run, asked.deadline)

    async def answer() -> str:
        return await shape(await opening.reply())

    try:
        text = await client.wait_for(answer())
    finally:
        client.release()
        await opening.aclose()
    return Response(text, media_type="application/json")


async def _streamed(
    asked: Asked,
    run: Awaitable[Reply],
    events: Callable[[Reply], AsyncGenerator[bytes, None]],
    failed: Callable[[CriticalKVError], bytes],
) -> Response:
    """Answer when the turn has begun, so that early errors have a status of their own.

    When that takes long, the stream begins before: with comments that keep it alive.
    """
    client, opening = Client(asked.receive), Opening(run, asked.deadline)
    try:
        if await client.wait_for(opening.is_soon_done()):
            await opening.reply()
    except BaseException:
        client.release()
        await opening.aclose()
        raise
    return EventStream(opening, events, failed, client, asked.deadline)


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
    error = told(error)
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


def _check_not_streamed(request: Request) -> None:
    if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
        raise InvalidRequestError("stream: a stored response is not streamed", param="stream")


def _path(scope: Scope) -> str:
    """The path below the mount point, as routes see it."""
    root = scope.get("root_path", "")
    return str(scope["path"]).removeprefix(root) if root else str(scope["path"])


def _authorization(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value).decode("latin-1")
    return ""
