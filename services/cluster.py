"""The Ray cluster under the deployments: a private local one, or an existing one.

A local cluster listens on loopback only, lives in its own directory and dies with
this process. Knows nothing of models, stores or requests.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

import psutil

from criticalkv.services.gateway.edge import PROXY_CALLBACK, WRITE_TIMEOUT_VARIABLE
from criticalkv.shared.config import Config
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.loopback import is_loopback

if TYPE_CHECKING:
    from ray.serve.config import HTTPOptions

OBJECT_STORE_BYTES = 100 * 2**20  # requests and tokens only; KV never passes through Ray
# Seconds that Serve waits beyond a request's own deadline before it cuts the connection.
TIMEOUT_MARGIN_S = 30.0
# Seconds for replicas to end their work before the cluster goes.
DELETE_TIMEOUT_S = 15.0
# Of these, for answers that still run; then they end with an error.
DRAIN_S = 8.0
# Seconds for Ray's processes to end after it, before they are killed.
END_S = 3.0

# Ray reads these at import, hence before `import ray` anywhere in the process.
LOCAL_ENV = {
    # Despite its name the switch works on Linux: the node's address becomes 127.0.0.1,
    # and every server of Ray that knows its node's address then binds to that.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Both would need listeners on all interfaces (see criticalkv.services.loopback).
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Only there can a client that does not read be noticed.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_CALLBACK,
}


@contextmanager
def start_cluster(
    config: Config, *, dashboard_port: int | None = None, show_logs: bool = False
) -> Iterator[None]:
    """Provide a Ray cluster with Serve started; stop what was started on leaving.

    With `RAY_ADDRESS` in the environment, connect to that cluster and leave it
    running. Otherwise start a local one, with enough logical CPUs for the largest
    number of replicas, whatever the machine has.

    Args:
        config: sizes of the deployments and address of the HTTP server.
        dashboard_port: serve Ray's dashboard (and `serve deploy`) on this loopback port.
        show_logs: print what workers write.
    """
    if os.environ.get("RAY_ADDRESS"):
        with _existing_cluster(show_logs), _http_server(config):
            yield
    else:
        with _local_cluster(config, dashboard_port, show_logs), _http_server(config):
            yield


@contextmanager
def _existing_cluster(show_logs: bool) -> Iterator[None]:
    import ray

    ray.init(log_to_driver=show_logs, logging_level=logging.WARNING)
    try:
        _exit_on_sigterm()
        yield
    finally:
        ray.shutdown()


@contextmanager
def _local_cluster(config: Config, dashboard_port: int | None, show_logs: bool) -> Iterator[None]:
    os.environ.update(LOCAL_ENV)
    os.environ[WRITE_TIMEOUT_VARIABLE] = str(config.gateway.write_timeout_s)
    # Ray's default since 2.60, but said aloud: a user's explicit choice still wins.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    if not is_loopback(ray.util.get_node_ip_address()):
        raise ConfigError(
            "Ray was imported before its address was set; import and start "
            "criticalkv.services.cluster first, or export "
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"
        )
    # Short, for the unix sockets in it; mode 0700. Ray opens the one that it is given to
    # everybody, hence one more below.
    directory = tempfile.mkdtemp(prefix="ckv-", dir="/tmp")
    started: set[psutil.Process] = set()
    try:
        with _whole_or_nothing() as started:
            ray.init(
                address="local",
                num_cpus=logical_cpus(config),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=dashboard_port is not None,
                dashboard_host="127.0.0.1",
                dashboard_port=dashboard_port,
                log_to_driver=show_logs,
                logging_level=logging.WARNING,
                _temp_dir=os.path.join(directory, "r"),
            )
        _exit_on_sigterm()
        yield
    finally:
        try:
            ray.shutdown()
        finally:
            _end(started)
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _whole_or_nothing() -> Iterator[set[psutil.Process]]:
    # Ray ends its own children after an interrupted start, but not theirs: its agents
    # then outlive it for as long as they wait for a cluster that has gone.
    before = _descendants()
    started: set[psutil.Process] = set()  # filled after a whole start
    try:
        yield started
    except BaseException:
        _kill(_descendants() - before)
        raise
    started |= _descendants() - before


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _end(processes: Collection[psutil.Process]) -> None:
    # Nearly always all of Ray's have ended by now. An agent that asked the cluster for
    # something as it went waits a minute for an answer.
    _, alive = psutil.wait_procs(processes, timeout=END_S)
    _kill(alive)


def _kill(processes: Collection[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # also if its number is another's now
            process.kill()
    psutil.wait_procs(processes, timeout=END_S)


def _exit_on_sigterm() -> None:
    # Ray's own handler, set by `ray.init`, aborts the process without any clean-up.
    def leave(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)


@contextmanager
def _http_server(config: Config) -> Iterator[None]:
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(http_options=_http(config))
    try:
        yield
    finally:
        # Replicas end their work before the cluster goes. `serve.shutdown` would do more,
        # but kills its controller in mid-call, which Ray reports as a failed task.
        if not os.environ.get("RAY_ADDRESS"):
            _delete_applications()


def _delete_applications() -> None:
    # In a thread: where the cluster has gone already, as after a signal to the whole
    # process group, these calls wait a minute for it and then end the process.
    from ray import serve

    def delete() -> None:
        with suppress(Exception):  # what does not end now ends with the cluster
            for name in serve.status().applications:
                with suppress(Exception):  # no `drain`, or it does not answer any more
                    drained = serve.get_app_handle(name).drain.remote(DRAIN_S)
                    drained.result(timeout_s=DRAIN_S + 4.0)
                serve.delete(name)

    thread = threading.Thread(target=delete, name="delete-applications", daemon=True)
    thread.start()
    deadline = time.monotonic() + DELETE_TIMEOUT_S
    while thread.is_alive() and time.monotonic() < deadline and _head_answers():
        thread.join(0.5)


def _head_answers() -> bool:
    import ray

    try:
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=2.0):
            return True
    except Exception:
        return False


def _http(config: Config) -> HTTPOptions:
    from ray.serve.config import HTTPOptions

    return HTTPOptions(
        host=config.gateway.host,
        port=config.gateway.port,
        request_timeout_s=config.gateway.request_timeout_s + TIMEOUT_MARGIN_S,
    )


def logical_cpus(config: Config) -> int:
    """Count the CPUs to declare: all replicas must fit, also on two cores."""
    replicas = sum(
        part.num_cpus * part.autoscaling.max_replicas for part in (config.prefill, config.decode)
    )
    return max(os.cpu_count() or 1, math.ceil(replicas + config.gateway.num_cpus) + 1)
