"""`Idempotency-Key`: one run, one handle, one answer."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from criticalkv.services.gateway import idempotency

ASK = [{"role": "user", "content": "why?"}]


@pytest.fixture
def key() -> dict[str, str]:
    return {"Idempotency-Key": secrets.token_hex(8)}


def test_a_retry_gets_the_same_sampled_answer(gateway: Any, key: dict[str, str]) -> None:
    first = gateway.chat(ASK, headers=key, n=2, logprobs=True).json()
    second = gateway.chat(ASK, headers=key, n=2, logprobs=True).json()
    assert first == second
    assert "completed_at" not in second  # which is kept for responses
    assert len(gateway.workers.decodes) == 1
    other = gateway.chat(ASK, headers={"Idempotency-Key": key["Idempotency-Key"] + "x"}).json()
    assert other["id"] != first["id"]


def test_a_retry_may_stream_what_was_not_streamed(gateway: Any, key: dict[str, str]) -> None:
    first = gateway.chat(ASK, headers=key).json()
    stream = gateway.client().chat.completions.create(
        model="tiny", messages=ASK, stream=True, extra_headers=key,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert {c.id for c in chunks} == {first["id"]}
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == first["choices"][0]["message"]["content"]
    assert chunks[-2].model_extra["criticalkv"] == first["criticalkv"]
    assert chunks[-1].usage.total_tokens == first["usage"]["total_tokens"]
    assert len(gateway.workers.decodes) == 1


def test_a_stream_is_replayed_as_a_whole(gateway: Any, key: dict[str, str]) -> None:
    streamed = gateway.chat(ASK, headers=key, stream=True).text
    replayed = gateway.chat(ASK, headers=key).json()
    assert replayed["id"] in streamed
    assert len(gateway.workers.decodes) == 1


def test_a_second_call_waits_for_the_first(gateway: Any, key: dict[str, str]) -> None:
    gateway.workers.token_delay = 0.05
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: gateway.chat(ASK, headers=key).json(), range(3)))
    assert answers[0] == answers[1] == answers[2]
    assert len(gateway.workers.decodes) == 1


def test_another_body_under_the_key_is_a_conflict(gateway: Any, key: dict[str, str]) -> None:
    gateway.chat(ASK, headers=key)
    answer = gateway.chat(ASK, headers=key, temperature=0.5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert len(gateway.workers.decodes) == 1


def test_a_failed_attempt_may_be_retried_at_once(gateway: Any, key: dict[str, str]) -> None:
    gateway.workers.fail_after = 0
    assert gateway.chat(ASK, headers=key).status_code == 500
    gateway.workers.fail_after = None
    assert gateway.chat(ASK, headers=key).status_code == 200
    first, second = gateway.workers.decodes
    assert first.request_id == second.request_id
    assert first.sampling.seed == second.sampling.seed


def test_a_disconnected_attempt_may_be_retried_at_once(gateway: Any, key: dict[str, str]) -> None:
    gateway.workers.token_delay = 0.2
    body = {"model": "tiny", "messages": ASK, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, headers=key) as r:
        next(r.iter_lines())
    gateway.workers.token_delay = 0
    started = time.perf_counter()
    assert gateway.chat(ASK, headers=key).status_code == 200
    assert time.perf_counter() - started < 3
    first, second = gateway.workers.decodes
    assert (first.request_id, first.sampling.seed) == (second.request_id, second.sampling.seed)


def test_a_key_is_kept_while_its_attempt_runs(
    gateway: Any, key: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "LEASE_MS", 400)
    monkeypatch.setattr(idempotency, "RENEW_S", 0.1)
    gateway.workers.token_delay = 0.2
    gateway.workers.say = lambda _: "12345678"
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: gateway.chat(ASK, headers=key).json(), range(2)))
    assert answers[0] == answers[1]
    assert len(gateway.workers.decodes) == 1


def test_an_attempt_that_died_blocks_its_key_for_a_lease_only(
    gateway: Any, key: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, leases = gateway.core.store._client, []
    begin = client.begin_request

    def spy(*args: Any, **fields: Any) -> Any:
        leases.append(args[4])
        return begin(*args, **fields)

    monkeypatch.setattr(client, "begin_request", spy)
    gateway.chat(ASK, headers=key)
    assert max(leases) <= 30_000


@pytest.mark.parametrize("stream", [False, True])
def test_another_answer_under_a_bound_handle_is_a_conflict(
    gateway: Any, key: dict[str, str], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_ANSWER_BYTES", 0)  # no answer is kept
    first = gateway.chat(ASK, headers=key).json()
    again = gateway.chat(ASK, headers=key).json()
    assert again["criticalkv"]["published"] is True
    assert (again["id"], again["criticalkv"]["node_id"]) == (
        first["id"], first["criticalkv"]["node_id"],
    )  # fmt: skip
    gateway.workers.say = lambda _: "another answer"
    answer = gateway.chat(ASK, headers=key, stream=stream)
    assert answer.status_code == (200 if stream else 409)
    assert '"idempotency_key_reused"' in answer.text
    assert "new key" in answer.text
    assert "[DONE]" not in answer.text
    assert (
        gateway.get(f"/v1/contexts/{first['id']}").json()["node_id"]
        == again["criticalkv"]["node_id"]
    )


SWAPPING = {"policy": "kvzip", "first_policy": "snapkv"}
MARKED = {"type": "text", "text": "d" * 150, "prompt_cache_breakpoint": {"mode": "explicit"}}


@pytest.mark.parametrize("how", ["context", "context and attachment", "resent"])
def test_a_retry_reads_what_the_first_attempt_read(
    how: str,
    make_gateway: Callable[..., Any],
    key: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its context has a better node by now; from there it would be another turn."""
    monkeypatch.setattr(idempotency, "MAX_ANSWER_BYTES", 0)  # no answer is kept
    gateway, hold = make_gateway(eviction=SWAPPING), threading.Event()
    gateway.workers.hold_background = hold
    asked: dict[str, Any] = {}
    content: list[Any] = [{"type": "text", "text": "why?"}]
    if how != "context":
        content.insert(0, {**MARKED, "text": "e" * 150} if "and" in how else MARKED)
    if how != "resent":
        made = gateway.post("/v1/contexts", {"text": "d" * 150}).json()
        asked = {"criticalkv": {"context_id": made["id"]}}
    messages = [{"role": "user", "content": content}]
    first = gateway.chat(messages, headers=key, **asked).json()
    if how != "resent":
        # As if the turn had been under way while its context was led to the better node.
        client, tenant = gateway.core.store._client, gateway.core.auth.tenant(None).digest
        resolve = client.resolve_handle
        hold.set()
        wait(lambda: len(done(gateway)) == len(gateway.workers.prefills) // 2)
        better = next(p for p in gateway.workers.prefills if p.background).node_id

        def moved(owner: str, handle: str) -> Any:
            found = resolve(owner, handle)
            if (owner, handle) == (tenant, made["id"]):
                found.node_id = better
            return found

        monkeypatch.setattr(client, "resolve_handle", moved)
    hold.set()
    wait(lambda: gateway.core.background._worker.done())
    again = gateway.chat(messages, headers=key, **asked)
    assert again.status_code == 200, again.text
    assert again.json()["criticalkv"]["node_id"] == first["criticalkv"]["node_id"]
    other = gateway.chat(messages, **asked).json()
    assert other["criticalkv"]["node_id"] != first["criticalkv"]["node_id"]


def done(gateway: Any) -> list[Any]:
    background = [p for p in gateway.workers.prefills if p.background]
    stats = gateway.store.stat([p.node_id for p in background]) if background else []
    return [stat for stat in stats if stat.present]


def wait(what: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("value", ["", "k" * 257])
def test_the_keys_length_is_bounded(gateway: Any, value: str) -> None:
    answer = gateway.chat(ASK, headers={"Idempotency-Key": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")
