"""Bad input: a clear 4xx that names the field, and the next good request works."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

GOOD = [{"role": "user", "content": "why?"}]
SAID = {"role": "assistant", "content": "so"}
GO_ON = {"add_generation_prompt": False, "continue_final_message": True}
PART = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}

CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "invalid_request"),
    ({"messages": None}, "messages", "invalid_request"),
    ({"messages": "hi"}, "messages", "invalid_request"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_request"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0]", "invalid_request"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_request"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_request"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_request"),
    ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name",
     "unsupported_field"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0]", "unsupported_field"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "odd": 1}]}]},
     "messages[0].content[0].odd", "invalid_request"),
    ({"messages": [{"role": "user", "content": [PART] * 5}]}, "prompt_cache_breakpoint",
     "invalid_request"),
    ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages", "invalid_request"),
    ({"criticalkv": {"read_tier": 0}}, "criticalkv.read_tier", "invalid_request"),
    ({"criticalkv": {"read_tier": -1}}, "criticalkv.read_tier", "invalid_request"),
    ({"criticalkv": {"read_tier": 1.5}}, "criticalkv.read_tier", "invalid_request"),
    ({"criticalkv": {"read_tier": "NaN"}}, "criticalkv.read_tier", "invalid_request"),
    ({"criticalkv": {"read_tier": True}}, "criticalkv.read_tier", "invalid_request"),
    ({"criticalkv": {"min_read_tier": 0}}, "criticalkv.min_read_tier", "invalid_request"),
    ({"criticalkv": {"min_read_tier": "x"}}, "criticalkv.min_read_tier", "invalid_request"),
    ({"criticalkv": {"min_read_tier": 0.2, "read_tier": "0.1"}}, "criticalkv.min_read_tier",
     "invalid_request"),
    ({"criticalkv": {"min_read_tier": "1", "read_tier": "0.95"}}, "criticalkv.min_read_tier",
     "invalid_request"),
    ({"criticalkv": {"store_tier": 2}}, "criticalkv.store_tier", "invalid_request"),
    ({"criticalkv": {"policy": "best"}}, "criticalkv.policy", "invalid_request"),
    ({"criticalkv": {"turn_policy": "best"}}, "criticalkv.turn_policy", "invalid_request"),
    ({"criticalkv": {"turn_policy": "snapkv"}}, "criticalkv.turn_policy", "invalid_request"),
    ({"criticalkv": {"turn_policy": "kvzip:interval=9,target=9"}}, "criticalkv.turn_policy",
     "invalid_request"),
    ({"criticalkv": {"turn_policy": "snapkv:interval=15,target=99"}}, "criticalkv.turn_policy",
     "invalid_request"),
    ({"criticalkv": {"policy": "snapkv:interval=1,keep=0.5"}}, "criticalkv.policy",
     "invalid_request"),
    ({"criticalkv": {"first_policy": "snapkv:interval=1,keep=0.5"}}, "criticalkv.first_policy",
     "invalid_request"),
    ({"criticalkv": {"tier": 0.1}}, "criticalkv.tier", "invalid_request"),
    ({"criticalkv": {"cache_salt": ""}}, "criticalkv.cache_salt", "invalid_request"),
    ({"criticalkv": {"top_k": -1}}, "criticalkv.top_k", "invalid_request"),
    ({"max_tokens": 0}, "max_tokens", "invalid_request"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_request"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_request"),
    ({"max_tokens": 10**6}, "max_tokens", "context_length_exceeded"),
    ({"n": 0}, "n", "invalid_request"),
    ({"n": 9}, "n", "invalid_request"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_request"),
    ({"stop": ""}, "stop[0]", "invalid_request"),
    ({"stop": "x" * 257}, "stop[0]", "invalid_request"),
    ({"temperature": 2.1}, "temperature", "invalid_request"),
    ({"temperature": -0.1}, "temperature", "invalid_request"),
    ({"top_p": 0}, "top_p", "invalid_request"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_request"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "invalid_request"),
    ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl", "invalid_request"),
    ({"prompt_cache_options": {"mode": "magic"}}, "prompt_cache_options.mode", "invalid_request"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_field"),
    ({"tool_choice": "auto"}, "tool_choice", "unsupported_field"),
    ({"functions": [{}]}, "functions", "unsupported_field"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_field"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_field"),
    ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_field"),
    ({"frequency_penalty": -1}, "frequency_penalty", "unsupported_field"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_field"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_field"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_field"),
    ({"best_of": 3}, "best_of", "invalid_request"),
    ({"continue_final_message": True}, "add_generation_prompt", "invalid_request"),
    ({"messages": [*GOOD, SAID], **GO_ON, "add_generation_prompt": True}, "add_generation_prompt",
     "invalid_request"),
    ({"messages": [*GOOD, SAID], "add_generation_prompt": False}, "add_generation_prompt",
     "invalid_request"),
    (GO_ON, "continue_final_message", "invalid_request"),
    ({"messages": [SAID], **GO_ON}, "messages", "invalid_request"),
    ({"messages": [*GOOD, {**SAID, "content": [PART]}], **GO_ON}, "prompt_cache_breakpoint",
     "invalid_request"),
    ({"messages": [*GOOD, SAID], **GO_ON, "continue_final_message": "yes"},
     "continue_final_message", "invalid_request"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "code"), CASES, ids=[json.dumps(c[0])[:60] for c in CASES]
)
def test_a_bad_field_is_named(
    shared_gateway: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = shared_gateway.post(
        "/v1/chat/completions", {"model": "tiny", "messages": GOOD, **fields}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"


def test_nothing_bad_reached_a_worker_and_a_good_request_works(shared_gateway: Any) -> None:
    for fields, _, _ in CASES:
        shared_gateway.post("/v1/chat/completions", {"model": "tiny", "messages": GOOD, **fields})
    assert shared_gateway.workers.decodes == shared_gateway.workers.prefills == []
    assert shared_gateway.chat(GOOD).status_code == 200
    shared_gateway.workers.decodes.clear()


NEUTRAL: dict[str, Any] = {
    "tools": [], "tool_choice": None, "response_format": {"type": "text"}, "logit_bias": {},
    "presence_penalty": 0, "frequency_penalty": 0.0, "modalities": ["text"], "user": "u",
    "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
    "prompt_cache_key": "k", "stop": None, "seed": None, "stream_options": None, "n": None,
    "criticalkv": None, "logprobs": None,
}  # fmt: skip


def test_fields_that_ask_for_nothing_are_accepted(gateway: Any) -> None:
    message = {"role": "user", "content": "x", "refusal": None, "tool_calls": None}
    answer = gateway.chat([message], **NEUTRAL)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"\xff", b"[" * 10**4, b'{"a":' * 10**4, b'{"model": "\\ud800"}'],
    ids=["empty", "cut", "list", "number", "bytes", "deep-list", "deep-map", "surrogate"],
)
def test_garbage_is_a_fast_400(gateway: Any, body: bytes) -> None:
    started = time.perf_counter()
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_request"
    assert time.perf_counter() - started < 2


def test_nan_in_the_body_names_its_field(gateway: Any) -> None:
    body = json.dumps(
        {"model": "tiny", "messages": GOOD, "criticalkv": {"read_tier": float("nan")}}
    )
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "criticalkv.read_tier"


def test_a_lone_surrogate_in_a_message_is_a_400(gateway: Any) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "a\\ud83d"}]}'
    assert httpx.post(f"{gateway.url}/v1/chat/completions", content=body).status_code == 400


def test_a_body_of_50_mb_is_refused(gateway: Any) -> None:
    answer = gateway.chat([{"role": "user", "content": "x" * 50_000_000}])
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert gateway.chat(GOOD).status_code == 200


def test_a_hundred_thousand_messages_are_refused_fast(gateway: Any) -> None:
    answer = gateway.chat(GOOD * 100_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


def test_megabytes_of_text_are_refused_without_tokenizing(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(text: str) -> list[int]:
        raise AssertionError(len(text))

    monkeypatch.setattr(gateway.core.template, "encode_content", refuse)
    answer = gateway.chat([{"role": "user", "content": "x" * 5_000_000}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("text", [" ", "\n\t", "\x00", "\u202egnirts", "<|im_end|>"])
def test_odd_text_is_answered(gateway: Any, text: str) -> None:
    assert gateway.chat([{"role": "user", "content": text}]).status_code == 200


@pytest.mark.parametrize("name", ["gpt-4", "/etc/passwd", "https://example.com/m", ""])
def test_an_unknown_model_is_a_404(gateway: Any, name: str) -> None:
    answer = gateway.chat(GOOD, model=name)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert gateway.get(f"/v1/models/{name or 'x'}").status_code == 404


def test_the_template_may_refuse_roles(make_gateway: Callable[..., Any]) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    gateway = make_gateway(template)
    answer = gateway.chat([{"role": "system", "content": "x"}, *GOOD])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "no system" in answer.json()["error"]["message"]
    assert gateway.chat(GOOD).status_code == 200


CONTEXTS: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"text": ""}, "text"),
    ({"text": "x", "messages": GOOD}, "text"),
    ({"messages": []}, "messages"),
    ({"text": "x", "ttl": "0s"}, "ttl"),
    ({"text": "x", "ttl": "9999999d"}, "ttl"),
    ({"text": "x", "policy": "x+y"}, "policy"),
    ({"text": "x", "store_tier": 7}, "store_tier"),
    ({"text": "x", "tier": 1}, "tier"),
    ({"text": "x" * 6000}, "text"),
]


@pytest.mark.parametrize(("body", "param"), CONTEXTS, ids=[json.dumps(c[0])[:50] for c in CONTEXTS])
def test_a_bad_context_is_refused(shared_gateway: Any, body: dict[str, Any], param: str) -> None:
    answer = shared_gateway.post("/v1/contexts", body)
    assert answer.status_code == 400
    assert param in answer.json()["error"]["message"]
    assert shared_gateway.workers.prefills == []


@pytest.mark.parametrize("query", ["0", "1001", "x", "-1"])
def test_the_list_has_a_limit(gateway: Any, query: str) -> None:
    answer = gateway.get(f"/v1/contexts?limit={query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def test_unknown_routes_and_methods_answer_in_openais_shape(gateway: Any) -> None:
    for answer, status in ((gateway.get("/v1/nothing"), 404),
                           (gateway.get("/v1/chat/completions"), 405)):  # fmt: skip
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
