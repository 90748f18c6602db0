"""Every limit is enforced with a typed error that names it, and nothing leaks."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack

import grpc
import psutil
import pytest
from valkey_servers import admin_of

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.bench.cancelled_calls import abandoned_puts, cancel_many, running_calls
from criticalkv.services.store.process import start_store
from criticalkv.services.store.running_calls import RunningCalls
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import DeadlineError, InvalidRequestError, OverloadedError
from criticalkv.shared.frames import MAX_MESSAGE_BYTES
from criticalkv.shared.store_channel import SERVICE, typed_error


def config_of(tmp_path, **options):
    return StoreConfig(address="127.0.0.1:0", data_dir=str(tmp_path), memory_limit_mb=64, **options)


def test_largest_message(store):
    request = pb.ResolveHandleRequest(tenant="a", handle="x" * (MAX_MESSAGE_BYTES + 1))
    with pytest.raises(InvalidRequestError, match=str(MAX_MESSAGE_BYTES)):
        store._once("ResolveHandle", request)


def test_largest_message_at_the_server(store_process):
    # A peer with limits of its own: the server refuses by itself.
    with grpc.insecure_channel(
        store_process.address, [("grpc.max_send_message_length", -1)]
    ) as channel:
        call = channel.unary_unary(f"/{SERVICE}/StatNodes", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(MAX_MESSAGE_BYTES + 1), timeout=20)
    error = typed_error(caught.value)
    assert type(error) is InvalidRequestError
    assert str(MAX_MESSAGE_BYTES) in error.message
    with store_process.client() as client:
        assert client.healthy()


def test_bytes_per_node(tmp_path, make_node):
    node = make_node(layers=2, rows=2032, head_dim=64, tokens=4096)  # 4 MiB
    with (
        start_store(config_of(tmp_path, max_node_mb=2)) as process,
        process.client() as client,
        pytest.raises(InvalidRequestError, match=r"store\.max_node_mb"),
    ):
        node.put(client)


def test_a_read_ends_at_the_longest_reads_limit(tmp_path, make_node):
    """Whatever deadline its caller gave: one that does not read holds buffers and a place."""
    node = make_node(layers=8, rows=2032, head_dim=64, tokens=4096)  # 16 MiB
    with (
        start_store(config_of(tmp_path, read_deadline_s=1.0)) as process,
        process.client() as client,
    ):
        node.put(client)
        with client.open_get(node.node_id, timeout_s=120.0) as reader:
            frames = iter(reader)
            next(frames)
            time.sleep(2.5)
            with pytest.raises(DeadlineError):
                for _ in frames:
                    pass


def test_calls_at_once(tmp_path):
    # Other connections still get a place while one holds all that it may have.
    with (
        start_store(config_of(tmp_path, max_concurrent_rpcs=8)) as process,
        ExitStack() as held,
    ):
        greedy = held.enter_context(process.client())
        for i in range(6):
            hold_a_call(held, greedy, i)
        wait_until(lambda: refused(greedy, "75% of store.max_concurrent_rpcs"))
        other = held.enter_context(process.client())
        other.stat(["0" * 64])
        for i in range(6, 8):
            hold_a_call(held, other, i)
        wait_until(lambda: refused(other, "store.max_concurrent_rpcs calls"))


def hold_a_call(held, client, number):
    """Begin a put and leave it open."""
    writer = client.open_put("0" * 64, f"{number:016x}")
    held.enter_context(writer)


def refused(client, why):
    try:
        client.stat(["0" * 64])
    except OverloadedError as error:
        return why in error.message and bool(error.retry_after_s)
    return False


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_running_calls_are_counted_down_whatever_happens():
    calls = RunningCalls(4)
    for _ in range(10):
        with pytest.raises(KeyError), calls.one("a"):
            raise KeyError
    assert not calls._by_peer


@pytest.mark.parametrize(("peer", "shared"), [("unix:", True), ("ipv4:127.0.0.1:4711", False)])
def test_clients_of_a_unix_socket_share_no_limit(peer, shared):
    # gRPC gives all of them one name.
    calls = RunningCalls(4)
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(calls.one(peer))
        if shared:
            held.enter_context(calls.one(peer))
        else:
            with pytest.raises(OverloadedError):
                held.enter_context(calls.one(peer))


def test_connect_and_cancel_leaves_nothing(tmp_path, free_port):
    with start_store(config_of(tmp_path, metrics_port=free_port)) as process:
        children = psutil.Process(process.process.pid)

        def state():
            return children.num_fds(), redis_connections(tmp_path), len(os.listdir("/proc/self/fd"))

        cancel_many(process, 300)  # pools fill up to what so many need at once
        settle(free_port)
        before, seen = state(), abandoned_puts(free_port)
        cancel_many(process, 300)
        settle(free_port)
        assert abandoned_puts(free_port) > seen  # some did reach the store
        fds, connections, own = state()
        assert fds <= before[0] + 8
        assert connections <= before[1] + 8
        assert own <= before[2] + 4


def settle(port):
    wait_until(lambda: running_calls(port) == 0, timeout_s=5.0)


def redis_connections(directory):
    with admin_of(directory) as admin:
        return len(admin.client_list())


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_cancelled_calls_free_their_place(tmp_path):
    # Without it the limit would be used up after a while.
    with (
        start_store(config_of(tmp_path, max_concurrent_rpcs=4)) as process,
        process.client() as client,
    ):
        for i in range(20):
            with client.open_put("0" * 64, f"{i:016x}"):
                pass
            wait_until(lambda: not refused(client, "store.max_concurrent_rpcs"))
        assert threading.active_count() < 50
