"""What is done to the system: failpoints in its processes, kills, a full Redis."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from redis.exceptions import RedisError

from criticalkv.services.chaos.history import Event, History
from criticalkv.services.chaos.system import System

DATA = ("error", "delay", "flip", "truncate")
CALL = ("error", "delay")
STORE_PLACES = {
    "store.put.begin": CALL,
    "store.segment.write": DATA,
    "store.put.commit": CALL,
    "store.put.published": CALL,
    "store.segment.read": DATA,
    "store.redis": CALL,
}
WORKER_PLACES = {
    "client.put.frame": DATA,
    "client.get.frame": DATA,
    "client.call": CALL,
    "prefill.layer": ("delay",),
    "decode.step": ("delay",),
    "decode.publish": CALL,
}
OFTEN = {"store.redis": 5, "client.call": 5, "prefill.layer": 3, "decode.step": 10}
"""Places that a request passes so many times, roughly."""
EXITS = ("store.put.commit", "store.put.published")
EXIT_SHARE = 0.05
DELAY_S = 0.1

VICTIMS = ("prefill", "decode", "store", "valkey")
BACK_LIMIT_S = 120.0
FULL_S = 2.0
FULL_ROOM_BYTES = 64 << 10
PROBE_S = 0.25
MIN_PAUSE_S = 2.0


def plan(places: dict[str, tuple[str, ...]], probability: float, seed: int, journal: Path) -> str:
    """Return failpoints under which a request meets each place's faults so often.

    Args:
        places: name → kinds that take turns there.
        probability: of a fault, per request and place.
        seed: of the draws.
        journal: file that gets a line per fault.
    """
    if not probability:
        return ""
    entries = []
    for name, kinds in places.items():
        each = probability / OFTEN.get(name, 1) / len(kinds)
        entries += [f"{name}={kind}:{each:g}:{DELAY_S}" for kind in kinds]
        if name in EXITS:
            entries.append(f"{name}=exit:{EXIT_SHARE * probability:g}")
    return ";".join([*entries, f"seed={seed}", f"journal={journal}"])


@dataclass
class Tormentor:
    """Kills parts in turn, and notes how long the service was away.

    Args:
        system: under test.
        history: gets an event per kill.
        probe: asks for something that needs a part; whether it worked.
        clock: seconds since the run began.
        seed: of order and victims.
        per_minute: kills; 0 = none.
        store_faults: failpoints of the next store, by a seed.
    """

    system: System
    history: History
    probe: Callable[[str], bool]
    clock: Callable[[], float]
    seed: int
    per_minute: float
    store_faults: Callable[[int], str]
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin, in a thread."""
        self._random = random.Random(self.seed)
        self._thread = threading.Thread(target=self._run, name="tormentor")
        self._thread.start()

    def stop(self) -> None:
        """End after the kill that is being watched."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        if not self.per_minute:
            return
        pause = due = 60 / self.per_minute
        begun = self.clock()
        for number, victim in enumerate(cycle((*VICTIMS, "memory"))):
            if self._stop.wait(max(MIN_PAUSE_S, begun + due - self.clock())):
                return
            due += pause
            if victim == "memory":
                self._fill()
            else:
                self.system.store_faults = self.store_faults(self.seed + number)
                self._kill(victim)

    def _kill(self, victim: str) -> None:
        at = self.clock()
        if not self.system.kill(victim, self._random.randrange(8)):
            return
        self.history.happened(Event(victim, at, self._back(victim, at)))

    def _back(self, victim: str, since: float) -> float | None:
        while self.clock() - since < BACK_LIMIT_S:
            if self.probe(victim):
                return self.clock()
            time.sleep(PROBE_S)  # also while the run ends: a kill is watched to its end
        return None

    def _fill(self) -> None:
        """Let Redis be full for a while: writes fail, reads go on."""
        at = self.clock()
        try:
            with self.system.redis() as client:
                limit = client.config_get("maxmemory")["maxmemory"]
                used = client.info("memory")["used_memory"]
                client.config_set("maxmemory", used + FULL_ROOM_BYTES)
                self._stop.wait(FULL_S)
                client.config_set("maxmemory", limit)
        except RedisError:
            return  # it has just been restarted, with its own limit
        self.history.happened(Event("memory", at, self.clock(), by="maxmemory"))
