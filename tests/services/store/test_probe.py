"""The store's own probe: TLS and token as its clients, and an exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from criticalkv.services.store.probe import main
from criticalkv.services.store.process import start_store
from criticalkv.shared.config import StoreConfig


@pytest.fixture
def secured(tmp_path: Path) -> dict[str, str]:
    """A certificate for localhost, its key, and a token."""
    cert, key, token = (tmp_path / name for name in ("cert.pem", "key.pem", "token"))
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {cert} "
        "-subj /CN=store -addext subjectAltName=DNS:localhost"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    token.write_text("correct-horse-battery-staple\n")
    named = {"tls_cert": cert, "tls_key": key, "tls_ca": cert, "token_file": token}
    return {name: str(path) for name, path in named.items()}


def status(tmp_path: Path, **store: str) -> int:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"store": store}))
    return main(str(file))


def test_it_tells_a_serving_store_from_none(tmp_path: Path, secured: dict[str, str]) -> None:
    config = StoreConfig(
        address="localhost:0", data_dir=str(tmp_path / "d"), memory_limit_mb=16, **secured
    )
    with start_store(config) as process:
        # As configured in a container: on all interfaces, asked on this one.
        address = f"0.0.0.0:{process.address.rpartition(':')[2]}"
        assert status(tmp_path, address=address, **secured) == 0
        plain = {name: value for name, value in secured.items() if name != "tls_ca"}
        assert status(tmp_path, address=address, **plain) == 1
    assert status(tmp_path, address=address, **secured) == 1


def test_it_asks_at_a_unix_socket(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/store"
    config = StoreConfig(address=address, data_dir=str(tmp_path / "d"), memory_limit_mb=16)
    with start_store(config):
        assert status(tmp_path, address=address) == 0
    assert status(tmp_path, address=address) == 1


def test_a_wrong_configuration_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(tmp_path, adress="127.0.0.1:1") == 1
    assert "adress" in capsys.readouterr().err


def test_it_runs_as_a_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "criticalkv.services.store.probe", str(tmp_path / "none.yaml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "none.yaml" in done.stderr
