"""Connect and cancel, thousands of times: nothing may stay behind.

Run as `python -m criticalkv.services.bench.cancelled_calls [COUNT]`; it starts a store
of its own and prints what is open before and after.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import urlopen

import psutil

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store.process import StoreProcess, start_store
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.loopback import free_port
from criticalkv.shared.store_client import StoreClient

GAUGE = "ckv_store_running_calls"
ABANDONED = 'ckv_store_puts_total{outcome="abandoned"}'
THREADS = 8
SETTLE_S = 10.0
PAYLOAD = bytes(100_000)
_STOPS = 4
"""Kinds of moments at which a call is cancelled."""


def cancel_many(process: StoreProcess, count: int, node_id: str = "") -> None:
    """Begin and cancel calls at changing moments, by several connections.

    Args:
        count: of calls, half puts and half reads.
        node_id: a stored node to read; "" = one that is not there.
    """
    node_id = node_id or "0" * 64
    with ThreadPoolExecutor(THREADS) as pool:
        shares = [range(at, count, THREADS) for at in range(THREADS)]
        list(pool.map(lambda share: _cancel(process, share, node_id), shares))


def running_calls(port: int) -> float:
    """Read the gauge of running calls from a store's metrics port."""
    return _metric(port, GAUGE)


def abandoned_puts(port: int) -> float:
    """Read from a store's metrics port how many puts came to nothing so far."""
    return _metric(port, ABANDONED)


def measure(count: int) -> dict[str, Any]:
    """Cancel `count` calls; return what was open before and after, and how long it took."""
    port = free_port()
    config = StoreConfig(address="127.0.0.1:0", memory_limit_mb=64, metrics_port=port)
    with start_store(config) as process:
        cancel_many(process, count)  # pools fill up to what so many need at once
        _settled(port)
        before, began = _open_things(process), time.perf_counter()
        seen = abandoned_puts(port)
        cancel_many(process, count)
        took, settled = time.perf_counter() - began, _settled(port)
        return {
            "calls": count,
            "puts_abandoned_at_the_store": abandoned_puts(port) - seen,
            "seconds": took,
            "in_flight_zero_after_s": settled,
            "before": before,
            "after": _open_things(process),
        }


def _cancel(process: StoreProcess, share: range, node_id: str) -> None:
    with process.client() as client:
        for number in share:
            try:
                if number % 2:
                    _cancel_put(client, number)
                else:
                    _cancel_get(client, number, node_id)
            except CriticalKVError:
                continue  # a miss or a refusal ends the call as well


def _cancel_put(client: StoreClient, number: int) -> None:
    with client.open_put("0" * 64, secrets.token_hex(8)) as writer:
        for _ in range(number // 2 % _STOPS):
            writer.send(PAYLOAD)
        time.sleep(_pause(number))


def _cancel_get(client: StoreClient, number: int, node_id: str) -> None:
    # Not by NodeReader, which waits for the header.
    call: Any = client._start_get(pb.GetNodeRequest(node_id=node_id), 10.0)
    time.sleep(_pause(number))
    call.cancel()


def _pause(number: int) -> float:
    return 0.005 * (number // 2 % _STOPS)


def _metric(port: int, name: str) -> float:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    found = (line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} "))
    return float(next(found, 0.0))


def _settled(port: int) -> float | None:
    began = time.perf_counter()
    while running_calls(port):
        if time.perf_counter() - began > SETTLE_S:
            return None
        time.sleep(0.02)
    return time.perf_counter() - began


def _open_things(process: StoreProcess) -> dict[str, int]:
    store = psutil.Process(process.process.pid)
    return {
        "store_fds": store.num_fds(),
        "valkey_fds": sum(child.num_fds() for child in store.children()),
        "store_threads": store.num_threads(),
        "client_fds": psutil.Process().num_fds(),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 5000), indent=1))
