"""Prefill on one node, decode on another, the store at an address of its own.

A node that dies takes its replicas along, and nothing that a client holds.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray_nodes
import yaml
from openai import APIConnectionError, APIStatusError, APITimeoutError, OpenAI

from criticalkv.services.store.process import StoreProcess, start_store
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.loopback import is_loopback
from criticalkv.shared.model.loader import LoadedModel

LIMIT_S = 120.0  # for one change of the cluster, on a slow machine
DOCUMENT = "The lamp is green, the door is shut. " * 12
QUESTIONS = (
    ("What is green?", "And what is shut?"),
    ("What colour is the lamp?", "Is the door open?"),
)
ONE = {"min_replicas": 1, "max_replicas": 1}


@dataclass
class Cluster:
    """The nodes' process, and a client of the service that runs on them."""

    process: subprocess.Popen[str]
    client: OpenAI
    model: str = ""

    def tell(self, *command: str) -> Any:
        """Send a command to the nodes' process; return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or "null")

    def register(self, text: str) -> dict[str, Any]:
        return self.client.post("/contexts", body={"text": text}, cast_to=dict[str, Any])

    def ask(self, question: str, handle: str) -> Any:
        return self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=12,
            temperature=0,
            extra_body={"criticalkv": {"context_id": handle}},
        )

    def converse(self, handle: str, questions: tuple[str, ...]) -> list[Any]:
        answers: list[Any] = []
        for question in questions:
            answers.append(self.ask(question, answers[-1].id if answers else handle))
        return answers

    def until_on(self, deployment: str, node: str) -> None:
        """Wait until the deployment's one replica runs on this node."""
        deadline = time.monotonic() + LIMIT_S
        while set(self.tell("where").get(deployment, {}).values()) != {node}:
            assert time.monotonic() < deadline, f"no {deployment} replica on the new node"
            time.sleep(0.5)


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def until_back(call: Callable[[], Any]) -> Any:
    """Call as a client does that retries what the service says is temporary."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return call()
        except (APIStatusError, APIConnectionError) as error:
            passing = getattr(error, "status_code", 503) in (429, 503)
            if not passing or isinstance(error, APITimeoutError) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def own_address() -> str:
    """This machine's address on a network; loopback where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing: finds the route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A store that other machines could reach, hence with TLS and a token."""
    folder, host = tmp_path_factory.mktemp("apart"), own_address()
    cert, key, token = (folder / name for name in ("cert.pem", "key.pem", "token"))
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {cert} "
        f"-subj /CN=store -addext subjectAltName=IP:{host}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    token.write_text("token-of-the-store-apart")
    files = {"tls_cert": cert, "tls_key": key, "tls_ca": cert, "token_file": token}
    config = StoreConfig(
        address=f"{host}:0",
        data_dir=str(folder / "data"),
        memory_limit_mb=256,
        **{name: str(path) for name, path in files.items()},  # type: ignore[arg-type]
    )
    with start_store(config) as process:
        yield process


@pytest.fixture(scope="module")
def cluster(
    store: StoreProcess,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[..., LoadedModel],
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("nodes")
    model = tiny_model()
    model.model.save_pretrained(folder / "tiny")
    model.tokenizer.save_pretrained(folder / "tiny")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    clients = ("tls_ca", "token_file")
    settings = {
        "model": {"path": str(folder / "tiny")},
        "store": {"address": store.address, **{n: getattr(store.config, n) for n in clients}},
        "gateway": {"port": port, "ray_resources": {"gateway": 1}},
        "prefill": {"ray_resources": {"prefill": 1}, "autoscaling": ONE},
        "decode": {
            "ray_resources": {"decode": 1},
            "autoscaling": ONE,
            "pool_mb": 64,
            "node_cache_mb": 16,
        },
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    url = f"http://127.0.0.1:{port}/v1"
    with started(file, folder / "log") as process:
        client = OpenAI(base_url=url, api_key="none", timeout=120, max_retries=0)
        cluster = Cluster(process, client)
        assert cluster.answer() == "up", (folder / "log").read_text()[-4000:]
        cluster.model = client.models.list().data[0].id
        yield cluster
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def started(config: Path, log: Path) -> subprocess.Popen[str]:
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, ray_nodes.__file__, str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


@pytest.mark.timeout(600)
def test_conversations_outlive_the_nodes_that_held_them(
    cluster: Cluster, store: StoreProcess
) -> None:
    assert not is_loopback(store.address.rpartition(":")[0]) or is_loopback(own_address())
    where, nodes = cluster.tell("where"), cluster.tell("names")
    assert {name: list(found.values()) for name, found in where.items()} == {
        name: [node] for name, node in nodes.items()
    }
    assert len(set(nodes.values())) == 3

    context = cluster.register(DOCUMENT)
    before = [cluster.converse(context["id"], questions) for questions in QUESTIONS]
    for answer in (answer for answers in before for answer in answers):
        assert answer.criticalkv["replica"].endswith(next(iter(where["decode"])))
        assert answer.criticalkv["prefill_ms"] == 0
        assert answer.usage.prompt_tokens_details.cached_tokens > len(DOCUMENT) // 2

    # The node that decodes dies; another one takes its place.
    assert cluster.tell("kill", "decode") == nodes["decode"]
    cluster.until_on("decode", cluster.tell("add", "decode"))
    for questions, answers in zip(QUESTIONS, before, strict=True):
        again = until_back(lambda a=answers, q=questions: cluster.ask(q[-1], a[-2].id))
        assert text_of(again) == text_of(answers[-1])
        assert again.criticalkv["prefill_ms"] == 0
        assert again.criticalkv["bytes_pulled"] > 0

    # The node that prefills dies: what is stored still answers, then new contexts do.
    assert cluster.tell("kill", "prefill") == nodes["prefill"]
    again = until_back(lambda: cluster.ask(QUESTIONS[0][0], context["id"]))
    assert text_of(again) == text_of(before[0][0])
    assert again.criticalkv["prefill_ms"] == 0
    cluster.until_on("prefill", cluster.tell("add", "prefill"))
    other = until_back(lambda: cluster.register("Another one. " + DOCUMENT))
    assert until_back(lambda: cluster.ask("What is green?", other["id"])).usage is not None
