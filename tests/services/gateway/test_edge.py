"""Next to the socket: request ids, keep-alive, clients that do not read, large headers."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from openai import APIError

from criticalkv.services.gateway import stream
from criticalkv.services.gateway.app import build_app
from criticalkv.services.gateway.edge import (
    PIECE_BYTES,
    PROXY_CALLBACK,
    WRITE_TIMEOUT_VARIABLE,
    Edge,
    SlowReaderError,
    proxy_middlewares,
)

ASK = [{"role": "user", "content": "why?"}]
DOC = "d" * 150
BODY = {"model": "tiny", "messages": ASK}


# -------------------------------------------------------------- request ids


def ids(answer: httpx.Response) -> list[str]:
    return answer.headers.get_list("x-request-id")


def test_a_request_keeps_its_id_whatever_the_answer(
    make_gateway: Callable[..., Any], keys: Any
) -> None:
    gateway = make_gateway(api_keys_file=str(keys))
    mine = {"X-Request-Id": "trace-1.2_3:4"}
    good = {"Authorization": "Bearer key-a", **mine}
    answers = {
        401: gateway.post("/v1/chat/completions", BODY, **mine),
        400: gateway.post("/v1/chat/completions", {}, **good),
        404: gateway.get("/v1/nothing", **good),
        200: gateway.post("/v1/chat/completions", {**BODY, "stream": True}, **good),
    }
    answers[405] = gateway.get("/v1/chat/completions", **good)
    assert {status: (a.status_code, ids(a)) for status, a in answers.items()} == {
        status: (status, ["trace-1.2_3:4"]) for status in answers
    }
    assert ids(gateway.get("/health", **mine)) == ["trace-1.2_3:4"]


@pytest.mark.parametrize("value", ["", "a b", "x" * 129, "a;b", "\u00e9", "-x", "a\tb"])
def test_an_id_that_is_not_well_formed_is_replaced(shared_gateway: Any, value: str) -> None:
    headers = {"X-Request-Id": value.encode("latin-1")}
    answer = httpx.get(f"{shared_gateway.url}/health", headers=headers)
    assert len(ids(answer)) == 1
    assert ids(answer)[0].startswith("req_")
    other = httpx.get(f"{shared_gateway.url}/health")
    assert ids(other)[0].startswith("req_")
    assert ids(other) != ids(answer)


def test_two_ids_are_none(shared_gateway: Any) -> None:
    headers = [("X-Request-Id", "one"), ("X-Request-Id", "two")]
    assert ids(httpx.get(f"{shared_gateway.url}/health", headers=headers))[0].startswith("req_")


async def test_an_id_that_what_is_wrapped_adds_is_not_a_second_one() -> None:
    """Ray Serve's proxy adds one by itself; and it sees the one that is kept."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        seen.extend(scope["headers"])
        headers = [(b"X-Request-ID", b"another")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send(message: Any) -> None:
        seen.extend(message["headers"])

    scope = {"type": "http", "headers": [(b"x-request-id", b"mine")]}
    await Edge(app, 1.0)(scope, None, send)  # type: ignore[arg-type]
    assert seen == [(b"x-request-id", b"mine")] * 2


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_failure_is_logged_with_its_id(
    gateway: Any, caplog: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    gateway.workers.fail_after = 1
    gateway.post(
        "/v1/chat/completions", {**BODY, "stream": is_stream}, **{"X-Request-Id": "find-me"}
    )
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("criticalkv")]
    assert any("find-me" in line for line in lines), lines
    assert not any("secret" in line for line in lines)


def test_no_other_origin_is_let_in(shared_gateway: Any) -> None:
    headers = {"Origin": "https://example.com", "Access-Control-Request-Method": "POST"}
    for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/v1/models")):
        answer = httpx.request(method, f"{shared_gateway.url}{path}", headers=headers)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert httpx.options(f"{shared_gateway.url}/v1/models").status_code == 405


def test_large_headers_are_refused(shared_gateway: Any) -> None:
    url = f"{shared_gateway.url}/v1/models"
    answer = httpx.get(url, headers={f"x-{i}": "x" * 8000 for i in range(9)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")
    assert ids(answer)
    assert httpx.get(url, headers={f"x-{i}": "x" * 8000 for i in range(7)}).status_code == 200


# -------------------------------------------------------------- retry-after


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (503, [], [b"1"]),
        (429, [], [b"1"]),
        (429, [(b"Retry-After", b"7")], [b"7"]),
        (200, [], []),
        (500, [], []),
    ],
)
async def test_who_is_to_come_back_is_told_when(
    status: int, said: list[Any], expected: list[bytes]
) -> None:
    """Also where Ray Serve refuses, which does not say."""
    headers: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        await send({"type": "http.response.start", "status": status, "headers": said})

    async def send(message: Any) -> None:
        headers.extend(message["headers"])

    await Edge(app, 1.0)({"type": "http", "headers": []}, None, send)  # type: ignore[arg-type]
    assert [value for name, value in headers if name.lower() == b"retry-after"] == expected


def test_health_says_when_to_ask_again(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ill() -> bool:
        return False

    monkeypatch.setattr(gateway.core.store, "healthy", ill)
    answer = gateway.get("/health")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


# --------------------------------------------------------------- keep-alive


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients hear something five times a second."""
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.2)


@pytest.mark.usefixtures("impatient")
def test_a_stream_is_kept_alive_while_prefill_and_decode_are_slow(gateway: Any) -> None:
    gateway.workers.prefill_delay = gateway.workers.token_delay = 0.7
    gateway.workers.say = lambda _: "ab"
    messages = [{"role": "user", "content": DOC}]
    text = gateway.chat(messages, stream=True).text
    assert text.startswith(": keep-alive\n\n")
    between = text[text.index('"content":"a"') : text.index('"content":"b"')]
    assert "\n\n: keep-alive\n\n" in between
    assert text.endswith("data: [DONE]\n\n")
    client = gateway.client()
    chunks = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": DOC + "e"}], stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "ab"
    with client.responses.stream(model="tiny", input=DOC + "f") as events:
        assert events.get_final_response().output_text == "ab"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_failure_after_the_stream_began_is_an_error_event(gateway: Any, path: str) -> None:
    gateway.workers.prefill_delay = 0.7
    gateway.workers.fail_prefill = [RuntimeError("secret")] * 2
    client = gateway.client()
    asked: dict[str, Any] = {"model": "tiny", "stream": True}
    with pytest.raises(APIError, match="internal error") as caught:
        list(
            client.chat.completions.create(messages=[{"role": "user", "content": DOC}], **asked)
            if "chat" in path
            else client.responses.create(input=DOC, **asked)
        )
    assert not hasattr(caught.value, "status_code")  # it came inside of a 200
    assert caught.value.code == "internal_error"


@pytest.mark.usefixtures("impatient")
def test_who_leaves_a_stream_before_its_first_token_stops_the_prefill(gateway: Any) -> None:
    gateway.workers.prefill_delay = 30
    body = {"model": "tiny", "messages": [{"role": "user", "content": DOC}], "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: dropping it would close the connection
        assert next(lines) == ": keep-alive"
        assert gateway.workers.cancelled_prefills == 0
    wait(lambda: gateway.workers.cancelled_prefills == 1)
    wait(lambda: gateway.core.metrics.running._value.get() == 0)


def wait(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


# -------------------------------------------------------------- slow readers


@contextmanager
def small_buffers(app: Any) -> Iterator[int]:
    """Serve an app whose kernel buffers nearly nothing; yield the port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait(lambda: server.started)
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.parametrize("is_in_front", [False, True], ids=["app", "proxy"])
def test_a_client_that_reads_a_byte_now_and_then_is_cut_off(
    make_gateway: Callable[..., Any], is_in_front: bool
) -> None:
    """Nothing piles up meanwhile, and its decode ends with it."""
    gateway = make_gateway(write_timeout_s=0.5 if not is_in_front else 1000)
    gateway.workers.say = lambda _: "x" * 1_000_000
    app = build_app(gateway.core)
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": true}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with small_buffers(Edge(app, 0.5) if is_in_front else app) as port, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(20)
        reader.connect(("127.0.0.1", port))
        reader.sendall(head.encode() + body)
        wait(lambda: gateway.workers.open_decodes == 1)
        seen = reader.recv(1)
        while gateway.workers.open_decodes:
            seen += reader.recv(1)
            assert len(seen) < 500, "it is still served"
            time.sleep(0.1)
        # In front of all, what uvicorn still had for it (64 KiB) goes, too.
        assert not is_in_front or read_all(reader) < 48 * 1024
    # A few hundred events fill the buffers; without an end there would be a million.
    told = sum(bucket.get() for bucket in gateway.core.metrics._itl._buckets)
    assert told < 20_000
    wait(lambda: gateway.core.metrics.running._value.get() == 0)


def read_all(reader: socket.socket) -> int:
    size = 0
    while piece := reader.recv(4096):
        size += len(piece)
    return size


async def test_a_reader_that_makes_progress_is_served_however_long_it_takes() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        for _ in range(5):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    sent = []

    async def send(message: Any) -> None:
        await asyncio.sleep(0.1)
        sent.append(message)

    await Edge(app, 0.3)({"type": "http", "headers": []}, None, send)  # type: ignore[arg-type]
    assert len(sent) == 5


def test_a_steady_reader_of_a_large_body_gets_all_of_it() -> None:
    """The timeout is for each piece: all of them take longer."""
    size, piece, timeout_s = 3 << 19, 48 * 1024, 2.0

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(size), "more_body": True})
            await send({"type": "http.response.body", "body": b"end"})

    with small_buffers(Edge(app, timeout_s)) as port, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, piece)
        reader.settimeout(20)
        reader.connect(("127.0.0.1", port))
        started, seen = time.monotonic(), b""
        reader.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        while more := reader.recv(piece, socket.MSG_WAITALL):
            seen += more
            time.sleep(0.12)
    assert time.monotonic() - started > 1.5 * timeout_s
    assert seen.count(b"\0") == size  # in HTTP's chunks
    assert b"end" in seen[-20:]


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
@pytest.mark.parametrize("more", [False, True])
async def test_a_body_goes_out_in_pieces_and_ends_once(size: int, more: bool) -> None:
    body, sent = bytes(i % 251 for i in range(size)), []

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def send(message: Any) -> None:
        sent.append(message)

    await Edge(app, 5.0)({"type": "http", "headers": []}, None, send)  # type: ignore[arg-type]
    assert b"".join(m["body"] for m in sent) == body
    assert len(sent) == max(1, -(-size // PIECE_BYTES))
    assert max(len(m["body"]) for m in sent) <= PIECE_BYTES
    assert [m["more_body"] for m in sent] == [True] * (len(sent) - 1) + [more]


async def test_after_a_cut_nothing_is_sent_any_more() -> None:
    errors = []

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        for _ in range(2):
            try:
                await send({"type": "http.response.body", "body": b"x"})
            except SlowReaderError as error:
                errors.append(error)

    async def send(_: Any) -> None:
        await asyncio.Event().wait()

    await Edge(app, 0.1)({"type": "http", "headers": []}, None, send)  # type: ignore[arg-type]
    assert len(errors) == 2


def test_the_proxy_finds_its_middleware_and_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WRITE_TIMEOUT_VARIABLE, "7")
    (middleware,) = proxy_middlewares()
    assert (middleware.cls, middleware.kwargs) == (Edge, {"write_timeout_s": 7.0})
    module, _, name = PROXY_CALLBACK.partition(":")
    assert (module, name) == (proxy_middlewares.__module__, proxy_middlewares.__name__)
