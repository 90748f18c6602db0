"""Failpoints: named places in the code where tests and `criticalkv chaos` inject faults.

Off unless the environment names some, and then free: one comparison with None. They are
read once, when this module is imported; children inherit the environment.

    CRITICALKV_FAILPOINTS="store.segment.read=flip:0.01;prefill.layer=exit:0.001;seed=7"

Each entry is `name=kind:probability[:argument]`; a place may have several. `seed=N` fixes
what is drawn, `journal=FILE` gets a line of JSON per fault, also for those that end the
process. Kinds:
    error      raise the typed error that the place would raise if its peer failed
    delay      wait `argument` seconds (default 0.2)
    exit       end the process at once, as kill -9 does
    flip       flip one bit of the data that passes (only where data passes)
    truncate   cut the data in half (only where data passes)
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import threading
import time
from dataclasses import dataclass

from criticalkv.shared.errors import ConfigError, CriticalKVError, StoreUnavailableError

log = logging.getLogger(__name__)

VARIABLE = "CRITICALKV_FAILPOINTS"
KINDS = ("error", "delay", "exit", "flip", "truncate")
DELAY_S = 0.2

PLACES = {
    "store.put.begin": "a put has been admitted, nothing is written",
    "store.segment.write": "segments go to Redis; data",
    "store.put.commit": "all segments are written, the manifest is not",
    "store.put.published": "the manifest is visible, the books do not know it",
    "store.segment.read": "segments come from Redis; data",
    "store.redis": "a command or script of the metadata is about to run",
    "client.put.frame": "a segment leaves a client; data",
    "client.get.frame": "a segment arrives at a client; data",
    "client.call": "a call without payload leaves a client",
    "prefill.layer": "a layer has been computed",
    "decode.step": "a step of the decode batch is about to run",
    "decode.publish": "a finished turn is about to be published",
}
"""Every failpoint, and what has happened when it is reached."""


@dataclass(frozen=True)
class Fault:
    """What happens at a place, and how often."""

    kind: str
    probability: float
    argument: float = DELAY_S


class Failpoints:
    """The faults of one process, drawn from one seed."""

    def __init__(self, faults: dict[str, list[Fault]], seed: int, journal: str = "") -> None:
        self._faults = faults
        self._random = random.Random(seed)
        self._journal = journal
        self._lock = threading.Lock()
        self.counts: dict[str, int] = {}

    @classmethod
    def parse(cls, text: str) -> Failpoints | None:
        """Read the variable's value; None if it is empty.

        Raises:
            ConfigError: naming the entry at fault.
        """
        faults: dict[str, list[Fault]] = {}
        seed, journal = 0, ""
        for entry in filter(None, (part.strip() for part in text.split(";"))):
            name, _, value = entry.partition("=")
            try:
                if name == "seed":
                    seed = int(value)
                elif name == "journal":
                    journal = value
                else:
                    _add(faults, name, _fault(name, value))
            except ValueError as error:
                raise ConfigError(f"{VARIABLE}: {entry!r}: {error}", param=VARIABLE) from None
        return cls(faults, seed, journal) if faults else None

    def draw(self, name: str) -> Fault | None:
        """Return the fault that happens now, if one does."""
        faults = self._faults.get(name)
        if faults is None:
            return None
        with self._lock:
            fault = self._drawn(faults)
            if fault is None:
                return None
            self.counts[name] = self.counts.get(name, 0) + 1
            self._note(name, fault)
        if fault.kind == "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        return fault

    def _drawn(self, faults: list[Fault]) -> Fault | None:
        at = self._random.random()
        for fault in faults:
            at -= fault.probability
            if at < 0:
                return fault
        return None

    def _note(self, name: str, fault: Fault) -> None:
        if self._journal:
            line = {"at": time.time(), "pid": os.getpid(), "place": name, "kind": fault.kind}
            with open(self._journal, "a") as file:  # one write: lines of processes do not mix
                file.write(json.dumps(line) + "\n")

    def damage(self, fault: Fault, data: bytes) -> bytes:
        """Return the data as the fault leaves them."""
        if fault.kind == "truncate":
            return data[: len(data) // 2]
        with self._lock:
            at = self._random.randrange(8 * len(data)) if data else 0
        out = bytearray(data)
        if out:
            out[at // 8] ^= 1 << at % 8
        return bytes(out)


def hit(name: str, error: type[CriticalKVError] = StoreUnavailableError) -> None:
    """Pass a place, in a thread.

    Raises:
        CriticalKVError: of the given type, if the place is to fail.
    """
    if _active is None:
        return
    fault = _active.draw(name)
    if fault is not None:
        if fault.kind == "delay":
            time.sleep(fault.argument)
        _raise(fault, name, error)


async def passed(name: str, error: type[CriticalKVError] = StoreUnavailableError) -> None:
    """Pass a place, on an event loop. Raises as `hit`."""
    if _active is None:
        return
    fault = _active.draw(name)
    if fault is not None:
        if fault.kind == "delay":
            await asyncio.sleep(fault.argument)
        _raise(fault, name, error)


def through(name: str, data: bytes, error: type[CriticalKVError] = StoreUnavailableError) -> bytes:
    """Pass a place with data, in a thread; return what comes out. Raises as `hit`."""
    if _active is None:
        return data
    fault = _active.draw(name)
    if fault is None:
        return data
    if fault.kind == "delay":
        time.sleep(fault.argument)
    _raise(fault, name, error)
    return data if fault.kind == "delay" else _active.damage(fault, data)


def _fault(name: str, value: str) -> Fault:
    if name not in PLACES:
        raise ValueError(f"no such failpoint; there are {', '.join(PLACES)}")
    kind, *numbers = value.split(":")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}")
    if kind in ("flip", "truncate") and not PLACES[name].endswith("; data"):
        raise ValueError(f"no data pass there to {kind}")
    if len(numbers) > 2:
        raise ValueError("expected kind:probability:argument")
    fault = Fault(kind, *(float(number) for number in numbers or ["1"]))
    if not 0 <= fault.probability <= 1 or not 0 <= fault.argument < float("inf"):
        raise ValueError("the probability must be in [0, 1], the argument not negative")
    return fault


def _add(faults: dict[str, list[Fault]], name: str, fault: Fault) -> None:
    there = faults.setdefault(name, [])
    there.append(fault)
    if sum(one.probability for one in there) > 1:
        raise ValueError("the probabilities of a place add up to more than 1")


def _raise(fault: Fault, name: str, error: type[CriticalKVError]) -> None:
    if fault.kind == "error":
        raise error(f"failpoint {name}")


_active = Failpoints.parse(os.environ.get(VARIABLE, ""))
if _active is not None:
    log.warning("failpoints are on: this process fails on purpose")
