"""Keys and tenants, limits, disconnects, health, metrics, logs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from criticalkv.services.gateway import body
from criticalkv.services.gateway.auth import Authenticator, Tenant
from criticalkv.shared.config import GatewayConfig
from criticalkv.shared.errors import AuthenticationError, ConfigError

ASK = [{"role": "user", "content": "why?"}]
DOC = "d" * 150


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def two_tenants(make_gateway: Callable[..., Any], tmp_path: Path) -> Any:
    file = tmp_path / "keys.yaml"
    file.write_text(f"{sha('key-a')}: a\n{sha('key-a2')}: a\n{sha('key-b')}: b\n")
    return make_gateway(api_keys_file=str(file))


# -------------------------------------------------------------------- auth


def test_every_route_but_health_and_metrics_needs_a_key(two_tenants: Any) -> None:
    from criticalkv.services.gateway.app import build_app

    for route in build_app(two_tenants.core).routes:
        path = route.path.replace("{handle}", "x").replace("{name:path}", "x")  # type: ignore[attr-defined]
        for method in route.methods:  # type: ignore[attr-defined]
            answer = httpx.request(method, f"{two_tenants.url}{path}")
            assert (answer.status_code == 401) == (path not in ("/health", "/metrics")), path
    assert two_tenants.get("/anything").status_code == 401


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Basic key-a", "key-a", "Bearer é"]
)
def test_a_wrong_key_is_a_401(two_tenants: Any, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    answer = httpx.get(f"{two_tenants.url}/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_keys_of_one_tenant_share_and_tenants_do_not(two_tenants: Any) -> None:
    used = [
        two_tenants.chat([{"role": "user", "content": DOC}], headers=bearer(key)).json()["usage"]
        for key in ("key-a", "key-a2", "key-b")
    ]
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in used]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0
    first, second = two_tenants.workers.prefills
    assert first.salt != second.salt


def test_decode_learns_the_tenant_by_a_stable_name_that_is_no_key(two_tenants: Any) -> None:
    for key in ("key-a", "key-a2", "key-b"):
        two_tenants.chat(ASK, headers=bearer(key))
    names = [request.tenant for request in two_tenants.workers.decodes]
    assert names == [Tenant("a").digest, Tenant("a").digest, Tenant("b").digest]


def test_a_cache_salt_narrows_a_tenants_own_cache(gateway: Any) -> None:
    for salt in ("x", "y", None):
        gateway.chat([{"role": "user", "content": DOC}], criticalkv={"cache_salt": salt})
    assert len({p.salt for p in gateway.workers.prefills}) == 3


def test_unknown_expired_foreign_and_malformed_handles_are_the_same_404(two_tenants: Any) -> None:
    mine = two_tenants.post("/v1/contexts", {"text": DOC}, **bearer("key-a")).json()["id"]
    short = two_tenants.post("/v1/contexts", {"text": DOC, "ttl": 1}, **bearer("key-b")).json()[
        "id"
    ]
    time.sleep(1.3)
    bodies = []
    for handle in (mine, short, "ctx_" + "0" * 32, "../../etc", "ü"):
        answer = two_tenants.chat(ASK, headers=bearer("key-b"), criticalkv={"context_id": handle})
        bodies.append((answer.status_code, answer.text))
    assert len(set(bodies)) == 1
    assert bodies[0][0] == 404
    for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/pin"), ("POST", "/unpin")):
        answers = {
            httpx.request(method, f"{two_tenants.url}/v1/contexts/{handle}{suffix}",
                          headers=bearer("key-b")).text
            for handle in (mine, short, "ctx_" + "0" * 32)
        }  # fmt: skip
        assert answers == {bodies[0][1]}
    assert two_tenants.get(f"/v1/contexts/{mine}", **bearer("key-a")).status_code == 200
    assert two_tenants.get("/v1/contexts", **bearer("key-b")).json()["data"] == []


def test_tenants_do_not_share_idempotency_keys(two_tenants: Any) -> None:
    ids = {
        two_tenants.chat(ASK, headers={**bearer(key), "Idempotency-Key": "k"}).json()["id"]
        for key in ("key-a", "key-b")
    }
    assert len(ids) == 2


@pytest.mark.parametrize("text", ["", "{}", "- a", "abc: t", f"{'A' * 64}: t", f"{'a' * 64}: ''",
                                  f"{'a' * 64}: 3", "a: [", f"{sha('')}x: t"])  # fmt: skip
def test_a_bad_key_file_refuses_to_start(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="api_keys_file"):
        Authenticator(GatewayConfig(api_keys_file=str(file)))


def test_without_keys_only_loopback_is_served() -> None:
    assert Authenticator(GatewayConfig()).tenant("").name == "local"
    with pytest.raises(ConfigError, match="loopback"):
        Authenticator(GatewayConfig(host="0.0.0.0"))
    with pytest.raises(ConfigError, match="cannot be read"):
        Authenticator(GatewayConfig(api_keys_file="/nonexistent"))


def test_an_empty_key_never_matches_and_metrics_close_off_loopback(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"{sha('')}: nobody\n")
    auth = Authenticator(GatewayConfig(host="0.0.0.0", api_keys_file=str(file)))
    for header in ("Bearer ", "Bearer", ""):
        with pytest.raises(AuthenticationError):
            auth.tenant(header)
    assert auth.is_open("/health")
    assert not auth.is_open("/metrics")


# -------------------------------------------------------------- disconnects


def eventually(check: Callable[[], bool], seconds: float = 2.0) -> bool:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if check():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_decode(gateway: Any, stream: bool) -> None:
    gateway.workers.token_delay = 0.05
    gateway.workers.say = lambda _: "x" * 1000
    body = {"model": "tiny", "messages": ASK, "stream": stream, "n": 2}
    url = f"{gateway.url}/v1/chat/completions"
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream("POST", url, json=body, timeout=0.5) as answer,
    ):
        lines = answer.iter_lines()  # kept: dropping it would close the connection
        next(lines)
        assert gateway.workers.open_decodes == 1
    assert eventually(lambda: gateway.workers.open_decodes == 0)
    assert eventually(lambda: gateway.core.metrics.running._value.get() == 0)


def test_a_client_that_leaves_stops_its_prefill_and_frees_the_lease(gateway: Any) -> None:
    gateway.workers.prefill_delay = 30
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{gateway.url}/v1/contexts", json={"text": DOC}, timeout=httpx.Timeout(5, read=0.5)
        )
    assert eventually(lambda: gateway.workers.cancelled_prefills == 1)
    gateway.workers.prefill_delay = 0
    assert gateway.post("/v1/contexts", {"text": DOC}).status_code == 200


def test_a_stream_is_cut_at_its_deadline(make_gateway: Callable[..., Any]) -> None:
    gateway = make_gateway(request_timeout_s=1.0)
    gateway.workers.token_delay = 0.3
    gateway.workers.say = lambda _: "x" * 100
    text = gateway.chat(ASK, stream=True).text
    assert '"deadline_exceeded"' in text
    assert "[DONE]" not in text
    assert eventually(lambda: gateway.workers.open_decodes == 0)


# ------------------------------------------------------------------- limits


def test_more_than_max_ongoing_get_429_while_health_answers(
    make_gateway: Callable[..., Any],
) -> None:
    gateway = make_gateway(max_ongoing=2)
    gateway.workers.token_delay = 0.3
    gateway.workers.say = lambda _: "xyz"
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(gateway.chat, ASK) for _ in range(6)]
        assert gateway.get("/health").status_code == 200
        statuses = [a.result() for a in answers]
    refused = [a for a in statuses if a.status_code == 429]
    assert 1 <= len(refused) <= 4
    assert all(a.headers["retry-after"] == "1" for a in refused)
    assert all(a.json()["error"]["code"] == "overloaded" for a in refused)
    assert gateway.chat(ASK).status_code == 200


def test_a_body_that_trickles_in_is_refused_and_frees_its_place(
    make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.3, raising=False)
    gateway = make_gateway(max_ongoing=1)
    url = httpx.URL(gateway.url)
    with socket.create_connection((url.host, url.port), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        )
        with connection.makefile("rb") as file:
            answer = file.read()  # to the end: the connection is closed
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"body_timeout"' in answer
    assert b"0.3 seconds" in answer
    assert gateway.chat(ASK).status_code == 200


# ------------------------------------------------------------------- status


def test_models_health_and_metrics(gateway: Any) -> None:
    assert [m.id for m in gateway.client().models.list()] == ["tiny"]
    assert gateway.client().models.retrieve("tiny").owned_by == "criticalkv"
    assert gateway.get("/health").json() == {"status": "ok"}
    gateway.chat([{"role": "user", "content": DOC}])
    text = gateway.get("/metrics").text
    assert 'requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert "criticalkv_gateway_ttft_seconds_count 1.0" in text
    assert "criticalkv_gateway_prefill_seconds_count 1.0" in text
    assert 'tokens_total{kind="prefilled"}' in text


def test_logs_hold_no_prompts_and_no_keys(
    two_tenants: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    two_tenants.workers.fail_after = 0
    canary = [{"role": "user", "content": "canary-prompt"}]
    two_tenants.chat(canary, headers=bearer("key-a"), stream=True)
    two_tenants.chat(canary, headers=bearer("canary-key"))
    two_tenants.workers.fail_after = None
    two_tenants.chat(canary, headers={**bearer("key-a"), "Idempotency-Key": "canary-idem"})
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("criticalkv")]
    assert ours
    assert not [line for line in ours if "canary" in line or "key-a" in line]
