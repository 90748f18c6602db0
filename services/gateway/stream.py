"""Server-sent events, and noticing that the client is gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from criticalkv.services.gateway import request_id
from criticalkv.services.gateway.answer import Reply, chunk, usage_chunk
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.shared.errors import (
    CancelledError,
    CriticalKVError,
    NodeMissingError,
    StoreUnavailableError,
)

Value = TypeVar("Value")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients ignore it, proxies see traffic
KEEP_ALIVE_S = 15.0
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

log = logging.getLogger(__name__)


class ClientGoneError(CancelledError):
    """The client closed its connection."""


class Client:
    """The other end of a request whose body has been read.

    The only reader of `receive` from then on.
    """

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.create_task(_until_disconnect(receive))

    def release(self) -> None:
        """Stop watching."""
        self._gone.cancel()

    async def wait_for(self, work: Awaitable[Value]) -> Value:
        """Await `work` as long as the client is there.

        Raises:
            ClientGoneError: if it leaves; the work is cancelled and has ended.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError("the client went away")
            return task.result()
        finally:
            if not task.done():
                await _stop(task)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Opening:
    """A reply on its way to its first event. Whoever has it closes it.

    Args:
        work: gives the reply.
        deadline: for it.
    """

    def __init__(self, work: Awaitable[Reply], deadline: Deadline) -> None:
        self._task = asyncio.ensure_future(deadline.bound(work))

    async def is_soon_done(self) -> bool:
        """Wait for the reply, or its failure, as long as a client may hear nothing."""
        done, _ = await asyncio.wait({self._task}, timeout=KEEP_ALIVE_S)
        return bool(done)

    async def reply(self) -> Reply:
        """Return the reply, or raise what made it fail."""
        return await self._task

    async def aclose(self) -> None:
        """Cancel whatever runs. Idempotent."""
        await _stop(self._task)
        # Closing a generator that never began does not reach the turn.
        if not self._task.cancelled() and self._task.exception() is None:
            await self._task.result().aclose()


class EventStream(Response):
    """Sends server-sent events until they end, the client leaves, or the deadline.

    Args:
        opening: the reply, which may be there already; closed in the end.
        events: makes the stream of a reply.
        failed: makes its last event where there is no reply.
        client: released in the end.
        deadline: of the request.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        opening: Opening,
        events: Callable[[Reply], AsyncGenerator[bytes, None]],
        failed: Callable[[CriticalKVError], bytes],
        client: Client,
        deadline: Deadline,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._opening = opening
        self._events = events
        self._failed = failed
        self._client = client
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Run as an ASGI application."""
        try:
            async with aclosing(self._lines()) as lines:
                await self._send(send, lines)
        except (ClientGoneError, OSError):
            log.info("request %s: the client left its stream", request_id.current.get())
        finally:
            self._client.release()
            await self._opening.aclose()

    async def _lines(self) -> AsyncGenerator[bytes, None]:
        try:
            reply = await self._opening.reply()
        except Exception as error:
            yield self._failed(told(error))
            return
        async with aclosing(self._events(reply)) as events:
            async for line in events:
                yield line

    async def _send(self, send: Send, lines: AsyncGenerator[bytes, None]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(with_keep_alive(lines)) as alive:
            while True:
                line = await self._client.wait_for(anext(alive, b""))
                message = {"type": "http.response.body", "body": line, "more_body": bool(line)}
                # A reader that does not read holds nothing longer than the deadline.
                await self._client.wait_for(self._deadline.bound(send(message)))
                if not line:
                    return


async def with_keep_alive(lines: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the lines, and a comment wherever none comes for long."""
    task: asyncio.Task[bytes] | None = None
    try:
        while True:
            task = task or asyncio.ensure_future(anext(lines, b""))
            done, _ = await asyncio.wait({task}, timeout=KEEP_ALIVE_S)
            if not done:
                yield KEEP_ALIVE
                continue
            line, task = task.result(), None
            if not line:
                return
            yield line
    finally:
        if task is not None:
            await _stop(task)


async def event_lines(reply: Reply, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """Yield a reply as OpenAI's chunks. After an error there is no `[DONE]`."""
    try:
        async with aclosing(reply.events()) as events:
            async for event in events:
                item = chunk(reply, event, usage_later=include_usage)
                yield _line(item.model_dump_json(exclude_unset=True))
        if include_usage:
            yield _line(usage_chunk(reply).model_dump_json(exclude_unset=True))
        yield DONE
    except Exception as error:
        yield error_line(told(error))


def told(error: Exception) -> CriticalKVError:
    """Return the error that a client is told."""
    if isinstance(error, NodeMissingError):
        return StoreUnavailableError("a stored context kept vanishing; retry")
    if isinstance(error, CriticalKVError):
        return error
    # Its text may hold anything.
    log.error("request %s failed: %s", request_id.current.get(), type(error).__name__)
    return CriticalKVError("internal error")


def error_line(error: CriticalKVError) -> bytes:
    """Return the event that ends a stream of chunks without `[DONE]`."""
    return _line(json.dumps(error_body(error)))


def error_body(error: CriticalKVError) -> dict[str, Any]:
    """Return OpenAI's error JSON."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


async def _stop(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _line(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
