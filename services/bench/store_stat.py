"""How long StatNodes takes when many nodes are present.

The nodes are copies, made inside Redis, of one that was really put: manifest, segment,
record and books, under other names.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

import redis

from criticalkv.services.bench.external_store import ExternalStore
from criticalkv.services.store import keys
from criticalkv.shared.store_client import StoreClient

BATCH = 64
"""Nodes of the larger kind of call: a chain."""
_STEP = 2000


def measure(store: ExternalStore, counts: tuple[int, ...], calls: int) -> dict[str, Any]:
    """Measure calls of 1 and of 64 nodes.

    Args:
        counts: nodes present, ascending.
        calls: of each kind, at each count.

    Returns:
        By count and kind the p50 and p99 in ms.
    """
    out: dict[str, Any] = {}
    with store.client() as client, store.admin() as admin:
        template, attempt = store.put_tiny(client)
        present = [template]
        for count in counts:
            present += _copy(admin, template, attempt, count - len(present))
            out[str(count)] = {
                f"{size}_per_call": _percentiles(_times(client, present, size, calls))
                for size in (1, BATCH)
            }
    return out


def _copy(admin: redis.Redis, node_id: str, attempt: str, count: int) -> list[str]:
    copies = [secrets.token_hex(32) for _ in range(count)]
    template = _Template(admin, node_id, attempt)
    for at in range(0, count, _STEP):
        pipe = admin.pipeline(transaction=False)
        for copy in copies[at : at + _STEP]:
            template.copy_to(pipe, copy)
        pipe.execute()
    return copies


class _Template:
    """All that Redis knows of one node with one segment."""

    def __init__(self, admin: redis.Redis, node_id: str, attempt: str) -> None:
        member = keys.member(node_id, attempt)
        self._attempt = attempt
        self._dumps = [admin.dump(name) for name in self._names(node_id)]
        self._nbytes: Any = admin.hget(keys.SIZES, member)
        used: Any = admin.hget(keys.USED, node_id)
        self._used: str = used.decode()
        rank: Any = admin.zscore(keys.INDEX, f"{self._used}:{node_id}")
        self._rank = float(rank)

    def copy_to(self, pipe: Any, node_id: str) -> None:
        """Make the same of another name."""
        member = keys.member(node_id, self._attempt)
        for name, dump in zip(self._names(node_id), self._dumps, strict=True):
            pipe.restore(name, 0, dump)
        pipe.hset(keys.SIZES, member, self._nbytes)
        pipe.hset(keys.COUNTS, member, 1)
        pipe.incrby(keys.TOTAL, int(self._nbytes))
        pipe.hset(keys.USED, node_id, self._used)
        pipe.zadd(keys.INDEX, {f"{self._used}:{node_id}": self._rank})

    def _names(self, node_id: str) -> tuple[str, str, str]:
        segment = keys.segment(node_id, self._attempt, 0)
        return keys.manifest(node_id), segment, keys.record(node_id)


def _times(client: StoreClient, present: list[str], size: int, calls: int) -> Iterator[float]:
    for at in range(calls):
        first = at * 7919 % max(len(present) - size, 1)
        began = time.perf_counter()
        found = client.stat(present[first : first + size])
        yield time.perf_counter() - began
        if not all(stat.present for stat in found):
            raise RuntimeError("a node that was copied is not there")


def _percentiles(seconds: Iterator[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_ms": ordered[len(ordered) // 2] * 1e3,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3,
    }
