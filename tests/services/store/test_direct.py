"""Direct reads: what happens when Redis is not where, or not as, the store says."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from dataclasses import replace

import pytest
from store_thread import store_on
from valkey_servers import Server

from criticalkv.services.store import offer as offer_module
from criticalkv.services.store.offer import Offer
from criticalkv.services.store.process import start_store
from criticalkv.shared import direct_read
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import DeadlineError, NodeMissingError, StoreUnavailableError
from criticalkv.shared.redis_location import Location
from criticalkv.shared.store_client import StoreClient

BIG = {"layers": 12, "rows": 2032, "head_dim": 64, "tokens": 4096}  # 24 segments of 1 MiB


def direct_client(process):
    config = process.config.model_copy(update={"address": process.address, "read_path": "direct"})
    return StoreClient.of(config)


@pytest.fixture
def client(store_process):
    with direct_client(store_process) as client:
        yield client


def payloads(client, node, **options):
    with client.open_get(node.node_id, **options) as reader:
        return [bytes(payload) for _, payload in reader]


def lead_to(client, monkeypatch, change):
    """Have the client be led to what `change` makes of the store's offer."""
    right = client._direct.location
    monkeypatch.setattr(client._direct, "location", lambda offered: change(right(offered)))


@pytest.fixture
def hole(tmp_path):
    """A socket that accepts connections, and what it answers to everything."""
    path, answer, kept = str(tmp_path / "hole"), [b""], []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

        def talk(connection):
            try:
                while connection.recv(1 << 16):
                    for at in range(len(answer[0])):
                        connection.sendall(answer[0][at : at + 1])
                        time.sleep(0.02)
            except OSError:
                pass

        threading.Thread(target=serve, daemon=True).start()
        yield path, answer
        for connection in kept:
            connection.close()


def test_wrong_password_falls_back_and_is_remembered(client, make_node, monkeypatch, caplog):
    node = make_node(**BIG)
    node.put(client)
    lead_to(client, monkeypatch, lambda right: replace(right, password="not-the-password"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert payloads(client, node) == node.payloads
    assert len([r for r in caplog.records if "cannot be read directly" in r.message]) == 1
    assert not client._direct.open
    with client.open_get(node.node_id) as reader:
        assert reader._location is None  # not even asked for
    monkeypatch.undo()
    client._direct._closed_until = 0.0  # a while later
    assert payloads(client, node) == node.payloads
    assert client._direct.open


def test_nobody_there_falls_back(client, make_node, monkeypatch, tmp_path):
    node = make_node()
    node.put(client)
    lead_to(client, monkeypatch, lambda right: replace(right, path=str(tmp_path / "none")))
    assert payloads(client, node) == node.payloads


def test_another_machine_without_tls_is_not_visited(client, make_node, monkeypatch):
    node = make_node()
    node.put(client)
    right = client._direct.location

    def elsewhere(offered):
        offered.path, offered.host, offered.port = "", "192.0.2.1", 6379
        return right(offered)

    monkeypatch.setattr(client._direct, "location", elsewhere)
    monkeypatch.setattr(direct_read, "_Connection", None)  # would be a TypeError
    assert payloads(client, node) == node.payloads
    assert not client._direct.open


def test_silent_redis_falls_back_in_time(client, make_node, monkeypatch, hole):
    node = make_node()
    node.put(client)
    lead_to(client, monkeypatch, lambda right: replace(right, path=hole[0]))
    monkeypatch.setattr(direct_read, "CONNECT_TIMEOUT_S", 0.2)
    assert payloads(client, node, timeout_s=20.0) == node.payloads


@pytest.mark.parametrize("talk", [b"", b"bytes that never end" * 9], ids=["silent", "drip"])
def test_deadline_of_the_whole_read_holds(client, make_node, monkeypatch, hole, talk):
    node = make_node(**BIG)
    node.put(client)
    frame = direct_read.Wanted.of(node.node_id, "", 0, len(node.payloads[0]))
    hole[1][0] = talk and b"$%d\r\n%b" % (frame.nbytes, talk)
    nobody = {"username": "", "password": ""}
    lead_to(client, monkeypatch, lambda right: replace(right, path=hole[0], **nobody))
    began = time.monotonic()
    with pytest.raises(DeadlineError):
        payloads(client, node, timeout_s=1.0)
    assert time.monotonic() - began < 5
    if not talk:
        assert client._direct.open  # a late answer is no closed way


def test_a_silent_redis_leaves_time_to_read_through_the_store(client, make_node, monkeypatch, hole):
    node = make_node(**BIG)
    node.put(client)
    hole[1][0] = b""
    nobody = {"username": "", "password": ""}
    lead_to(client, monkeypatch, lambda right: replace(right, path=hole[0], **nobody))
    monkeypatch.setattr(direct_read, "STALL_S", 0.3)
    assert payloads(client, node, timeout_s=60.0) == node.payloads
    assert not client._direct.open


def test_connection_lost_in_the_midst_goes_on_through_the_store(client, valkey, make_node):
    node = make_node(**BIG)
    node.put(client)
    got = []
    with client.open_get(node.node_id) as reader:
        for _, payload in reader:
            got.append(bytes(payload))
            if len(got) == 3:
                valkey.execute_command("CLIENT", "KILL", "USER", "reader")
    assert got == node.payloads
    assert not client._direct.open


def test_idle_connection_that_died_is_replaced(client, valkey, make_node):
    node = make_node()
    node.put(client)
    assert payloads(client, node) == node.payloads
    valkey.execute_command("CLIENT", "KILL", "USER", "reader")
    assert payloads(client, node) == node.payloads
    assert client._direct.open


def test_abandoned_read_leaves_no_reply_to_the_next(client, make_node):
    first, second = make_node(**BIG), make_node(**BIG)
    first.put(client)
    second.put(client)
    for _ in range(3):
        with client.open_get(first.node_id) as reader:
            next(iter(reader))
        assert payloads(client, second) == second.payloads


def test_refused_user_falls_back(client, valkey, make_node):
    node = make_node()
    node.put(client)
    valkey.execute_command("ACL", "SETUSER", "reader", "-get")
    try:
        assert payloads(client, node) == node.payloads
    finally:
        valkey.execute_command("ACL", "SETUSER", "reader", "+get")
    assert not client._direct.open


def test_node_that_shrank_meanwhile_is_not_dropped(each_path, valkey, make_node):
    node = make_node(**BIG)
    node.put(each_path)
    with each_path.open_get(node.node_id) as reader:
        valkey.hset(f"ckv:{{{node.node_id}}}:m", "generation", 2)
        valkey.delete(node.segment_key(23))
        with pytest.raises(NodeMissingError):
            list(reader)
    assert each_path.stat([node.node_id])[0].present


def test_fallback_to_another_generation_is_refused(client, valkey, make_node, monkeypatch):
    node = make_node()
    node.put(client)
    lead_to(client, monkeypatch, lambda right: replace(right, password="not-the-password"))
    with client.open_get(node.node_id) as reader:
        valkey.hset(f"ckv:{{{node.node_id}}}:m", "generation", 2)
        with pytest.raises(StoreUnavailableError, match="changed"):
            list(reader)


def test_what_a_replica_lacks_is_read_through_the_store(tmp_path, make_node):
    node = make_node()
    with (
        Server(tmp_path) as redis,
        Server(tmp_path) as lagging,
        store_on(redis.url, read_path="direct", redis_reader_url=lagging.url) as client,
        redis.client() as source,
        lagging.client() as copy,
    ):
        node.put(client)
        for _ in range(2):
            assert payloads(client, node) == node.payloads
        for index in (0, 1):  # the rest comes later
            copy.set(node.segment_key(index), source.get(node.segment_key(index)))
        assert payloads(client, node) == node.payloads
        assert client.stat([node.node_id])[0].present
        assert client._direct.open


def test_connections_to_a_former_server_are_closed(tmp_path, monkeypatch):
    with Server(tmp_path) as old, Server(tmp_path) as new:
        reads = direct_read.DirectReads()
        here, there = (Location(host="127.0.0.1", port=server.port) for server in (old, new))
        first, second, third = (direct_read._Connection(at, 5.0) for at in (here, there, there))
        reads.give(here, first)
        reads.give(there, second)
        assert reads.take(here) is first  # both are in use, as in a cluster
        reads.give(here, first)
        monkeypatch.setattr(direct_read, "IDLE_S", 0.0)
        reads.give(there, third)
        assert first._socket.fileno() < 0
        assert reads.take(here) is None
        assert {reads.take(there), reads.take(there)} == {second, third}
        reads.close()
        second.close()
        third.close()


def test_password_is_in_no_message(client, make_node, monkeypatch, caplog):
    node = make_node()
    node.put(client)
    seen = []
    lead_to(client, monkeypatch, lambda right: seen.append(right) or replace(right, path="/none"))
    with caplog.at_level(logging.DEBUG):
        assert payloads(client, node) == node.payloads
    password = seen[0].password
    assert len(password) > 16
    texts = [caplog.text, repr(seen[0]), repr(client._direct), repr(client._paths)]
    assert not any(password in text for text in texts)


def test_redis_of_another_is_offered_only_with_a_reader(tmp_path, make_node, metrics_port):
    node = make_node()
    with Server(tmp_path / "redis") as server:
        with server.client() as admin:
            admin.execute_command(
                "ACL", "SETUSER", "eyes", "on", ">look-only-password", "%R~ckv:{*}:s:*", "+get"
            )
        base = StoreConfig(
            address="127.0.0.1:0",
            redis_url=server.url,
            read_path="direct",
            metrics_port=metrics_port,
        )
        reader = f"redis://eyes:look-only-password@127.0.0.1:{server.port}"
        for url in ("", reader):
            config = base.model_copy(update={"redis_reader_url": url})
            with start_store(config) as process, process.client() as client:
                if not url:
                    node.put(client)
                with client.open_get(node.node_id) as found:
                    assert [bytes(payload) for _, payload in found] == node.payloads
                assert client._direct.open
                passed = metric(metrics_port, "ckv_store_read_bytes_total")
                assert (passed == 0) is bool(url)


@pytest.mark.parametrize(
    ("location", "peer", "offered"),
    [
        (Location(path="/run/x"), "unix:/run/store", True),
        (Location(path="/run/x"), "ipv4:127.0.0.1:4711", True),
        (Location(path="/run/x"), "ipv6:%5B::1%5D:4711", True),
        (Location(path="/run/x"), "ipv4:10.0.0.2:4711", False),
        (Location(host="127.0.0.1"), "ipv6:%5Bfd00::2%5D:4711", False),
        (Location(host="redis.internal", tls=True), "ipv4:10.0.0.2:4711", True),
    ],
)
async def test_offered_to_those_who_can_go_there(location, peer, offered):
    found = await Offer(location).location("0" * 64, peer)
    assert (found is not None) is offered


async def test_offer_names_the_owner_of_the_key_and_the_user_of_the_reader():
    reader = Location(host="ignored", username="eyes", password="p")
    owner = Location(host="node-3", port=7003, tls=True, username="store", password="secret")
    asked = []
    offer = Offer(reader, lambda key: asked.append(key) or owner)
    found = await offer.location("ab" * 32, "ipv4:10.0.0.2:1")
    assert (found.host, found.port, found.tls) == ("node-3", 7003, True)
    assert (found.username, found.password) == ("eyes", "p")
    assert asked[0].startswith("ckv:{" + "ab" * 32 + "}:")


async def test_nothing_is_offered_while_redis_cannot_be_located():
    def lost(_):
        raise StoreUnavailableError("no master")

    assert await Offer(Location(host="x"), lost).location("0" * 64, "unix:") is None


async def test_locating_that_hangs_holds_up_nothing(monkeypatch):
    monkeypatch.setattr(offer_module, "LOCATE_S", 0.2)
    release, asked = threading.Event(), []

    def hang(key):
        asked.append(key)
        release.wait(30)
        raise StoreUnavailableError("no Sentinel")

    offer = Offer(Location(host="x"), hang)
    reads = [offer.location("0" * 64, "unix:") for _ in range(100)]
    try:
        assert await asyncio.gather(*reads) == [None] * 100
        # The threads that decode manifests are free.
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 5) == 1
        assert await offer.location("0" * 64, "unix:") is None
        assert len(asked) == 1  # and for a while nobody is asked
    finally:
        release.set()
        offer.close()


def metric(port, name):
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


@pytest.fixture
def metrics_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
