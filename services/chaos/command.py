"""`criticalkv chaos`: start, load, torment, settle, judge, report."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from criticalkv.services.chaos import health
from criticalkv.services.chaos.call import Caller
from criticalkv.services.chaos.check import Findings, Verdict, check
from criticalkv.services.chaos.faults import STORE_PLACES, WORKER_PLACES, Tormentor, plan
from criticalkv.services.chaos.history import Event, History, Record
from criticalkv.services.chaos.judge import Judge, KeptEntries
from criticalkv.services.chaos.limits import DEADLINE_S, IDLE_LIMIT_S, MARGIN_S, SLOPE_LIMIT
from criticalkv.services.chaos.load import CONTEXTS, Budget, Client
from criticalkv.services.chaos.model import make_model
from criticalkv.services.chaos.summary import FULL_RUN, Measured, summarize
from criticalkv.services.chaos.system import TENANTS, System
from criticalkv.services.chaos.world import POLICIES, Held, World, document
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.config import ModelConfig
from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.model.loader import load_model
from criticalkv.shared.report import Report
from criticalkv.shared.store_client import StoreClient

CLIENTS = 8
DOCUMENTS = 4
PATIENCE_S = DEADLINE_S + MARGIN_S + 10  # of a client that waits for bytes
SETTLE_S = 60.0
CALM_S = 180.0
BURST_S = 6.0
BURST_CLIENTS = 16  # more than the load's: its pools need no further growth
RELEASE_S = 10.0
PACED_SHARE = 0.7
CLOSED_LOOP_S = 20.0
# Small enough that contexts shrink and go, and that turns make room for one another.
SETTINGS: dict[str, dict[str, Any]] = {
    "gateway": {"request_timeout_s": DEADLINE_S},
    "store": {
        "memory_limit_mb": 16,
        "lease_ttl_s": 5,
        "read_deadline_s": 5.0,
        "janitor_interval_s": 1.0,
    },
    "decode": {"pool_mb": 32, "node_cache_mb": 8, "max_num_seqs": 8},
}
# A real model's KV is larger; about as many contexts are to fit.
REAL_SETTINGS: dict[str, dict[str, Any]] = {
    **SETTINGS,
    "store": {**SETTINGS["store"], "memory_limit_mb": 512},
    "decode": {"pool_mb": 1024, "node_cache_mb": 256, "max_num_seqs": 8},
}


@dataclass(frozen=True)
class Options:
    """What a run is to do.

    Attributes:
        requests: in all; None = until the time is over.
        seconds: of load; None = until all requests are sent.
        seed: of model, texts, load and faults.
        store_faults: probability of a fault per request and failpoint.
        kills_per_minute: of prefill, decode, store and Valkey in turn; 0 = none.
        soak_minutes: paced load without faults or kills instead; 0 = chaos.
        model: `model.path`; "" = a tiny random model.
        clients: at once.
        folder: for the history; None = it is not kept.
    """

    requests: int | None = FULL_RUN
    seconds: float | None = None
    seed: int = 0
    store_faults: float = 0.01
    kills_per_minute: float = 2.0
    soak_minutes: float = 0.0
    model: str = ""
    clients: int = CLIENTS
    folder: Path | None = None


@dataclass
class Outcome:
    """What a run found."""

    history: History
    findings: Findings
    report: Report
    broken: list[str] = field(default_factory=list)
    """What does not hold, in words; empty = all is well."""


def run(options: Options) -> Outcome:
    """Run it. The report is complete, also of a run that found something."""
    # Short, for the unix socket in it.
    with tempfile.TemporaryDirectory(prefix="ckv-chaos-", dir="/tmp") as private:
        folder = Path(private)
        model = options.model or str(make_model(folder / "tiny", options.seed))
        return Run(options, folder, model).all()


class Run:
    """One run of the system under load."""

    def __init__(self, options: Options, folder: Path, model: str) -> None:
        self._options = options
        self._folder = folder
        self._model = model
        self._paced: float | None = None
        self._drawn = 0
        self._settings = REAL_SETTINGS if options.model else SETTINGS
        self._journal = folder / "faults.jsonl"
        self._begun = time.monotonic()
        kept = options.folder or folder
        kept.mkdir(parents=True, exist_ok=True)
        self._history = History(kept / "history.jsonl")
        self._documents = [document(options.seed * 1000 + n) for n in range(DOCUMENTS)]

    def all(self) -> Outcome:
        """Start, load, settle, judge."""
        chaos = not self._options.soak_minutes
        faults = self._options.store_faults if chaos else 0.0
        self._system = System(
            self._folder,
            self._model,
            self._settings,
            plan(WORKER_PLACES, faults, self._options.seed, self._journal),
        )
        with self._system:
            self._open()
            kept = self._calm()
            if faults:
                self._system.store_faults = self._store_faults(self._options.seed)
                self._system.restart_store()
            self._warm_up()
            before = self._condition()
            self._load(chaos)
            after = self._settle(before)
        self._history.close()
        return self._judge(kept, after)

    # -------------------------------------------------------------------- load

    def _open(self) -> None:
        self._call()
        system = self._system
        key = system.keys[TENANTS[0]]
        models = httpx.get(
            f"{system.url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=30.0
        )
        self._world = World(models.json()["data"][0]["id"], self._documents, POLICIES)

    def _call(self) -> None:
        """Open the tenants' callers, and one without a key."""
        system = self._system
        self._callers = {
            name: Caller(system.url, key, PATIENCE_S, self._clock)
            for name, key in system.keys.items()
        }
        self._wrong = Caller(system.url, "nobody's key", PATIENCE_S, self._clock)

    def _hang_up(self) -> None:
        for caller in (*self._callers.values(), self._wrong):
            caller.close()

    def _calm(self) -> dict[tuple[int, str], KeptEntries]:
        """Store every document for every tenant, and read what its tiers keep."""
        out: dict[tuple[int, str], KeptEntries] = {}
        with self._system.client() as store:
            for number in range(DOCUMENTS):
                for policy in POLICIES:
                    first, *others = [
                        self._kept(store, tenant, number, policy) for tenant in TENANTS
                    ]
                    if not all(first.equals(other) for other in others):
                        raise CriticalKVError(f"tenants keep other entries of document {number}")
                    out[number, policy] = first
        return out

    def _kept(self, store: StoreClient, tenant: str, number: int, policy: str) -> KeptEntries:
        body = {"text": self._documents[number], "policy": policy, "store_tier": "1"}
        deadline = time.monotonic() + CALM_S
        while True:
            record = Record(0, -1, tenant, "calm", "ok", self._clock(), born=self._clock())
            record, data = self._callers[tenant].send(record, "POST", CONTEXTS, body)
            self._history.add(record)
            try:
                if "node_id" not in data:
                    raise CriticalKVError(f"a context was not stored: {record.code}")
                with store.open_get(data["node_id"]) as reader:
                    cache = assemble(reader.manifest, reader.tier, reader)
                    kept = KeptEntries.of(reader.manifest, cache.layers)
                self._world.hold(tenant, number, policy, Held(data["id"], record.start))
                return kept
            except CriticalKVError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _warm_up(self) -> None:
        """Fill all pools with a burst, then hang up: what grows from here on is a leak."""
        seconds = BURST_S
        self._clients(Budget(None, time.monotonic() + seconds), None, seconds, BURST_CLIENTS)
        health.until_idle(self._system, SETTLE_S)
        self._hang_up()
        self._call()

    def _load(self, chaos: bool) -> None:
        options = self._options
        self._sampler = health.Sampler(self._system, self._clock)
        self._sampler.start()
        tormentor = Tormentor(
            self._system,
            self._history,
            self._probe,
            self._clock,
            options.seed,
            options.kills_per_minute if chaos else 0.0,
            self._store_faults,
        )
        tormentor.start()
        self._load_from = self._clock()
        if chaos:
            until = None if options.seconds is None else time.monotonic() + options.seconds
            self._clients(Budget(options.requests, until), options.requests, options.seconds)
        else:
            self._soak()
        self._load_to = self._clock()
        self._idle_after = health.until_idle(self._system, 10 * IDLE_LIMIT_S)
        tormentor.stop()
        self._sampler.stop()
        self._note_restarts()

    def _soak(self) -> None:
        """Measure what a closed loop does, then load with a share of it."""
        seconds = 60 * self._options.soak_minutes
        before = len(self._history.records)
        self._clients(Budget(None, time.monotonic() + CLOSED_LOOP_S), None, CLOSED_LOOP_S)
        rate = PACED_SHARE * (len(self._history.records) - before) / CLOSED_LOOP_S
        self._paced = rate
        budget = Budget(None, time.monotonic() + seconds, pace_s=1 / max(rate, 0.1))
        self._load_from = self._clock()
        self._clients(budget, None, seconds)

    def _clients(
        self, budget: Budget, requests: int | None, seconds: float | None, count: int = 0
    ) -> None:
        count = count or self._options.clients
        threads = [
            threading.Thread(target=self._client(number, budget).run, name=f"client-{number}")
            for number in range(self._drawn, self._drawn + count)
        ]
        self._drawn += len(threads)  # the next ones say something else
        for thread in threads:
            thread.start()
        try:
            self._show(threads, requests, seconds)
        finally:
            budget.stop()
            for thread in threads:
                thread.join()

    def _client(self, number: int, budget: Budget) -> Client:
        tenant = TENANTS[number % len(TENANTS)]
        return Client(
            number,
            tenant,
            self._callers,
            self._wrong,
            self._world,
            self._history,
            budget,
            self._options.seed,
            self._clock,
        )

    def _show(
        self, threads: Sequence[threading.Thread], requests: int | None, seconds: float | None
    ) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f} {task.fields[unit]}"),
            TimeElapsedColumn(),
        )
        unit, total = ("requests", requests) if requests is not None else ("seconds", seconds)
        begun, first = self._clock(), len(self._history.records)
        with Progress(*columns) as progress:
            task = progress.add_task("Load", total=total, unit=unit)
            while any(thread.is_alive() for thread in threads):
                sent = len(self._history.records) - first
                done = sent if unit == "requests" else self._clock() - begun
                kills = len(self._history.events)
                progress.update(task, completed=done, description=f"Load, {kills} kills")
                time.sleep(0.2)

    def _probe(self, victim: str) -> bool:
        """Ask for something that needs what was killed."""
        tenant = TENANTS[0]
        record = Record(0, -1, tenant, "probe", "ok", self._clock(), born=self._clock())
        # With connections of its own: the tenant's callers may be closed by now.
        caller = Caller(self._system.url, self._system.keys[tenant], PATIENCE_S, self._clock)
        try:
            if victim == "decode":
                message = {"role": "user", "content": "Are you there?"}
                body = {"model": self._world.model, "messages": [message], "max_tokens": 2}
                record, _ = caller.send(record, "POST", "/v1/chat/completions", body)
            else:
                text = document(1 << 50 | len(self._history.records))
                record, _ = caller.send(record, "POST", CONTEXTS, {"text": text})
        finally:
            caller.close()
        self._history.add(record)
        return record.status == 200

    def _note_restarts(self) -> None:
        """Note the ends that a failpoint brought about: they were restarted, not killed."""
        killed = [event for event in self._history.events if event.by == "kill"]
        offset = time.time() - self._clock()
        for role, at in self._system.restarts:
            near = at - offset
            if near > self._load_from and not any(
                e.what == role and e.at - 1 <= near <= (e.until or near) for e in killed
            ):
                self._history.happened(Event(role, near, near, by="failpoint"))

    # --------------------------------------------------------------- afterwards

    def _condition(self) -> dict[str, Any]:
        return {
            "descriptors": health.descriptors(self._system),
            "connections": health.connections(self._system),
        }

    def _settle(self, before: dict[str, Any]) -> dict[str, Any]:
        """Wait for what takes its time; return the system's condition before and after."""
        self._hang_up()
        occupied = health.occupied(self._system, RELEASE_S)
        left = health.until_clean(self._system, SETTLE_S)
        after = self._condition()
        return {"before": before, "after": after, "occupied": occupied, "left_over": left}

    def _judge(self, kept: dict[tuple[int, str], KeptEntries], after: dict[str, Any]) -> Outcome:
        judge = Judge(load_model(ModelConfig(path=self._model)), self._documents, kept)
        records, events = self._history.records, self._history.events
        with Progress() as progress:
            task = progress.add_task("Judging", total=sum(r.ask is not None for r in records))

            def judged(record: Record) -> Verdict:
                progress.advance(task)
                return judge(record)

            findings = check(records, events, judged, deadline_s=DEADLINE_S, margin_s=MARGIN_S)
            progress.update(task, completed=progress.tasks[0].total)
        report = summarize(self._measured(findings, after))
        return Outcome(self._history, findings, report, report.details["broken"])

    def _measured(self, findings: Findings, after: dict[str, Any]) -> Measured:
        return Measured(
            options={**asdict(self._options), "folder": None},
            settings=self._settings,
            records=self._history.records,
            events=self._history.events,
            findings=findings,
            condition=after,
            idle_after_s=self._idle_after,
            load_s=self._load_to - self._load_from,
            paced_per_s=self._paced,
            faults=self._faults(),
            memory=self._sampler.memory(),
            memory_per_minute=self._sampler.memory_per_minute(),
            slopes=self._sampler.slopes(self._warm_up_s, SLOPE_LIMIT),
            valkey_data_per_request=self._sampler.data_per_request(
                [record.end for record in self._history.records], self._warm_up_s
            ),
        )

    def _faults(self) -> dict[str, int]:
        if not self._journal.exists():
            return {}
        counts: Counter[str] = Counter()
        for line in self._journal.read_text().splitlines():
            counts[_fault_name(line)] += 1
        return dict(sorted(counts.items()))

    @property
    def _warm_up_s(self) -> float:
        """Memory is judged after a fifth of the load, two minutes at least."""
        return self._load_from + max(120.0, 0.2 * (self._load_to - self._load_from))

    def _store_faults(self, seed: int) -> str:
        return plan(STORE_PLACES, self._options.store_faults, seed, self._journal)

    @property
    def _clock(self) -> Callable[[], float]:
        return lambda: time.monotonic() - self._begun


def _fault_name(line: str) -> str:
    fields = json.loads(line)
    return f"{fields['place']} {fields['kind']}"
