"""The command line: mistakes end in one line, before any process starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from criticalkv.services import cli, demo
from criticalkv.shared.config import Config, load_config
from criticalkv.shared.errors import ConfigError, CriticalKVError


@pytest.fixture
def port() -> Iterator[int]:
    """A port where somebody listens as Ray's proxy does."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def settings(**sections: dict[str, object]) -> Config:
    return load_config(overrides=sections)


def test_a_port_in_use_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=rf"gateway\.port {port} .* is in use"):
        cli._preflight(settings(gateway={"port": port}), True)


def test_a_port_in_use_is_one_line_of_the_command(port: int) -> None:
    command = [sys.executable, "-m", "criticalkv.services.cli", "serve", "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [done.stderr.strip()]


def test_a_free_port_is_accepted() -> None:
    cli._check_port(settings(gateway={"port": demo.free_port()}))


@pytest.mark.parametrize("address", ["nonsense", "host:", ":1", "host:0", "host:99999"])
def test_a_store_address_without_sense_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.address .* is not HOST:PORT"):
        cli._preflight(settings(store={"address": address}), False)


def test_a_store_that_does_not_answer_is_named() -> None:
    address = f"127.0.0.1:{demo.free_port()}"
    with pytest.raises(ConfigError, match=f"no store answers at store.address {address}"):
        cli._preflight(settings(store={"address": address}), False)


def test_another_cluster_needs_a_store_that_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        cli._preflight(Config(), True)


def test_what_ctrl_c_stops_is_said_truthfully(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Ctrl-C stops everything." in cli._next_steps(Config())
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "stops everything" not in cli._next_steps(Config())
    assert "keeps running" in cli._next_steps(Config())


def test_a_failed_deployment_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Deploying failed\nTraceback:\n  somewhere\nConfigError: the cause\n")

    monkeypatch.setattr(serve, "run", fail)
    with pytest.raises(CriticalKVError, match=r"the cause.*--verbose") as caught:
        cli._deploy(Config())
    assert "\n" not in caught.value.message


def test_the_benchmark_has_a_file_of_its_own() -> None:
    command = [sys.executable, "-m", "criticalkv.services.cli", "bench", "ttft", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={"COLUMNS": "200"})
    assert "ttft.json" in done.stdout


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x7fELF\xff\xfe", "not a text file"),
        ("caf\u00e9".encode("latin-1"), "not a text file"),
        (b"text\0text", "not a text file"),
        (b" \n", "is empty"),
    ],
)
def test_a_document_that_is_no_text_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    document = tmp_path / "document"
    document.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        demo.read_document(document)
    assert str(document) in caught.value.message


def test_the_demos_workers_take_turns_and_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.os, "cpu_count", lambda: 8)
    config = demo.beside_others(settings(decode={"threads": 3}))
    assert (config.prefill.threads, config.decode.threads) == (2, 3)
