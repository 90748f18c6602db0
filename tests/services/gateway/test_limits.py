"""Too much of anything: refused by name, fast, and the next good request works."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from criticalkv.shared.errors import NumericsError

ASK = [{"role": "user", "content": "why?"}]
DOC = "d" * 150
MANY = 400_000  # of anything small: a few MB

CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("parts", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 8193}]},
     "messages"),
    ("parts of several", {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}] * 41}] * 200}, "messages"),
    ("values", {"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages"),
    ("numbers", {"messages": [0] * MANY}, "messages"),
    ("fields", {f"f{i}": 0 for i in range(300)}, None),
    ("fields of a message", {"messages": [{f"f{i}": 0 for i in range(MANY)}]}, "messages"),
    ("fields of ours", {"criticalkv": {f"f{i}": 0 for i in range(MANY)}}, "criticalkv"),
    ("stops", {"stop": [0] * 5}, "stop"),
    ("many stops", {"stop": [0] * MANY}, "stop"),
    ("metadata", {"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ("a long key", {"metadata": {"k" * 65: "x"}}, "metadata"),
    ("a long value", {"metadata": {"k": "x" * 513}}, "metadata"),
    ("a long user", {"user": "x" * 513}, "user"),
    ("a long cache key", {"prompt_cache_key": "x" * 513}, "prompt_cache_key"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_more_than_the_limit_is_refused_at_once(
    shared_gateway: Any, fields: dict[str, Any], param: str | None
) -> None:
    body = json.dumps({"model": "tiny", "messages": ASK, **fields})
    answer = httpx.post(f"{shared_gateway.url}/v1/chat/completions", content=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_request")
    assert len(answer.content) < 1000
    # Not an error of its own for each value, which takes many seconds.
    assert re.search("at most|more than|limit", error["message"]), error["message"]
    assert shared_gateway.workers.decodes == []


def test_as_much_as_the_limit_is_fine(gateway: Any) -> None:
    parts = [{"type": "text", "text": "x"}] * 1000
    answer = gateway.chat(
        [{"role": "user", "content": parts}],
        metadata={f"{i}{'k' * 60}": "x" * 512 for i in range(16)},
        user="x" * 512,
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("depth", [10**4, 10**6])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/contexts"])
def test_deep_json_is_a_400_wherever_it_comes(shared_gateway: Any, path: str, depth: int) -> None:
    body = b'{"model": "tiny", "metadata": ' + b"[" * depth + b"]" * depth + b"}"
    answer = httpx.post(f"{shared_gateway.url}{path}", content=body, timeout=20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/contexts"])
def test_a_large_body_is_a_413_wherever_it_comes(gateway: Any, path: str) -> None:
    answer = gateway.post(path, {"model": "tiny", "input": "x" * 40_000_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_one_token_may_be_wanted(gateway: Any) -> None:
    assert gateway.chat(ASK, max_tokens=1).status_code == 200
    assert gateway.workers.decodes[0].sampling.max_tokens == 1


# --------------------------------------------------------------------- load


def test_five_times_what_fits_is_refused_early_and_all_is_well_afterwards(
    make_gateway: Callable[..., Any],
) -> None:
    """Refused before a body is read, also where nothing is generated."""
    gateway, release = make_gateway(max_ongoing=4), threading.Event()
    gateway.workers.say = lambda _: "x"
    gateway.workers.before_decode = [lambda: release.wait(30) and None] * 20
    with ThreadPoolExecutor(20) as pool:
        running = [pool.submit(gateway.chat, ASK) for _ in range(4)]
        wait(lambda: gateway.workers.open_decodes == 4)
        more = [
            pool.submit(gateway.chat, [{"role": "user", "content": "x" * 1_000_000}])
            for _ in range(12)
        ]
        refused = [answer.result() for answer in more]
        refused += [gateway.get("/v1/contexts"), gateway.get("/v1/responses/resp_1")]
        refused.append(httpx.delete(f"{gateway.url}/v1/responses/resp_1"))
        assert gateway.get("/health").status_code == 200
        assert "running 4.0" in gateway.get("/metrics").text
        release.set()
        assert {answer.result().status_code for answer in running} == {200}
    assert {answer.status_code for answer in refused} == {429}
    assert {answer.headers["retry-after"] for answer in refused} == {"1"}
    assert gateway.chat(ASK).status_code == 200
    assert gateway.core.metrics.running._value.get() == 0


def wait(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


# ------------------------------------------------------------- truthful ends


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_are_not_finite_are_an_error_in_valid_json(
    gateway: Any, path: str, stream: bool
) -> None:
    gateway.workers.say = lambda _: "abc"
    gateway.workers.fail_after, gateway.workers.fail_with = 2, NumericsError("logits are NaN")
    body = {"model": "tiny", "messages": ASK, "input": "x", "stream": stream}
    del body["input" if "chat" in path else "messages"]
    answer = gateway.post(path, body)
    assert answer.status_code == (200 if stream else 500)
    lines = [line for line in answer.text.split("\n") if line and not line.startswith("event")]
    last = json.loads(lines[-1].removeprefix("data: "), parse_constant=pytest.fail)
    assert last["error"]["code"] == "non_finite_values"
    assert "[DONE]" not in answer.text
    gateway.workers.fail_after = None
    assert gateway.post(path, body).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_figure_that_is_not_finite_never_makes_invalid_json(
    gateway: Any, path: str, stream: bool
) -> None:
    gateway.workers.start_fields = {"store_ms": float("nan")}
    body = {"model": "tiny", "messages": ASK, "input": "x", "stream": stream}
    del body["input" if "chat" in path else "messages"]
    text = gateway.post(path, body).text
    for line in text.split("\n"):
        if line.removeprefix("data: ").startswith("{"):
            json.loads(line.removeprefix("data: "), parse_constant=pytest.fail)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_context_deleted_while_it_is_streamed_from_is_told_and_gone(
    gateway: Any, path: str
) -> None:
    context = gateway.post("/v1/contexts", {"text": DOC}).json()
    gateway.workers.token_delay = 0.05
    gateway.workers.say = lambda _: "x" * 10
    body = {"model": "tiny", "messages": ASK, "input": "x", "stream": True,
            "criticalkv": {"context_id": context["id"]}}  # fmt: skip
    del body["input" if "chat" in path else "messages"]
    with httpx.stream("POST", f"{gateway.url}{path}", json=body, timeout=20) as answer:
        lines = answer.iter_lines()
        handle = first_id(next(line for line in lines if line.startswith("data: ")))
        assert httpx.delete(f"{gateway.url}/v1/contexts/{context['id']}").status_code == 200
        rest = "\n".join(lines)
    assert '"error": {' in rest
    assert "[DONE]" not in rest
    assert "response.completed" not in rest
    node = context["node_id"]
    assert not gateway.store.stat([node])[0].present
    assert gateway.store.token_records([node]) == [None]
    assert gateway.get(f"/v1/contexts/{handle}").status_code == 404


def first_id(line: str) -> str:
    event = json.loads(line.removeprefix("data: "))
    return str(event.get("response", event)["id"])
