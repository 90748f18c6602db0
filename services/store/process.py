"""The store as a child process of whoever needs one: demo, serve and tests."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from types import TracebackType

from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import ConfigError, StoreUnavailableError
from criticalkv.shared.malloc import ENVIRONMENT, ONE_HEAP
from criticalkv.shared.store_client import StoreClient

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0


class StoreProcess:
    """A store in its own process. It ends with this one, however this one ends."""

    def __init__(self, config: StoreConfig) -> None:
        """Start it and wait until it answers.

        Args:
            config: as for the server; port 0 takes a free one.

        Raises:
            ConfigError: if the store refuses its configuration.
            StoreUnavailableError: if it does not answer within 30 s.
        """
        self.config = config
        read_fd, write_fd = os.pipe()
        try:
            self.process = self._spawn(write_fd)
        finally:
            os.close(write_fd)
        try:
            self.address = _report(read_fd)
            self._await_health()
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(read_fd)

    def stop(self) -> None:
        """Stop the store and its Valkey. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def client(self, timeout_s: float = 10.0) -> StoreClient:
        """Return a new client of this store."""
        return StoreClient.of(self.config.model_copy(update={"address": self.address}), timeout_s)

    def __enter__(self) -> StoreProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()

    def _spawn(self, write_fd: int) -> subprocess.Popen[bytes]:
        # The kernel's "parent died" signal is tied to the thread that started the child,
        # so a thread of its own waits for the child's end.
        started: list[subprocess.Popen[bytes] | BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                started.append(_popen(write_fd))
            except BaseException as error:
                started.append(error)
            done.set()
            if isinstance(started[0], subprocess.Popen):
                started[0].wait()

        threading.Thread(target=run, name="store-process", daemon=True).start()
        done.wait()
        if isinstance(started[0], BaseException):
            raise started[0]
        assert started[0].stdin is not None
        with started[0].stdin as pipe:
            pipe.write(self.config.model_dump_json().encode())
        return started[0]

    def _await_health(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with self.client(timeout_s=2.0) as client:
            while not client.healthy():
                if time.monotonic() > deadline:
                    raise StoreUnavailableError("the store does not answer")
                time.sleep(0.02)


def start_store(config: StoreConfig) -> StoreProcess:
    """Start a store as a child process; leave its context or call `stop` to end it.

    Raises:
        ConfigError: if the store refuses its configuration.
        StoreUnavailableError: if it does not answer within 30 s.
    """
    return StoreProcess(config)


def child_environment() -> dict[str, str]:
    """Return the environment of a store's process: ours, with malloc tuned for it."""
    return {**os.environ, **ENVIRONMENT, **ONE_HEAP}


def _popen(write_fd: int) -> subprocess.Popen[bytes]:
    module = "criticalkv.services.store.server"
    return subprocess.Popen(
        [sys.executable, "-m", module, "--ready-fd", str(write_fd), "--parent", str(os.getpid())],
        stdin=subprocess.PIPE,
        pass_fds=(write_fd,),
        env=child_environment(),
        # A signal to the whole group is for the parent: it stops the store last.
        start_new_session=True,
    )


def _report(read_fd: int) -> str:
    text = b""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        ready, _, _ = select.select([read_fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise StoreUnavailableError(f"the store did not start in {START_TIMEOUT_S:.0f} s")
        chunk = os.read(read_fd, 4096)
        if not chunk:
            break
        text += chunk
    outcome, _, rest = text.decode(errors="replace").partition(" ")
    if outcome == "ok":
        return rest
    if outcome == ConfigError.code:
        raise ConfigError(rest)
    raise StoreUnavailableError(rest or "the store ended while starting")
