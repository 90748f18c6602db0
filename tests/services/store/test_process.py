"""The store as a process: what it listens on, how it starts, stops and dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from valkey_servers import Server, admin_of, url_of

from criticalkv.services.store.process import start_store
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import ConfigError, StoreUnavailableError
from criticalkv.shared.store_client import StoreClient

LOOPBACK = ("0100007F", "0" * 16 + "FFFF00000100007F")  # as IPv4, and as IPv6


def config(path, **changes):
    return StoreConfig(address="127.0.0.1:0", data_dir=str(path), memory_limit_mb=16, **changes)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as listing:
        return [int(child) for child in listing.read().split()]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def listening(pid):
    """Local addresses of the listening TCP sockets of a process."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as lines:
            rows = [line.split() for line in lines][1:]
        found += [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]
    return found


def test_listens_on_loopback_and_a_private_unix_socket(tmp_path):
    with start_store(config(tmp_path)) as process:
        pid = process.process.pid
        assert listening(pid)[0] in LOOPBACK
        assert len(listening(pid)) == 1
        (valkey,) = children(pid)
        assert listening(valkey) == []
        assert tmp_path.stat().st_mode & 0o777 == 0o700
        with admin_of(tmp_path) as client:
            settings = client.config_get("maxmemory-policy", "save", "appendonly")
        assert settings == {"maxmemory-policy": "noeviction", "save": "", "appendonly": "no"}
    assert not alive(pid)
    assert not alive(valkey)


def test_no_thread_of_the_store_keeps_freed_memory_for_itself(tmp_path):
    """Else its heap creeps, call by call. Valkey has an allocator of its own."""
    with start_store(config(tmp_path)) as process:
        settings = Path(f"/proc/{process.process.pid}/environ").read_text().split("\0")
    assert "MALLOC_ARENA_MAX=1" in settings
    assert "GLIBC_TUNABLES=glibc.malloc.tcache_count=0" in settings


def test_valkey_dies_with_a_killed_store(tmp_path):
    with start_store(config(tmp_path)) as process:
        (valkey,) = children(process.process.pid)
        process.process.send_signal(signal.SIGKILL)
        wait_until(lambda: not alive(valkey), 5.0)
    with start_store(config(tmp_path)) as again, again.client() as client:  # stale socket and lock
        assert client.healthy()


def test_a_store_ends_with_its_killed_valkey(tmp_path):
    """An empty store that answers nothing helps nobody; who started it can start it again."""
    with start_store(config(tmp_path)) as process:
        (valkey,) = children(process.process.pid)
        os.kill(valkey, signal.SIGKILL)
        assert process.process.wait(60.0) != 0


KILLED_OWNER = """
    import sys, threading, time
    from criticalkv.services.store.process import start_store
    from criticalkv.shared.config import StoreConfig
    started = []
    def start():  # the store must outlive the thread that started it, not the process
        config = StoreConfig(address="127.0.0.1:0", data_dir=sys.argv[1], memory_limit_mb=16)
        started.append(start_store(config))
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    time.sleep(0.3)
    with started[0].client() as client:
        print(started[0].process.pid, int(client.healthy()), flush=True)
    time.sleep(60)
"""


def test_store_dies_with_its_killed_owner(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED_OWNER), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid, healthy = map(int, owner.stdout.readline().split())
        assert healthy
        (valkey,) = children(pid)
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not alive(pid) and not alive(valkey))


def test_second_store_on_one_directory_is_refused(tmp_path):
    with start_store(config(tmp_path)) as first, first.client() as client:
        with pytest.raises(ConfigError, match="in use"):
            start_store(config(tmp_path))
        assert client.healthy()


def test_second_store_on_one_port_is_refused(tmp_path):
    with start_store(config(tmp_path / "a")) as first:
        second = config(tmp_path / "b").model_copy(update={"address": first.address})
        with pytest.raises(ConfigError, match="cannot be used"):
            start_store(second)


def test_too_long_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="too long"):
        start_store(config(tmp_path / ("x" * 120)))


def test_stores_share_one_redis(tmp_path, make_node):
    with start_store(config(tmp_path)) as first:
        url = url_of(tmp_path, "store")
        shared = StoreConfig(address="127.0.0.1:0", memory_limit_mb=16, redis_url=url)
        with start_store(shared) as second, first.client() as one, second.client() as two:
            node = make_node()
            node.put(one)
            with two.open_get(node.node_id) as reader:
                assert [bytes(p) for _, p in reader] == node.payloads
            assert two.delete_node(node.node_id)
            assert not one.stat([node.node_id])[0].present


def test_evicting_redis_is_refused(tmp_path):
    with start_store(config(tmp_path)):
        with admin_of(tmp_path) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ConfigError, match="noeviction"):
            start_store(StoreConfig(address="127.0.0.1:0", redis_url=url_of(tmp_path)))


def test_absent_redis_is_a_clear_error(tmp_path):
    with pytest.raises(StoreUnavailableError):
        start_store(StoreConfig(address="127.0.0.1:0", redis_url=f"unix://{tmp_path}/none.sock"))


def test_health_follows_redis_and_recovers(tmp_path, make_node):
    """Redis dies: calls fail typed and at once; a new one at the same place serves again."""
    with Server(tmp_path) as server:
        config = StoreConfig(address="127.0.0.1:0", redis_url=server.url)
        with start_store(config) as process, process.client() as client:
            make_node().put(client)
            server.kill()
            with pytest.raises(StoreUnavailableError):
                make_node().put(client)
            wait_until(lambda: not client.healthy())
            server.start()
            wait_until(client.healthy)
            node = make_node()
            assert node.put(client).published
            with client.open_get(node.node_id) as reader:
                assert [bytes(p) for _, p in reader] == node.payloads


def test_restarted_store_is_found_again(tmp_path, make_node):
    with start_store(config(tmp_path)) as process:
        address = process.address
        client = StoreClient(address)
        make_node().put(client)
        process.process.send_signal(signal.SIGKILL)
        process.process.wait()
        with pytest.raises(StoreUnavailableError):
            make_node().put(client)
    with start_store(config(tmp_path).model_copy(update={"address": address})), client:
        began = time.monotonic()
        wait_until(client.healthy)
        assert time.monotonic() - began < 5
        assert make_node().put(client).published


def test_store_imports_no_torch():
    code = (
        "import sys\n"
        "import criticalkv.services.store.server, criticalkv.services.store.process\n"
        "import criticalkv.shared.store_client\n"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules), 'heavy imports'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_secrets_are_not_in_arguments(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("s3cret-" * 4)
    with start_store(config(tmp_path / "d", token_file=str(secret))) as process:
        arguments = Path(f"/proc/{process.process.pid}/cmdline").read_text()
        assert "s3cret" not in arguments
