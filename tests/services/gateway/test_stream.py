"""The event stream as an ASGI application: whoever leaves, nothing keeps running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest

from criticalkv.services.gateway.answer import Finished, Opened, ReplyEvent, Said
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.stream import (
    Client,
    ClientGoneError,
    EventStream,
    Opening,
    error_line,
    event_lines,
)
from criticalkv.shared.errors import DeadlineError


class Reply:
    """Says a word per event, and notes how it ended."""

    id, created, model, choices = "resp_1", 0, "tiny", 1

    def __init__(self, words: int = 3) -> None:
        self.words = words
        self.told = 0
        self.closed = False

    @property
    def usage(self) -> dict[str, Any]:
        return {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}

    async def aclose(self) -> None:
        self.closed = True

    async def events(self) -> AsyncGenerator[ReplyEvent, None]:
        yield Opened(0, self.id)
        for _ in range(self.words):
            await asyncio.sleep(0)
            self.told += 1
            yield Said(0, "word")
        yield Finished(0, "stop", {"handle": self.id})


async def never() -> Any:
    await asyncio.Event().wait()


async def run(reply: Reply, send: Any, receive: Any = never, seconds: float = 5.0) -> None:
    deadline = Deadline.after(seconds)
    events = partial(event_lines, include_usage=False)
    opening = Opening(begun(reply), deadline)
    await opening.reply()
    await EventStream(opening, events, error_line, Client(receive), deadline)({}, receive, send)


async def begun(reply: Reply) -> Reply:
    return reply


async def test_a_whole_stream_ends_once() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    reply = Reply()
    await run(reply, send)
    assert [m.get("more_body") for m in sent] == [None, *[True] * 6, False]
    assert sent[-2]["body"] == b"data: [DONE]\n\n"
    assert reply.closed


async def test_a_connection_that_broke_before_the_first_byte_closes_the_reply() -> None:
    async def send(_: Any) -> None:
        raise OSError("broken")

    reply = Reply()
    await run(reply, send)
    assert (reply.told, reply.closed) == (0, True)


async def test_a_reader_that_does_not_read_is_cut_and_buffers_nothing() -> None:
    async def send(message: Any) -> None:
        if message.get("body"):
            await never()

    reply = Reply(words=1000)
    with pytest.raises(DeadlineError):
        await run(reply, send, seconds=0.1)
    assert (reply.told, reply.closed) == (0, True)


async def test_a_client_that_leaves_while_send_blocks_closes_the_reply() -> None:
    async def receive() -> Any:
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):
            await never()

    reply = Reply()
    await run(reply, send, receive)
    assert reply.closed


async def test_work_for_a_client_that_left_has_ended_when_the_error_comes() -> None:
    ended = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await never()
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    with pytest.raises(ClientGoneError):
        await Client(receive).wait_for(work())
    assert ended == [True]
