"""What stands next to the socket: request ids, when to retry, an end for who does not read.

Wraps the gateway's app where uvicorn runs it. With Ray Serve it also wraps Serve's HTTP
proxy, which otherwise takes an answer from the gateway as fast as it comes, whatever its
client reads: there alone a slow client can be noticed. Imports nothing but Starlette.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from criticalkv.services.gateway import request_id

MAX_HEADER_BYTES = 64 * 1024
PIECE_BYTES = 64 * 1024
"""What a client must have made room for within the timeout; a long body is many of these."""
RETRY_LATER = (429, 503)
WRITE_TIMEOUT_VARIABLE = "CRITICALKV_EDGE_WRITE_TIMEOUT_S"
"""How the proxy's process learns `gateway.write_timeout_s`."""
PROXY_CALLBACK = "criticalkv.services.gateway.edge:proxy_middlewares"
"""For `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""

log = logging.getLogger(__name__)


class SlowReaderError(ConnectionError):
    """The client has read nothing for too long; its connection is cut."""


class Edge:
    """ASGI middleware: every answer carries its request's id, and none waits for a reader long.

    Whoever is to come back later is told when, whoever refused: Ray Serve does not say.

    Args:
        app: what is wrapped.
        write_timeout_s: within which a client must make room for 64 KiB more of its answer.
    """

    def __init__(self, app: ASGIApp, write_timeout_s: float) -> None:
        self._app = app
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = request_id.accept(scope["headers"])
        request_id.current.set(name.decode())
        writer = _Writer(send, name, self._write_timeout_s)
        if sum(len(key) + len(value) for key, value in scope["headers"]) > MAX_HEADER_BYTES:
            await writer.refuse()
            return
        named = {**scope, "headers": request_id.put(scope["headers"], name)}
        await self._app(named, receive, writer.send)


class _Writer:
    """Sends one answer."""

    def __init__(self, send: Send, name: bytes, timeout_s: float) -> None:
        self._send = send
        self._name = name
        self._timeout_s = timeout_s
        self._is_cut = False

    async def send(self, message: Message) -> None:
        """Send a message, or cut the connection: the app then learns that its client left.

        Raises:
            SlowReaderError: if the connection is out of reach; whoever runs the app closes it.
        """
        if self._is_cut:
            raise SlowReaderError("the connection has been cut")
        if message["type"] == "http.response.start":
            headers = request_id.put(_with_retry_after(message), self._name)
            message = {**message, "headers": headers}
        for piece in _pieces(message):
            if not await self._sent(piece):
                return

    async def _sent(self, message: Message) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            log.warning("request %s: its client does not read", self._name.decode())
            self._cut()
            return False
        return True

    async def refuse(self) -> None:
        """Answer that the headers are too large."""
        text = f"the request's headers have more than {MAX_HEADER_BYTES} bytes, the limit"
        kind = "invalid_request_error"
        error = {"message": text, "type": kind, "param": None, "code": "headers_too_large"}
        body = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close"),
                   (b"content-length", str(len(body)).encode())]  # fmt: skip
        await self.send({"type": "http.response.start", "status": 431, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    def _cut(self) -> None:
        cycle: Any = getattr(self._send, "__self__", None)  # uvicorn's, if nothing is between
        if hasattr(cycle, "transport"):
            cycle.transport.abort()  # at once: to close it is to wait for the reader
            return
        self._is_cut = True
        raise SlowReaderError("the client does not read")


def _with_retry_after(start: Message) -> list[tuple[bytes, bytes]]:
    headers = list(start.get("headers", []))
    is_said = any(name.lower() == b"retry-after" for name, _ in headers)
    if start["status"] in RETRY_LATER and not is_said:
        headers.append((b"retry-after", b"1"))
    return headers


def _pieces(message: Message) -> Iterator[Message]:
    """Yield a message, or a long body's pieces: a timeout of the whole would ask for a speed."""
    body = message.get("body", b"")
    last = max(0, len(body) - 1) // PIECE_BYTES * PIECE_BYTES
    for start in range(0, last, PIECE_BYTES):
        yield {**message, "body": body[start : start + PIECE_BYTES], "more_body": True}
    yield {**message, "body": body[last:]} if last else message


def proxy_middlewares() -> list[Middleware]:
    """Return what Ray Serve's HTTP proxy is to be wrapped in; called in its process."""
    timeout_s = float(os.environ.get(WRITE_TIMEOUT_VARIABLE, "30"))
    return [Middleware(Edge, write_timeout_s=timeout_s)]
