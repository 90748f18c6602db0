"""Prefill and decode scale apart, 1→2→1 under load, and lose nothing: the whole service."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from openai import OpenAI

from criticalkv.shared.model.loader import LoadedModel

LIMIT_S = 90.0  # for one change of the number, on a slow machine
SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 2.0,
    "report_interval_s": 0.5,
}
LONG, SHORT = 1400, 250  # tokens of a context: two short ones are below the target
CONFIG: dict[str, Any] = {
    "decode": {
        "max_num_seqs": 4,
        "pool_mb": 64,
        "node_cache_mb": 16,
        "autoscaling": {**SCALING, "target_seq_share": 0.5},
    },
    "prefill": {"autoscaling": {**SCALING, "target_waiting_tokens": 1000}},
    "store": {"address": "127.0.0.1:0", "memory_limit_mb": 512},
}


@dataclass
class Service:
    """The service in processes of its own, and how many replicas it had and has."""

    process: subprocess.Popen[str]
    client: OpenAI
    model: str
    seen: dict[str, list[int]] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    number: Iterator[int] = field(default_factory=itertools.count)

    def look(self) -> dict[str, int]:
        """Count the replicas' processes, those that end their work included."""
        lines = [_command(p) for p in psutil.Process(self.process.pid).children(recursive=True)]
        now = {}
        for name in ("prefill", "decode"):
            now[name] = sum(f"ServeReplica:criticalkv:{name}" in line for line in lines)
            seen = self.seen.setdefault(name, [])
            if seen[-1:] != [now[name]]:
                seen.append(now[name])
        return now

    def until(self, deployment: str, count: int, failures: list[Exception]) -> None:
        """Wait until a deployment has this many replicas, and as many have answered."""
        deadline = time.monotonic() + LIMIT_S
        while self.look()[deployment] != count or (
            deployment == "decode" and len(self.answered) < count
        ):
            assert not failures, failures
            assert time.monotonic() < deadline, f"{deployment} {self.seen}, never {count}"
            time.sleep(0.2)

    def stream(self, tokens: int) -> None:
        """Have one answer streamed, and check that it is whole."""
        stream = self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": f"Number {next(self.number)}: tell me all."}],
            max_tokens=tokens,
            temperature=1.0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        [end] = [c for c in chunks if c.choices][-1:]
        reason = end.choices[0].finish_reason
        self.answered.add(end.criticalkv["replica"])  # type: ignore[attr-defined]
        assert reason in ("stop", "length")
        assert chunks[-1].usage is not None
        assert reason == "stop" or chunks[-1].usage.completion_tokens == tokens

    def register(self, tokens: int) -> None:
        """Have a new context prefilled."""
        text = f"{next(self.number)} ".ljust(tokens, "x")
        made = self.client.post("/contexts", body={"text": text}, cast_to=dict[str, Any])
        assert made["id"]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def load(call: Callable[[], None], callers: int, failures: list[Exception]) -> Iterator[None]:
    """Call again and again, from several threads; every call begun is waited for."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            try:
                call()
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=repeat) for _ in range(callers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., LoadedModel]
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("scaled")
    model = tiny_model()
    model.model.save_pretrained(folder / "tiny")
    model.tokenizer.save_pretrained(folder / "tiny")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    file = folder / "config.yaml"
    own = {"model": {"path": str(folder / "tiny")}, "gateway": {"port": port}}
    file.write_text(yaml.safe_dump({**CONFIG, **own}))
    process = started(folder, file)
    try:
        client = OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120, max_retries=0
        )
        yield Service(process, client, client.models.list().data[0].id)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def started(folder: Path, config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "criticalkv.services.cli", "serve", "--config", str(config)]
    log = folder / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, text=True, env={**os.environ})
    deadline = time.monotonic() + 240
    while "CriticalKV is up" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(log.read_text()[-4000:])
        time.sleep(0.2)
    return process


@pytest.mark.parametrize("deployment", ["decode", "prefill"])
def test_under_load_there_are_two_and_then_one_again(service: Service, deployment: str) -> None:
    """Some load goes on while the number falls: the replica that goes may be at work."""
    decode = deployment == "decode"
    much = (lambda: service.stream(300)) if decode else (lambda: service.register(LONG))
    little = (lambda: service.stream(300)) if decode else (lambda: service.register(SHORT))
    failures: list[Exception] = []
    service.seen.clear()
    assert service.look() == {"prefill": 1, "decode": 1}
    with load(much, 4, failures):
        service.until(deployment, 2, failures)
    with load(little, 2, failures):
        service.until(deployment, 1, failures)
    assert not failures
    other = "prefill" if decode else "decode"
    assert service.seen == {deployment: [1, 2, 1], other: [1]}
