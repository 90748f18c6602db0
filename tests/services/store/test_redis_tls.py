"""TLS to Redis, for metadata and payloads: verified, or not at all."""

from __future__ import annotations

import ssl
import subprocess

import pytest
from faulty_proxy import FaultyProxy
from store_thread import store_on
from valkey_servers import Server

from criticalkv.services.store.redis_data import RedisData, check_url
from criticalkv.services.store.topology import data_client
from criticalkv.shared.errors import ConfigError, StoreUnavailableError


@pytest.fixture
def certificate(tmp_path):
    """Make a self-signed certificate for a host; return its file and its key's."""

    def make(name: str) -> tuple[str, str]:
        cert, key = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        command = (
            f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {cert} "
            f"-subj /CN={name} -addext subjectAltName=DNS:{name},IP:127.0.0.1"
        )
        subprocess.run(command.split(), check=True, capture_output=True)
        return str(cert), str(key)

    return make


@pytest.fixture
def port(tmp_path, certificate):
    """A Redis with TLS, whose certificate is localhost.pem."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate("localhost"))
    with (
        Server(tmp_path, "--requirepass", "pw") as server,
        FaultyProxy(("127.0.0.1", server.port), context) as proxy,
    ):
        yield proxy.port


def test_store_over_tls(port, tmp_path, make_node):
    url = f"rediss://:pw@localhost:{port}"
    with store_on(url, redis_ca=str(tmp_path / "localhost.pem")) as client:
        node = make_node(rows=2000, tokens=2000)
        assert node.put(client).published
        with client.open_get(node.node_id) as reader:
            assert [bytes(p) for _, p in reader] == node.payloads


@pytest.mark.parametrize("ca", ["other", "system"])
async def test_unknown_certificates_are_refused(port, certificate, ca):
    path = certificate("other")[0] if ca == "other" else ""
    deployment = check_url(f"rediss://:pw@localhost:{port}", path)
    redis, data = RedisData(deployment, 5.0), data_client(deployment, 5.0)
    try:
        with pytest.raises(StoreUnavailableError):
            await redis.command("PING", "x")
        with pytest.raises(StoreUnavailableError):
            data.set_many([("k", b"v")], 1000)
    finally:
        data.close()
        await redis.close()


async def test_plain_redis_where_tls_is_wanted(tmp_path):
    with Server(tmp_path) as server:
        deployment = check_url(f"rediss://:pw@localhost:{server.port}")
        redis, data = RedisData(deployment, 0.5), data_client(deployment, 0.5)
        try:
            with pytest.raises(StoreUnavailableError):
                await redis.command("GET", "k")
            with pytest.raises(StoreUnavailableError):
                data.set_many([("k", b"v")], 1000)
        finally:
            data.close()
            await redis.close()


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_unusable_ca_is_a_clear_error(tmp_path, text):
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="redis_ca"):
        check_url("rediss://:pw@localhost", str(path))
