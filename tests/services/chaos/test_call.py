"""A client notes what came, and does not take half of it for the whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from criticalkv.services.chaos.call import Caller
from criticalkv.services.chaos.history import Record

EXTENSION = {"handle": "resp_1", "tier": "0.4", "published": True}
USAGE = {"prompt_tokens_details": {"cached_tokens": 7}}
EVENTS = {"content-type": "text/event-stream"}


def chunk(text: str = "", finish: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return {"id": "resp_1", "choices": [choice], **fields}


def lines(*events: dict[str, Any], done: bool = True) -> Iterator[bytes]:
    for event in events:
        yield f": keep-alive\n\ndata: {json.dumps(event)}\n\n".encode()
    if done:
        yield b"data: [DONE]\n\n"


WHOLE = (
    chunk("ab"),
    chunk("c"),
    chunk(finish="length", criticalkv=EXTENSION),
    {"id": "resp_1", "choices": [], "usage": USAGE},
)


@pytest.fixture
def send() -> Iterator[Callable[..., Record]]:
    callers: list[Caller] = []

    def call(response: httpx.Response, cut_after: int | None = None) -> Record:
        caller = Caller("http://test", "key", 1.0, lambda: 5.0)
        caller._http = httpx.Client(
            base_url="http://test", transport=httpx.MockTransport(lambda _: response)
        )
        callers.append(caller)
        blank = Record(0, 0, "north", "chat", "answer", 0.0)
        return caller.send(blank, "POST", "/", {}, cut_after=cut_after)[0]

    yield call
    for caller in callers:
        caller.close()


def stream(content: Iterator[bytes]) -> httpx.Response:
    return httpx.Response(200, headers=EVENTS, content=content)


def test_a_whole_stream(send: Callable[..., Record]) -> None:
    found = send(stream(lines(*WHOLE)))
    assert found.answered
    assert (found.text, found.finish, found.tier) == ("abc", "length", "0.4")
    assert (found.handle, found.published, found.cached) == ("resp_1", True, 7)


def test_a_stream_that_only_stops(send: Callable[..., Record]) -> None:
    found = send(stream(lines(*WHOLE[:2], done=False)))
    assert (found.text, found.done, found.finish, found.answered) == ("abc", False, "", False)


def test_an_error_event(send: Callable[..., Record]) -> None:
    error = {"error": {"code": "worker_lost", "message": "the worker died"}}
    found = send(stream(lines(chunk("ab"), error, done=False)))
    assert (found.code, found.event, found.text) == ("worker_lost", True, "ab")
    assert (found.message, found.answered) == ("the worker died", False)


def test_done_after_an_error_is_noted(send: Callable[..., Record]) -> None:
    assert send(stream(lines({"error": {"code": "x"}}))).done


def test_a_client_that_hangs_up(send: Callable[..., Record]) -> None:
    found = send(stream(lines(*WHOLE)), cut_after=1)
    assert (found.cut, found.text, found.answered) == (True, "ab", False)


def test_a_connection_that_breaks(send: Callable[..., Record]) -> None:
    def broken() -> Iterator[bytes]:
        yield from lines(chunk("ab"), done=False)
        raise httpx.ReadError("reset")

    found = send(stream(broken()))
    assert (found.transport, found.answered) == ("ReadError", False)


def test_an_event_that_is_no_json(send: Callable[..., Record]) -> None:
    assert send(stream(iter([b"data: {\n\n"]))).transport == "JSONDecodeError"


def test_a_body(send: Callable[..., Record]) -> None:
    choice = {"message": {"content": "abc"}, "finish_reason": "stop"}
    body = {"id": "resp_1", "choices": [choice], "usage": USAGE, "criticalkv": EXTENSION}
    found = send(httpx.Response(200, json=body))
    assert found.answered
    assert (found.text, found.finish, found.tier, found.cached) == ("abc", "stop", "0.4", 7)


@pytest.mark.parametrize("content", [b"", b'{"choices": [', b"<html>", b"[1]"])
def test_a_body_that_is_not_whole(send: Callable[..., Record], content: bytes) -> None:
    found = send(httpx.Response(200, content=content))
    assert (found.complete, found.answered) == (False, False)


def test_an_error_and_when_to_come_back(send: Callable[..., Record]) -> None:
    body = {"error": {"code": "overloaded", "message": "busy"}}
    found = send(httpx.Response(429, json=body, headers={"retry-after": "1"}))
    assert (found.status, found.code, found.retry_after) == (429, "overloaded", True)
    assert (found.complete, found.answered) == (True, False)
    assert send(httpx.Response(500, json={"error": "odd"})).code == "none"


def response(text: str = "abc", status: str = "incomplete") -> dict[str, Any]:
    return {
        "object": "response",
        "error": None,
        "status": status,
        "output": [{"content": [{"text": text}]}],
        "usage": {"input_tokens_details": {"cached_tokens": 7}},
        "criticalkv": EXTENSION,
    }


def test_a_response(send: Callable[..., Record]) -> None:
    found = send(httpx.Response(200, json=response(status="completed")))
    assert found.answered
    assert (found.text, found.finish, found.cached) == ("abc", "stop", 7)


def test_a_response_in_a_stream(send: Callable[..., Record]) -> None:
    deltas = [{"type": "response.output_text.delta", "delta": text} for text in ("ab", "c")]
    end = {"type": "response.incomplete", "response": response()}
    found = send(stream(lines(*deltas, end, done=False)))
    assert found.answered
    assert (found.text, found.finish) == ("abc", "length")
    assert not send(stream(lines(*deltas, done=False))).answered
    assert not send(stream(lines(deltas[0], end, done=False))).answered, "a delta is missing"
