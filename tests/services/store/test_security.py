"""Nothing but loopback without TLS and a token; nothing in the clear to another machine."""

from __future__ import annotations

import subprocess

import pytest

from criticalkv.services.store.process import start_store
from criticalkv.services.store.redis_data import check_url
from criticalkv.services.store.security import Security
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import AuthenticationError, ConfigError, StoreUnavailableError
from criticalkv.shared.store_client import StoreClient, StoreCredentials

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def files(tmp_path):
    """A self-signed certificate for localhost, its key, and a token."""
    cert, key, token = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "token"
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {cert} "
        "-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    token.write_text(TOKEN + "\n")
    return {"tls_cert": str(cert), "tls_key": str(key), "tls_ca": str(cert),
            "token_file": str(token)}  # fmt: skip


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:50051", "store.local:1"])
@pytest.mark.parametrize("lacking", ["all", "tls_cert", "tls_key", "token_file"])
def test_other_addresses_need_tls_and_token(files, address, lacking):
    given = {} if lacking == "all" else {k: v for k, v in files.items() if k != lacking}
    with pytest.raises(ConfigError, match="loopback"):
        Security(StoreConfig(address=address, **given))


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:1", "[::1]:0", "unix:/run/x.sock"])
def test_local_addresses_need_nothing(address):
    assert Security(StoreConfig(address=address)).credentials is None


@pytest.mark.parametrize("text", ["", "\n", "short", "naïve-" * 4, "two\nlines-of-a-token"])
def test_weak_token_is_refused(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ConfigError, match="token_file"):
        Security(StoreConfig(token_file=str(path)))


def test_tls_and_token_end_to_end(tmp_path, files, make_node):
    config = StoreConfig(
        address="0.0.0.0:0", data_dir=str(tmp_path / "d"), memory_limit_mb=16, **files
    )
    with start_store(config.model_copy(update={"address": "localhost:0"})) as process:
        with process.client() as client:
            node = make_node()
            node.put(client)
            with client.open_get(node.node_id) as reader:
                assert [bytes(p) for _, p in reader] == node.payloads
        good = StoreCredentials.of(config)
        assert good is not None
        wrong = StoreCredentials(good.tls_ca, "wrong-" * 5)
        for credentials in (wrong, StoreCredentials(good.tls_ca)):
            with StoreClient(process.address, credentials=credentials) as client:
                with pytest.raises(AuthenticationError):
                    client.stat([node.node_id])
                with pytest.raises(AuthenticationError):
                    client.open_get(node.node_id)
                with pytest.raises(AuthenticationError):
                    make_node().put(client)
        plain = StoreClient(process.address, timeout_s=1.0)
        with plain, pytest.raises(StoreUnavailableError):
            plain.stat([node.node_id])


def test_client_sends_no_token_in_the_clear(files):
    config = StoreConfig(address="10.1.2.3:1", token_file=files["token_file"])
    with pytest.raises(ConfigError, match="clear"):
        StoreCredentials.of(config)


@pytest.mark.parametrize(
    "url",
    [
        "redis://10.0.0.1:6379",
        "redis://:password@10.0.0.1",
        "rediss://10.0.0.1",
        "redis://redis.internal/0",
        "rediss://user@redis.internal",
        "http://localhost",
        "redis://localhost:notaport",
        "sentinel",
        "",
    ],
)
def test_unsafe_redis_urls_are_refused(url):
    with pytest.raises(ConfigError, match="redis_url") as caught:
        check_url(url)
    assert "password@" not in caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://127.0.0.1:7000/3",
        "redis://[::1]:7000",
        "unix:///run/x.sock?db=2",
        "rediss://user:pw@redis.internal:6380/1",
    ],
)
def test_safe_redis_urls(url):
    assert check_url(url).port > 0
