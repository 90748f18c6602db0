"""Nothing but loopback without TLS and a token; nothing in the clear to another machine."""

from __future__ import annotations

import pytest
import trustme

from criticalkv.services.store.process import start_store
from criticalkv.services.store.redis_data import check_url
from criticalkv.services.store.security import Security
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import AuthenticationError, ConfigError, StoreUnavailableError
from criticalkv.shared.store_channel import StoreCredentials
from criticalkv.shared.store_client import StoreClient

TOKEN = "correct-horse-battery-staple"


def write(path, *parts):
    path.write_bytes(b"".join(part.bytes() for part in parts))
    return str(path)


@pytest.fixture
def authority():
    return trustme.CA()


@pytest.fixture
def files(tmp_path, authority):
    """An authority's certificate, one of it for localhost, its key, and a token."""
    server, token = authority.issue_cert("localhost", "127.0.0.1"), tmp_path / "token"
    token.write_text(TOKEN + "\n")
    return {
        "tls_cert": write(tmp_path / "cert.pem", *server.cert_chain_pems),
        "tls_key": write(tmp_path / "key.pem", server.private_key_pem),
        "tls_ca": write(tmp_path / "ca.pem", authority.cert_pem),
        "token_file": str(token),
    }


@pytest.fixture
def issue(tmp_path):
    """Write a client's certificate and key of an authority; return the settings."""

    def issue(authority, name):
        client = authority.issue_cert(f"{name}.clients.internal")
        return {
            "tls_client_cert": write(tmp_path / f"{name}.pem", *client.cert_chain_pems),
            "tls_client_key": write(tmp_path / f"{name}.key", client.private_key_pem),
        }

    return issue


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


def test_clients_show_certificates_where_the_store_wants_them(tmp_path, files, issue, make_node):
    clients, strangers = trustme.CA(), trustme.CA()
    wanted = write(tmp_path / "clients.pem", clients.cert_pem)
    ours, theirs = issue(clients, "ours"), issue(strangers, "theirs")
    config = StoreConfig(
        address="localhost:0", memory_limit_mb=16, tls_client_ca=wanted, **files, **ours
    )
    with start_store(config) as process:
        node = make_node()
        with process.client() as client:
            node.put(client)
            with client.open_get(node.node_id) as reader:
                assert [bytes(p) for _, p in reader] == node.payloads
        base = config.model_copy(update={"address": process.address})
        none = {"tls_client_cert": "", "tls_client_key": ""}
        for pair in (none, theirs):
            with StoreClient.of(base.model_copy(update=pair), timeout_s=1.0) as client:
                assert not client.healthy()
                with pytest.raises(StoreUnavailableError):
                    client.stat([node.node_id])


def test_certificates_of_clients_need_tls_at_the_server(tmp_path, authority):
    wanted = write(tmp_path / "clients.pem", authority.cert_pem)
    with pytest.raises(ConfigError, match="tls_client_ca needs"):
        Security(StoreConfig(address="127.0.0.1:0", tls_client_ca=wanted))


def test_unreadable_authority_of_clients_is_refused(files):
    with pytest.raises(ConfigError, match="certificates"):
        Security(StoreConfig(tls_client_ca="/does/not/exist", **files))


@pytest.mark.parametrize("lacking", ["tls_client_cert", "tls_client_key", "tls_ca"])
def test_half_a_client_certificate_is_refused(files, issue, authority, lacking):
    given = {"tls_ca": files["tls_ca"], **issue(authority, "ours"), lacking: ""}
    with pytest.raises(ConfigError, match="together"):
        StoreCredentials.of(StoreConfig(**given))


def test_secrets_have_no_repr(files, issue, authority):
    credentials = StoreCredentials.of(StoreConfig(**files, **issue(authority, "ours")))
    assert TOKEN not in repr(credentials)
    assert "PRIVATE KEY" not in repr(credentials)


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
    assert check_url(url).kind == "single"
