"""Server-sent events, and noticing that the client is gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from criticalkv.services.gateway.answer import Reply, chunk, usage_chunk
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.shared.errors import CancelledError, CriticalKVError

Value = TypeVar("Value")
DONE = b"data: [DONE]\n\n"
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
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends server-sent events until they end, the client leaves, or the deadline."""

    media_type = "text/event-stream"

    def __init__(
        self, reply: Reply, client: Client, deadline: Deadline, *, include_usage: bool
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._reply = reply
        self._include_usage = include_usage
        self._client = client
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Run as an ASGI application."""
        try:
            async with aclosing(
                event_lines(self._reply, include_usage=self._include_usage)
            ) as lines:
                await self._send(send, lines)
        except (ClientGoneError, OSError):
            log.info("a client left its stream")
        finally:
            self._client.release()
            # Closing a generator that never began does not reach the turn.
            await self._reply.aclose()

    async def _send(self, send: Send, lines: AsyncGenerator[bytes, None]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while True:
            line = await self._client.wait_for(anext(lines, b""))
            message = {"type": "http.response.body", "body": line, "more_body": bool(line)}
            # A reader that does not read holds nothing longer than the deadline.
            await self._client.wait_for(self._deadline.bound(send(message)))
            if not line:
                return


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
    except CriticalKVError as error:
        yield _line(json.dumps(error_body(error)))
    except Exception as error:
        log.error("stream failed: %s", type(error).__name__)
        yield _line(json.dumps(error_body(CriticalKVError("internal error"))))


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


def _line(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
