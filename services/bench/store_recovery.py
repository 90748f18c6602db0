"""How long until the store works again after something was killed with signal 9.

Whoever supervises restarts at once; here that is the benchmark.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from criticalkv.services.bench.cancelled_calls import running_calls
from criticalkv.services.bench.external_store import ExternalStore, tiny_node
from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.report import median
from criticalkv.shared.store_client import StoreClient

LIMIT_S = 60.0
SEGMENT = bytes(1 << 18)


def measure(store: ExternalStore, rounds: int) -> dict[str, Any]:
    """Kill each part `rounds` times; return medians and samples in seconds."""
    kills: dict[str, Callable[[ExternalStore], float]] = {
        "store_server": _kill_server,
        "valkey": _kill_valkey,
        "client_in_a_put": _kill_client,
    }
    samples = {name: [kill(store) for _ in range(rounds)] for name, kill in kills.items()}
    return {
        "median_s": {name: median(seconds) for name, seconds in samples.items()},
        "samples_s": samples,
        "meaning": {
            "store_server": "kill to the first read of a node that was stored before, by a "
            "client that was connected before",
            "valkey": "kill to the first put and read of a new node; what was stored is lost",
            "client_in_a_put": "kill to the end of its call at the store, and a put of the "
            "same node by another",
        },
    }


def _kill_server(store: ExternalStore) -> float:
    with store.client(2.0) as client:
        node_id, _ = store.put_tiny(client)
        began = time.perf_counter()
        store.restart_server()
        _until(lambda: _read(client, node_id))
        return time.perf_counter() - began


def _kill_valkey(store: ExternalStore) -> float:
    with store.client(2.0) as client:
        store.put_tiny(client)
        began = time.perf_counter()
        store.restart_valkey()
        _until(lambda: _read(client, store.put_tiny(client)[0]))
        return time.perf_counter() - began


def _kill_client(store: ExternalStore) -> float:
    manifest, record, payload = tiny_node()
    with store.client(2.0) as client:
        command = [sys.executable, "-m", __name__, client.address, manifest.node_id]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()  # in the midst of its put
            began = time.perf_counter()
            child.send_signal(signal.SIGKILL)
        _until(lambda: None if running_calls(store.metrics_port) == 0 else _not_yet())
        with client.open_put(manifest.node_id, manifest.attempt) as writer:
            writer.send(payload)
            writer.commit(manifest, record)
        return time.perf_counter() - began


def _read(client: StoreClient, node_id: str) -> None:
    with client.open_get(node_id, timeout_s=2.0) as reader:
        list(reader)


def _not_yet() -> None:
    raise CriticalKVError("not yet")


def _until(works: Callable[[], None]) -> None:
    deadline = time.perf_counter() + LIMIT_S
    while True:
        try:
            return works()
        except CriticalKVError:
            if time.perf_counter() > deadline:
                raise
            time.sleep(0.02)


def _hang_in_a_put(address: str, node_id: str) -> None:
    with StoreClient(address) as client, client.open_put(node_id, secrets.token_hex(8)) as writer:
        for at in range(8):
            writer.send(SEGMENT)
            if at == 3:
                print(json.dumps("putting"), flush=True)
        time.sleep(LIMIT_S)


if __name__ == "__main__":  # the client that is killed
    _hang_in_a_put(sys.argv[1], sys.argv[2])
