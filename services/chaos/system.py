"""The real system under test: Valkey, store and `criticalkv serve`, each in its process.

Valkey and store are restarted whenever they end; Ray restarts its replicas itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis
import yaml

from criticalkv.services.chaos import decode_load
from criticalkv.services.store.process import StoreProcess
from criticalkv.services.store.valkey import Valkey
from criticalkv.shared.config import Config, load_config
from criticalkv.shared.errors import CriticalKVError, StoreUnavailableError
from criticalkv.shared.failpoints import VARIABLE
from criticalkv.shared.loopback import free_port
from criticalkv.shared.store_client import StoreClient

START_S = 300.0
STOP_S = 90.0
WATCH_S = 0.1
REDIS_S = 10.0
VALKEY_BYTES = 256 << 20
# The command itself, which ends with the process that started it, and tells decode's load.
SERVE = """
import os, pathlib, signal
from criticalkv.services.chaos.decode_load import answer_signals
from criticalkv.services.store.valkey import die_with_parent
die_with_parent(signal.SIGTERM)
answer_signals(pathlib.Path(os.environ.pop("CHAOS_DECODE_LOAD")))
from criticalkv.services.cli import main
main()
"""
OPEN_USER = ("reset", "on", "nopass", "~*", "&*", "+@all")
REPLICAS = ("gateway", "prefill", "decode")
TENANTS = ("north", "south")


@dataclass
class System:
    """All processes of one run.

    Args:
        folder: private; everything that they write lies here.
        model: `model.path`.
        overrides: sections of the configuration.
        worker_faults: failpoints of the replicas.
    """

    folder: Path
    model: str
    overrides: dict[str, dict[str, Any]]
    worker_faults: str = ""
    store_faults: str = ""
    keys: dict[str, str] = field(
        default_factory=lambda: {tenant: secrets.token_hex(16) for tenant in TENANTS}
    )

    def start(self) -> None:
        """Start everything and wait until it answers."""
        self.config = self._configure()
        self.restarts: list[tuple[str, float]] = []
        self._stop = threading.Event()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        # The kernel ends Valkey with the thread that started it: one for the whole run.
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._keeper.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        self._serve()

    def stop(self) -> None:
        """Stop everything, the store last."""
        serve: subprocess.Popen[bytes] | None = getattr(self, "serve", None)
        if serve is not None and serve.poll() is None:
            serve.send_signal(signal.SIGINT)
            try:
                serve.wait(STOP_S)
            except subprocess.TimeoutExpired:
                serve.kill()
                serve.wait()
        self._stop.set()
        self._keeper.join()

    def __enter__(self) -> System:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The gateway's address."""
        return f"http://{self.config.gateway.host}:{self.config.gateway.port}"

    def client(self) -> StoreClient:
        """Return a new client of the store."""
        return StoreClient.of(self.config.store)

    def redis(self) -> redis.Redis:
        """Return a new connection to Valkey itself."""
        return redis.Redis(unix_socket_path=self._socket, socket_timeout=REDIS_S)

    def pids(self, role: str) -> list[int]:
        """Return the processes of a role that live now."""
        if role == "valkey":
            return [self._valkey.process.pid]
        if role == "store":
            return [self._store.process.pid]
        # While it works, Ray adds the method to a replica's title.
        title = re.compile(rf":criticalkv:{role}\b")
        return [p.pid for p in self._below() if title.search(_command(p))]

    def decode_load(self) -> dict[str, float] | None:
        """Return decode's running and waiting sequences; None if it does not say."""
        return decode_load.ask(self.serve.pid, self._decode_load)

    @property
    def _decode_load(self) -> Path:
        return self.folder / "decode-load.json"

    def kill(self, role: str, which: int) -> bool:
        """End one process of a role as kill -9 does; False if there is none."""
        pids = sorted(self.pids(role))
        if not pids:
            return False
        with suppress(ProcessLookupError):
            os.kill(pids[which % len(pids)], signal.SIGKILL)
        return True

    def restart_store(self) -> None:
        """Kill the store; it comes back with `store_faults` as they are now."""
        process = self._store.process
        process.kill()
        deadline = time.monotonic() + START_S
        while self._store.process is process or self._store.process.poll() is not None:
            if time.monotonic() > deadline:
                raise StoreUnavailableError("the store did not come back")
            time.sleep(WATCH_S)

    def _configure(self) -> Config:
        os.chmod(self.folder, 0o700)
        keys = {hashlib.sha256(key.encode()).hexdigest(): name for name, key in self.keys.items()}
        keys_file = self.folder / "keys.yaml"
        keys_file.write_text(yaml.safe_dump(keys))
        self._socket = str(self.folder / "valkey" / "valkey.sock")
        own: dict[str, dict[str, Any]] = {
            "model": {"path": self.model},
            "gateway": {"port": free_port(), "api_keys_file": str(keys_file)},
            "store": {
                "address": f"127.0.0.1:{free_port()}",
                "redis_url": f"unix://{self._socket}",
                "metrics_port": free_port(),
            },
        }
        merged = {
            name: {**self.overrides.get(name, {}), **own.get(name, {})}
            for name in {*self.overrides, *own}
        }
        (self.folder / "config.yaml").write_text(yaml.safe_dump(merged))
        return load_config(str(self.folder / "config.yaml"))

    def _keep(self) -> None:
        try:
            self._valkey = self._new_valkey()
            self._store = self._new_store()
        except BaseException as error:
            self._failure = error
            self._started.set()
            return
        self._started.set()
        while not self._stop.wait(WATCH_S):
            self._revive()
        self._store.stop()
        self._valkey.stop()

    def _revive(self) -> None:
        if self._valkey.process.poll() is not None:
            self._valkey.stop()  # frees its directory
            self._valkey = self._new_valkey()
            self.restarts.append(("valkey", time.time()))
        if self._store.process.poll() is not None:
            # It may find a Valkey that has just gone: then once more.
            with suppress(StoreUnavailableError):
                self._store = self._new_store()
                self.restarts.append(("store", time.time()))

    def _new_valkey(self) -> Valkey:
        made = Valkey(str(self.folder / "valkey"), VALKEY_BYTES)
        # Its passwords are new with every start; the store's is to stay, as with a Redis
        # that somebody else runs.
        user, password = made.admin.username, made.admin.password
        with redis.Redis(
            unix_socket_path=self._socket, username=user, password=password, socket_timeout=REDIS_S
        ) as admin:
            admin.execute_command("ACL", "SETUSER", "default", *OPEN_USER)
        return made

    def _new_store(self) -> StoreProcess:
        with _environment(self.store_faults):
            return StoreProcess(self.config.store)

    def _serve(self) -> None:
        with (self.folder / "serve.log").open("wb") as log, _environment(self.worker_faults):
            self.serve = subprocess.Popen(
                [
                    *(sys.executable, "-c", SERVE, "serve"),
                    *("--config", str(self.folder / "config.yaml")),
                    *("--store", self.config.store.address),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "CHAOS_DECODE_LOAD": str(self._decode_load)},
            )
        deadline = time.monotonic() + START_S
        while b"CriticalKV is up" not in (text := (self.folder / "serve.log").read_bytes()):
            if self.serve.poll() is not None or time.monotonic() > deadline:
                end = text[-2000:].decode(errors="replace")
                raise CriticalKVError(f"the service did not start: {end}")
            time.sleep(0.2)

    def _below(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.serve.pid).children(recursive=True)
        except psutil.Error:
            return []


@contextmanager
def _environment(faults: str) -> Iterator[None]:
    """Hand failpoints to the children that are started within."""
    before = os.environ.pop(VARIABLE, None)
    if faults:
        os.environ[VARIABLE] = faults
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""
