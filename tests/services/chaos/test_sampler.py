"""What is made of the samples of all processes: Valkey's data are none of its growth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import redis
from valkey_servers import admin_of

from criticalkv.services.chaos.health import Sample, Sampler, data_bytes, measure
from criticalkv.services.chaos.slope import MIB, RSS_PER_DATA
from criticalkv.services.chaos.system import System
from criticalkv.services.store.valkey import Valkey

STEP_S = 10.0


def sampler(*samples: Sample) -> Sampler:
    return Sampler(cast(Any, None), lambda: 0.0, list(samples))


def growing(role: str, pid: int, rss: float, data: float = 0.0, minutes: int = 20) -> list[Sample]:
    """A process that grows by so many MiB per hour, and whose data do."""
    out = []
    for i in range(int(60 * minutes / STEP_S)):
        hours = i * STEP_S / 3600
        size, held = (100 + rss * hours) * MIB, (10 + data * hours) * MIB
        out.append(Sample(i * STEP_S, role, pid, int(size), 9, int(held)))
    return out


def test_growth_is_beyond_the_data() -> None:
    samples = [
        *growing("store", 1, 3.0),
        *growing("valkey", 2, RSS_PER_DATA * 100, 100.0),
        *growing("valkey", 3, RSS_PER_DATA * 100 + 30, 100.0),
    ]
    slopes = sampler(*samples).slopes(120.0, 8.0)
    found = {name: one.mib_per_hour for name, one in slopes.items()}
    assert found == pytest.approx({"store:1": 3.0, "valkey:2": 0.0, "valkey:3": 30.0}, abs=0.01)


def test_samples_without_data_are_left_out() -> None:
    """Valkey did not answer: its memory then cannot be told from its data."""
    samples = growing("valkey", 2, RSS_PER_DATA * 100, 100.0)
    silent = [Sample(s.at + 1, s.role, s.pid, 10 * s.rss, s.fds, None) for s in samples[::7]]
    both = sorted([*samples, *silent], key=lambda s: s.at)
    assert sampler(*both).slopes(120.0, 8.0)["valkey:2"].mib_per_hour == pytest.approx(0, abs=0.01)
    only = sampler(*silent).slopes(120.0, 8.0)["valkey:2"]
    assert only.mib_per_hour is None


def test_memory_per_minute_of_each_process() -> None:
    samples = [*growing("store", 1, 60.0, minutes=2), *growing("store", 7, 0.0, minutes=1)]
    late = [Sample(s.at + 120, s.role, s.pid, s.rss, s.fds) for s in samples if s.pid == 7]
    found = sampler(*(s for s in samples if s.pid == 1), *late).memory_per_minute()
    assert found == {"store:1": [100.4, 101.4], "store:7": [None, None, 100.0]}
    assert sampler().memory_per_minute() == {}


def test_data_per_request() -> None:
    samples = growing("valkey", 2, 0.0, 36.0, minutes=10)  # 0.01 MiB per second
    ends = [5.0 * i for i in range(1000)]  # one in five seconds; most after the last sample
    one = sampler(*samples)
    assert one.data_per_request(ends, 100.0) == pytest.approx(0.05 * MIB, rel=0.001)
    assert one.data_per_request([], 100.0) is None
    assert one.data_per_request(ends, 10_000.0) is None
    assert sampler(*samples, *growing("valkey", 3, 0.0)).data_per_request(ends, 100.0) is None


@dataclass
class Alone:
    """A system that is Valkey only."""

    valkey: Valkey

    def pids(self, role: str) -> list[int]:
        return [self.valkey.process.pid] if role == "valkey" else []

    def redis(self) -> redis.Redis:
        return admin_of(self.valkey.directory)


def test_data_of_a_real_valkey() -> None:
    """A value counts; a connection with its buffers, or a script, does not."""
    with Valkey("", 64 << 20) as valkey, admin_of(valkey.directory) as client:
        system = cast(System, Alone(valkey))
        (before,) = measure(system, 1.0)
        for number in range(64):  # one large command would swell this connection's buffer
            client.set(f"value-{number}", bytes(MIB // 16))
        (after,) = measure(system, 2.0)
        assert before.data is not None
        assert after.data is not None
        assert after.data - before.data == pytest.approx(4 * MIB, rel=0.05)
        for number in range(50):
            client.script_load(f"return '{number}{'x' * 100_000}'")
        others = [admin_of(valkey.directory) for _ in range(20)]
        for other in others:
            other.ping()
        grown = client.info("memory")
        assert grown["used_memory"] - after.data > 4 * MIB
        assert data_bytes(grown) - after.data < MIB
        for other in others:
            other.close()
    assert [sample.data for sample in measure(system, 3.0)] in ([], [None])
