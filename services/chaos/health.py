"""The system's own condition: memory, descriptors, what is in flight, what was left over."""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from redis.exceptions import RedisError

from criticalkv.services.bench.cancelled_calls import running_calls
from criticalkv.services.chaos.slope import Slope, beyond_data, per_minute, slope
from criticalkv.services.chaos.system import REPLICAS, System
from criticalkv.services.store import keys

ROLES = (*REPLICAS, "store", "valkey")
SAMPLE_S = 2.0
IN_FLIGHT = re.compile(r"^criticalkv_gateway_running (\S+)$", re.MULTILINE)
SEGMENT = re.compile(rb"ckv:\{([0-9a-f]{64})\}:s:([0-9a-f]+):\d+")
POLL_S = 0.05


@dataclass(frozen=True)
class Sample:
    """A process at one moment.

    Attributes:
        data: bytes that it was given to keep: Valkey's; None = it did not say.
    """

    at: float
    role: str
    pid: int
    rss: int
    fds: int
    data: int | None = 0


@dataclass
class Sampler:
    """Watches all processes, in a thread.

    Args:
        system: under test.
        clock: seconds since the run began.
    """

    system: System
    clock: Callable[[], float]
    samples: list[Sample] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join()

    def slopes(self, warm_up_s: float, limit: float) -> dict[str, Slope]:
        """Return each process's growth, Valkey's beyond its data, by role and pid."""
        out = {}
        for name, samples in self._by_process().items():
            told = [(s.at, s.rss, s.data) for s in samples if s.data is not None]
            times, rss, data = zip(*told, strict=True) if told else ((), (), ())
            own = beyond_data(rss, data)
            out[name] = slope(times, own, warm_up_s=warm_up_s, limit=limit)
        return out

    def memory_per_minute(self) -> dict[str, list[float | None]]:
        """Return each process's RSS in MiB, by role and pid; None = a minute without it."""
        begin_s = self.samples[0].at if self.samples else 0.0
        return {
            name: per_minute([s.at for s in samples], [s.rss for s in samples], begin_s)
            for name, samples in self._by_process().items()
        }

    def data_per_request(self, ends: Sequence[float], warm_up_s: float) -> float | None:
        """Return what Valkey's data grew by for each request, bytes.

        None = it was restarted, did not say, or nothing was asked of it.

        Args:
            ends: when requests ended, seconds since the run began.
            warm_up_s: what was before is left out.
        """
        found = [s for s in self.samples if s.role == "valkey" and s.at >= warm_up_s]
        told = [(s.at, s.data) for s in found if s.data is not None]
        if len({s.pid for s in found}) != 1 or not told:
            return None
        (begin, first), (end, last) = told[0], told[-1]
        requests = sum(begin < at <= end for at in ends)
        return (last - first) / requests if requests else None

    def _by_process(self) -> dict[str, list[Sample]]:
        out: dict[str, list[Sample]] = defaultdict(list)
        for sample in self.samples:
            out[f"{sample.role}:{sample.pid}"].append(sample)
        return out

    def memory(self) -> dict[str, dict[str, float]]:
        """Return each role's first, last and largest RSS in MiB, of one process."""
        out: dict[str, dict[str, float]] = {}
        for role in ROLES:
            sizes = [s.rss / 2**20 for s in self.samples if s.role == role]
            if sizes:
                named = {"first": sizes[0], "last": sizes[-1], "largest": max(sizes)}
                out[role] = {name: round(size, 1) for name, size in named.items()}
        return out

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.samples += measure(self.system, self.clock())


def measure(system: System, at: float) -> Iterator[Sample]:
    """Yield a sample of every process that lives."""
    for role in ROLES:
        for pid in system.pids(role):
            try:
                process = psutil.Process(pid)
                rss, fds = process.memory_info().rss, process.num_fds()
            except psutil.Error:
                continue
            yield Sample(at, role, pid, rss, fds, _data(system) if role == "valkey" else 0)


def _data(system: System) -> int | None:
    try:
        with system.redis() as client:
            return data_bytes(client.info("memory"))
    except RedisError:
        return None


def data_bytes(info: Mapping[str, Any]) -> int:
    """Return what Valkey keeps for its clients, by INFO memory; leaks may be in the rest."""
    rest = int(info["mem_clients_normal"]) + int(info["used_memory_scripts_eval"])
    return int(info["used_memory"]) - rest


def in_flight(system: System) -> float | None:
    """Return the requests that the gateway still works on; None if it does not say."""
    try:
        text = httpx.get(f"{system.url}/metrics", timeout=10.0).text
    except httpx.HTTPError:
        return None
    found = IN_FLIGHT.search(text)
    return float(found[1]) if found else None


def until_idle(system: System, limit_s: float) -> float | None:
    """Return the seconds until nothing is in flight; None if that takes longer."""
    begun = time.monotonic()
    while time.monotonic() - begun < limit_s:
        if in_flight(system) == 0:
            return time.monotonic() - begun
        time.sleep(POLL_S)
    return None


def occupied(system: System, limit_s: float) -> dict[str, float | None]:
    """Wait until nothing is occupied by requests; return what is, None = it does not say."""
    begun = time.monotonic()
    while True:
        found = {**_decode_load(system), "store running calls": _running_calls(system)}
        if time.monotonic() - begun > limit_s or not any(found.values()):
            return found
        time.sleep(POLL_S)


def _decode_load(system: System) -> dict[str, float | None]:
    said = system.decode_load() or {}
    return {f"decode {name}": said.get(name) for name in ("running", "waiting")}


def _running_calls(system: System) -> float | None:
    try:
        return running_calls(system.config.store.metrics_port)
    except OSError:
        return None


def descriptors(system: System) -> dict[str, int]:
    """Return the open file descriptors of every process, by role and pid."""
    return {f"{sample.role}:{sample.pid}": sample.fds for sample in measure(system, 0.0)}


def connections(system: System) -> int:
    """Return how many connections Redis has, this one left out."""
    with system.redis() as client:
        return int(client.info("clients")["connected_clients"]) - 1


def orphans(system: System) -> dict[str, int]:
    """Return bytes that no published node, running put or due removal accounts for."""
    with system.redis() as client:
        booked = {member.decode() for member in client.hkeys(keys.COUNTS)}
        booked |= {member.decode() for member in client.zrange(keys.WRITING, 0, -1)}
        booked |= {member.decode() for member in client.zrange(keys.TRASH, 0, -1)}
        left = [
            key
            for key in client.scan_iter(match=f"{keys.PREFIX}*:s:*", count=1000)
            if (found := SEGMENT.fullmatch(key)) and _member(found) not in booked
        ]
        size = sum(client.strlen(key) for key in left)
        sizes = sum(int(value) for value in client.hvals(keys.SIZES))
        total = int(client.get(keys.TOTAL) or 0)
    return {"segments": len(left), "bytes": int(size), "books_differ_by": total - sizes}


def until_clean(system: System, limit_s: float) -> dict[str, Any]:
    """Wait until nothing is left over; return what there is, and after how long."""
    begun = time.monotonic()
    while True:
        waited = time.monotonic() - begun
        try:
            found = orphans(system)
        except RedisError as error:
            found = {"segments": -1, "bytes": -1, "books_differ_by": 0}
            if waited > limit_s:
                raise error
        if waited > limit_s or not any(found.values()):
            return {**found, "seconds": round(waited, 1)}
        time.sleep(1.0)


def _member(found: re.Match[bytes]) -> str:
    return keys.member(found[1].decode(), found[2].decode())
