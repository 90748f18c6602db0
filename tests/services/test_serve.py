"""The whole service as a user starts it: Ray Serve, real model, separate processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import psutil
import pytest
from openai import APIStatusError, OpenAI

from criticalkv.shared.model.loader import LoadedModel

START_S = 240
DOCUMENT = topics["with"][:2000]


@dataclass
class Running:
    """A service in processes of its own."""

    process: subprocess.Popen[str]
    client: OpenAI
    model: str

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def replicas(self, deployment: str) -> list[psutil.Process]:
        return [p for p in self.processes() if f"criticalkv:{deployment}" in command(p)]

    def register(self, text: str, **fields: Any) -> dict[str, Any]:
        return self.client.post("/contexts", body={"text": text, **fields}, cast_to=dict[str, Any])

    def ask(self, question: str, context_id: str, **fields: Any) -> Any:
        return self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=fields.pop("max_tokens", 12),
            temperature=0,
            extra_body={"criticalkv": {"context_id": context_id, "read_tier": 0.4}},
            **fields,
        )


def until_back(call: Callable[[], Any], limit_s: float = 90) -> Any:
    """Call as a client does that retries what the service says is temporary."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return call()
        except APIStatusError as error:
            if error.status_code not in (429, 503) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(tmp_path: Path, demo_model: LoadedModel) -> Running:
    port = free_port()
    log = (tmp_path / "serve.log").open("w")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "criticalkv.services.cli",
            "serve",
            "--port",
            str(port),
            "--model",
            demo_model.spec.path,
        ],
        stdout=log,
        stderr=log,
        text=True,
        env={**os.environ, "CRITICALKV__STORE__ADDRESS": "127.0.0.1:0"},
    )
    client = OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120, max_retries=0
    )
    deadline = time.monotonic() + START_S
    # The gateway answers before every replica is there; the command says when.
    while "CriticalKV is up" not in (tmp_path / "serve.log").read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError((tmp_path / "serve.log").read_text()[-4000:])
        time.sleep(0.5)
    return Running(process, client, client.models.list().data[0].id)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, demo_model: LoadedModel) -> Iterator[Running]:
    running = start(tmp_path_factory.mktemp("serve"), demo_model)
    children = running.processes()
    yield running
    running.process.send_signal(signal.SIGINT)
    running.process.wait(60)
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive, f"left behind: {[command(p)[:80] for p in alive]}"


def test_every_listening_socket_is_loopback(service: Running) -> None:
    ours = [psutil.Process(service.process.pid), *service.processes()]
    listening = [
        (connection.laddr.ip, connection.laddr.port, command(process)[:60])
        for process in ours
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 5, "no sockets seen"
    open_to_others = [x for x in listening if not re.match(r"127\.|::1$|::ffff:127\.", x[0])]
    assert not open_to_others


def test_there_are_two_decode_replicas_in_processes_of_their_own(service: Running) -> None:
    assert len({p.pid for p in service.replicas("decode")}) == 2
    assert len(service.replicas("prefill")) == 1


def test_a_conversation_goes_on_after_its_decode_workers_are_killed(service: Running) -> None:
    context = service.register(DOCUMENT)
    first = service.ask("What does the with statement do?", context["id"])
    expected = service.ask("And in other words?", first.id)
    for replica in service.replicas("decode"):
        replica.send_signal(signal.SIGKILL)
    again = until_back(lambda: service.ask("And in other words?", first.id))
    assert again.choices[0].message.content == expected.choices[0].message.content
    assert again.criticalkv["bytes_pulled"] > 0
    assert again.criticalkv["prefill_ms"] == 0


def test_prefill_killed_before_its_commit_is_a_miss_then_recomputed(service: Running) -> None:
    text = "Killed. " + topics["try"][:6000]
    failures: list[Exception] = []

    def register() -> None:
        try:
            service.register(text)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=register)
    thread.start()
    time.sleep(1.5)
    service.replicas("prefill")[0].send_signal(signal.SIGKILL)
    thread.join(120)
    assert all(isinstance(e, APIStatusError) and e.status_code == 503 for e in failures)
    context = until_back(lambda: service.register(text))
    assert until_back(lambda: service.ask("What is it about?", context["id"])).usage is not None


def test_streams_end_with_done_and_carry_the_handle(service: Running) -> None:
    context = service.register(DOCUMENT)
    chunks = list(
        service.ask(
            "What does it do?",
            context["id"],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    last = [c for c in chunks if c.choices and c.choices[0].finish_reason][-1]
    assert last.criticalkv["handle"] == chunks[0].id
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 300


def test_a_disconnect_frees_the_decode_replica(service: Running) -> None:
    """Two seconds later the replicas compute nothing any more."""
    context = service.register(DOCUMENT)
    stream = service.ask("Tell me everything.", context["id"], max_tokens=2000, stream=True)
    next(iter(stream))
    assert busy_s(service, 1.5) > 0.4, "nothing is being generated"
    stream.close()
    time.sleep(2)
    assert busy_s(service, 1.5) < 0.2


def busy_s(service: Running, seconds: float) -> float:
    """CPU seconds that the decode replicas use in the next `seconds`."""

    def used() -> float:
        times = [process.cpu_times() for process in service.replicas("decode")]
        return sum(t.user + t.system for t in times)

    before = used()
    time.sleep(seconds)
    return used() - before


def test_the_readmes_client_example_runs(service: Running, tmp_path: Path) -> None:
    code = python_blocks()[0].replace(
        "http://127.0.0.1:8000", str(service.client.base_url).removesuffix("/v1/")
    )
    out = run_example(code, tmp_path)
    assert "'tier': '0.1'" in out


def test_the_readmes_local_example_runs(demo_model: LoadedModel, tmp_path: Path) -> None:
    assert demo_model.spec.name == "SmolLM2-135M-Instruct"
    out = run_example(python_blocks()[1], tmp_path)
    for tier in ("0.05", "0.1", "0.4", "1.0"):
        assert re.search(rf"^{re.escape(tier)} \S", out, re.M), out


def python_blocks() -> list[str]:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.S)


def run_example(code: str, folder: Path) -> str:
    (folder / "document.txt").write_text(DOCUMENT)
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_when_it_stops_no_stream_ends_in_silence(service: Running) -> None:
    """The last one here: it stops the service."""
    context = service.register(DOCUMENT)
    body = {
        "model": service.model,
        "messages": [{"role": "user", "content": "Write a long story about it."}],
        "max_tokens": 3000,
        "stream": True,
        "criticalkv": {"context_id": context["id"], "read_tier": 0.4},
    }
    url = f"{service.client.base_url}chat/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        for _ in range(5):
            assert "error" not in json.loads(next(lines))
        service.process.send_signal(signal.SIGTERM)
        *_, last = lines
    assert last == "[DONE]" or json.loads(last)["error"]["code"] == "cancelled"
