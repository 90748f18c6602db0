"""What is said to the whole service, and its keys, are found in no log, key name or metric.

Also what only the whole service shows of the HTTP front: Ray Serve's proxy in front of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from openai import APIError, OpenAI
from valkey_servers import admin_of

from criticalkv.shared.model.loader import LoadedModel

START_S = 240
CANARY = f"canary{secrets.token_hex(6)}"
KEY, WRONG_KEY, STORE_TOKEN = (f"{name}{secrets.token_hex(12)}" for name in ("sk", "bad", "tok"))
SECRETS = (CANARY, KEY, WRONG_KEY, STORE_TOKEN)
# A third of the turns is not stored and some prefills fail: what is logged then counts most.
FAULTS = "decode.publish=error:0.3;prefill.layer=error:0.05;seed=3"
# Ten numbers in a row are a list of token ids, whatever they are.
NUMBERS = re.compile(rb"(?:\b\d{1,3}, ?){9}\d{1,3}\b")


@dataclass
class Service:
    """The service in processes of its own, all it wrote, and what it answered."""

    process: subprocess.Popen[bytes]
    url: str
    model: str
    folder: Path
    answers: list[str] = field(default_factory=list)
    failures: list[APIError] = field(default_factory=list)

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEY, timeout=60, max_retries=0)

    def post(self, path: str, body: Any, key: str = KEY, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(
            f"{self.url}{path}",
            content=content,
            headers={"Authorization": f"Bearer {key}", **headers},
            timeout=60,
        )

    def said(self, call: Callable[[], str]) -> None:
        """Remember an answer, or what an injected fault made of it."""
        try:
            self.answers.append(call())
        except APIError as error:
            self.failures.append(error)

    def files(self) -> dict[str, bytes]:
        """Everything that the service has written: its output, and Ray's session."""
        found = {"serve.log": (self.folder / "serve.log").read_bytes()}
        lines = [_command(p) for p in psutil.Process(self.process.pid).children(recursive=True)]
        roots = set(re.findall(r"(/tmp/ckv-[^/\s]+/r)\b", " ".join(lines)))
        assert len(roots) == 1, lines
        for path in [*Path(*roots).rglob("*"), self.folder / "store" / "valkey.log"]:
            if path.is_file() and not path.is_symlink():
                with suppress(OSError):
                    found[str(path)] = path.read_bytes()
        assert any("replica" in name and data for name, data in found.items()), list(found)
        return found


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., LoadedModel]
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("canary")
    port = _configure(folder, tiny_model())
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "criticalkv.services.cli", "serve", "--verbose",
             "--config", str(folder / "config.yaml")],
            stdout=log, stderr=log, env={**os.environ, "CRITICALKV_FAILPOINTS": FAULTS},
        )  # fmt: skip
    try:
        _await_start(process, folder / "serve.log")
        running = Service(process, f"http://127.0.0.1:{port}", "", folder)
        running.model = running.client.models.list().data[0].id
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _configure(folder: Path, model: LoadedModel) -> int:
    """Write the model and all settings; return the port."""
    model.model.save_pretrained(folder / "tiny")
    model.tokenizer.save_pretrained(folder / "tiny")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    (folder / "keys.yaml").write_text(f"{hashlib.sha256(KEY.encode()).hexdigest()}: me\n")
    (folder / "token").write_text(STORE_TOKEN)
    (folder / "token").chmod(0o600)
    settings = {
        "model": {"path": str(folder / "tiny")},
        "gateway": {
            "port": port,
            "api_keys_file": str(folder / "keys.yaml"),
            "write_timeout_s": 1.0,
        },
        "store": {
            "address": "127.0.0.1:0",
            "token_file": str(folder / "token"),
            "data_dir": str(folder / "store"),
            "memory_limit_mb": 256,
        },
        "decode": {
            "pool_mb": 64,
            "node_cache_mb": 16,
            "autoscaling": {"min_replicas": 1, "max_replicas": 1},
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return port


def _await_start(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while b"CriticalKV is up" not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(log.read_text()[-4000:])
        time.sleep(0.2)


def test_the_front_of_the_whole_service_is_closed_and_names_requests(service: Service) -> None:
    """Ray Serve has routes and headers of its own."""
    for path in ("/", "/v1/models", "/docs", "/openapi.json", "/-/routes", "/-/healthz", "/x"):
        answer = httpx.get(f"{service.url}{path}")
        is_ray = path.startswith("/-/")  # no more than the route's prefix and "success"
        assert answer.status_code == (200 if is_ray else 401), path
        assert is_ray or answer.headers.get_list("x-request-id")[0].startswith("req_")
    for given, kept in (("trace-1", True), ("a b", False)):
        answer = httpx.get(f"{service.url}/health", headers={"X-Request-Id": given})
        (name,) = answer.headers.get_list("x-request-id")
        assert (name == given) == kept
    large = {f"x-{i}": "x" * 8000 for i in range(9)}
    assert httpx.get(f"{service.url}/health", headers=large).status_code == 431


def test_a_client_that_does_not_read_is_cut_off(service: Service) -> None:
    """The gateway hands its answer to Serve's proxy, which has to notice it.

    The answer is longer than the few megabytes that the kernel takes at most.
    """
    body = json.dumps(
        {"model": service.model, "stream": True, "n": 8, "logprobs": True, "top_logprobs": 20,
         "max_tokens": 1500, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}
    )  # fmt: skip
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(60)
        reader.connect(("127.0.0.1", int(service.url.rpartition(":")[2])))
        reader.sendall((head + body).encode())
        seen = reader.recv(100)
        assert seen.startswith(b"HTTP/1.1 200"), seen
        deadline = time.monotonic() + 60
        while b"does not read" not in b"".join(service.files().values()):
            assert time.monotonic() < deadline, "it still holds its connection"
            time.sleep(0.5)
        with suppress(ConnectionResetError):
            while piece := reader.recv(1 << 16):
                seen += piece
    assert b"[DONE]" not in seen
    assert httpx.get(f"{service.url}/health").status_code == 200


def test_nothing_that_was_said_and_no_key_is_found_anywhere(service: Service) -> None:
    for _ in range(2):
        _talk(service)
        _go_wrong(service)
    assert len(service.answers) > 6
    files = service.files()
    with admin_of(service.folder / "store") as redis:
        files["Redis key names"] = b"\n".join(redis.scan_iter(count=1000))
    files["metrics"] = httpx.get(f"{service.url}/metrics").content
    for name, data in files.items():
        for secret in SECRETS:
            assert secret.encode() not in data, (name, secret, _around(data, secret.encode()))
        for answer in service.answers:
            assert not _holds(data, answer), (name, answer)
        numbers = NUMBERS.search(data)
        assert numbers is None, (name, _around(data, numbers.group()))


def _talk(service: Service) -> None:
    """Every way to say something; what a fault ends is told by its error."""
    client, asked = service.client, {"model": service.model, "temperature": 1.0}
    prompt: Any = [{"role": "user", "content": f"{CANARY} is the word. " * 8}]
    chat, responses = client.chat.completions, client.responses

    def text(completion: Any) -> str:
        return str(completion.choices[0].message.content)

    for fields in ({}, {"n": 2}, {"logprobs": True, "top_logprobs": 3}):
        service.said(
            lambda f=fields: text(chat.create(messages=prompt, max_tokens=30, **asked, **f))
        )  # type: ignore[misc]
    stream = chat.create(messages=prompt, max_tokens=30, stream=True, **asked)
    service.said(lambda: "".join(c.choices[0].delta.content or "" for c in stream))
    long = f"{CANARY} {secrets.token_hex(4)} " * 60
    made: dict[str, Any] = {}

    def register() -> str:
        body = {"text": long, "cache_salt": CANARY}
        made.update(client.post("/contexts", body=body, cast_to=dict[str, Any]))
        return CANARY  # no answer, and yet to be found nowhere

    service.said(register)
    if made:
        ext = {"criticalkv": {"context_id": made["id"]}}
        service.said(
            lambda: text(chat.create(messages=prompt, max_tokens=30, **asked, extra_body=ext))
        )
        service.post(f"/v1/contexts/{made['id']}/pin", {})
        client.delete(f"/contexts/{made['id']}", cast_to=object)
    own = {"instructions": CANARY, "metadata": {CANARY: CANARY}, "user": CANARY}
    key = {"Idempotency-Key": f"{CANARY}{secrets.token_hex(4)}"}

    def respond() -> str:
        first = responses.create(
            input=CANARY, max_output_tokens=30, **asked, **own, extra_headers=key
        )
        if first.model_extra["criticalkv"]["published"]:  # type: ignore[index]
            for instructions in (CANARY, f"other {CANARY}"):
                responses.create(
                    input=CANARY, previous_response_id=first.id, max_output_tokens=30,
                    instructions=instructions, **asked,
                )  # fmt: skip
            responses.retrieve(first.id)
            responses.delete(first.id)
        return first.output_text

    service.said(respond)
    service.said(lambda: _streamed(responses, asked))
    _leave(service, prompt)


def _streamed(responses: Any, asked: dict[str, Any]) -> str:
    with responses.stream(input=CANARY, max_output_tokens=30, **asked) as stream:
        return "".join(e.delta for e in stream if e.type == "response.output_text.delta")


def _leave(service: Service, messages: Any) -> None:
    """Cancel a long answer after its first words."""
    stream = service.client.chat.completions.create(
        model=service.model, messages=messages, max_tokens=1500, temperature=1.5, stream=True
    )
    with suppress(APIError):
        next(stream)
        next(stream)
    stream.close()


def _go_wrong(service: Service) -> None:
    """Every kind of refusal, with the canary where the fault is."""
    good = [{"role": "user", "content": CANARY}]
    chat: dict[str, Any] = {"model": service.model, "messages": good}
    bodies: list[Any] = [
        {**chat, "model": CANARY},
        {**chat, CANARY: 1},
        {**chat, "messages": [{"role": CANARY, "content": "x"}]},
        {**chat, "messages": [{"role": "user", "content": [{"type": CANARY, "text": CANARY}]}]},
        {**chat, "messages": [{"role": "user", "content": f"{CANARY} " * 3000}]},
        {**chat, "top_p": float("nan")},
        {**chat, "seed": CANARY},
        {**chat, "tools": [CANARY]},
        {**chat, "criticalkv": {"policy": CANARY}},
        {**chat, "criticalkv": {"read_tier": CANARY}},
        {**chat, "criticalkv": {"context_id": CANARY}},
        f'{{"{CANARY}'.encode(),
        f'{{"model": "{CANARY}\\ud800"}}'.encode(),
        f"[{CANARY}".encode() * 10_000,
    ]
    for body in bodies:
        assert 400 <= service.post("/v1/chat/completions", body).status_code < 500
    body = {"model": service.model, "input": CANARY}
    for fields in ({"previous_response_id": CANARY}, {"input": [{"type": CANARY}]}, {CANARY: 1}):
        assert 400 <= service.post("/v1/responses", {**body, **fields}).status_code < 500
    assert service.post("/v1/contexts", {"text": CANARY, "ttl": CANARY}).status_code == 400
    assert service.post("/v1/chat/completions", chat, key=WRONG_KEY).status_code == 401
    headers = {"Idempotency-Key": CANARY * 30, "X-Request-Id": f"{CANARY} {CANARY}"}
    assert service.post("/v1/chat/completions", chat, **headers).status_code == 400
    for path in ("/v1/contexts/", "/v1/responses/", "/v1/models/"):
        answer = httpx.get(
            f"{service.url}{path}{CANARY}", headers={"Authorization": f"Bearer {KEY}"}
        )
        assert answer.status_code == 404


def _holds(data: bytes, answer: str) -> bool:
    """Whether a stretch of an answer is in it, as it is or as Python or JSON would write it."""
    stretch = answer.strip()[:12]
    if len(stretch) < 8:
        return False  # too short to be told from chance
    spelled = (stretch, repr(stretch)[1:-1], json.dumps(stretch)[1:-1])
    return any(text.encode() in data for text in spelled)


def _around(data: bytes, found: bytes) -> bytes:
    at = data.index(found)
    return data[max(0, at - 300) : at + 300]
