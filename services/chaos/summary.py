"""The report of a run: what was counted, and what of it does not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from criticalkv.services.chaos.check import TEMPORARY, Finding, Findings
from criticalkv.services.chaos.history import Event, Record, counted
from criticalkv.services.chaos.limits import (
    ANSWERED_FLOOR,
    CALM_ANSWERED_FLOOR,
    CALM_TEMPORARY_LIMIT,
    DEADLINE_S,
    EXEMPT_LIMIT,
    IDLE_LIMIT_S,
    MARGIN_S,
    RECOVERY_GOAL_S,
    RECOVERY_LIMIT_S,
    SLOPE_LIMIT,
    broken,
    compared,
)
from criticalkv.services.chaos.slope import Slope
from criticalkv.shared.report import Report

FULL_RUN = 10_000
SHOWN = 50
MEANING = {
    "requests": "requests sent, probes included",
    "wrong": "requests whose answer or status is not the right one; 0 is the goal",
    "late": f"requests that ended later than {DEADLINE_S + MARGIN_S:.0f} s; 0 is the goal",
    "silent_ends": "requests that ended without [DONE] and finish_reason, a body or an error; "
    "0 is the goal",
    "exempt_share": f"answers not judged (near-ties) / answers; {EXEMPT_LIMIT} is the limit",
    "answered_share": "valid requests that got their answer / valid requests; at least "
    f"{ANSWERED_FLOOR}, and {CALM_ANSWERED_FLOOR} if nothing is injected",
    "temporary_share": "requests that got an error after which they may succeed (429, 503, 504) / "
    f"requests; {CALM_TEMPORARY_LIMIT} is the limit if nothing is injected",
    "slowest_recovery_s": "longest time from a kill until the service answered again, seconds; "
    f"{RECOVERY_GOAL_S:.0f} is the goal, {RECOVERY_LIMIT_S:.0f} the limit",
    "recovery_goal_met": f"1 = no recovery took longer than {RECOVERY_GOAL_S:.0f} s, 0 = one did",
    "idle_after_s": f"from the load's end until nothing is in flight, seconds; {IDLE_LIMIT_S:.0f} "
    "is the limit",
    "orphan_bytes": "payload bytes that nothing accounts for after TTL and grace; 0 is the goal",
    "largest_rss_slope_mib_per_hour": "of a process after warm-up, of Valkey beyond its data; "
    f"{SLOPE_LIMIT:.0f} is the limit",
}


@dataclass(frozen=True)
class Measured:
    """All that is known after a run.

    Attributes:
        options, settings: of the run and of the service.
        condition: descriptors and connections before and after, what was occupied after
            the load, and what was left over.
        idle_after_s: from the load's end until nothing was in flight; None = too long.
        load_s: how long the load lasted.
        paced_per_s: requests per second of a soak; None = a closed loop.
        faults: by failpoint and kind.
        memory: MiB by role.
        memory_per_minute: MiB by process, of each minute.
        slopes: by process.
        valkey_data_per_request: bytes that a request leaves in Valkey; None = not known.
    """

    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    records: Sequence[Record]
    events: Sequence[Event]
    findings: Findings
    condition: Mapping[str, Any]
    idle_after_s: float | None
    load_s: float
    paced_per_s: float | None
    faults: Mapping[str, int]
    memory: Mapping[str, Mapping[str, float]]
    memory_per_minute: Mapping[str, Sequence[float | None]]
    slopes: Mapping[str, Slope]
    valkey_data_per_request: float | None


def summarize(measured: Measured) -> Report:
    """Return the report; `details["broken"]` names what does not hold."""
    records = measured.records
    report = Report(
        name="chaos",
        quick=len(records) < FULL_RUN and not measured.options["soak_minutes"],
        headline=_headline(measured),
        meaning=MEANING,
        details=_details(measured),
        samples={
            "events": [asdict(event) for event in measured.events],
            "findings": [_shown(f, records) for f in measured.findings.broken[:SHOWN]],
        },
    )
    report.details["broken"] = broken(report, measured.findings)
    return report


def _headline(measured: Measured) -> dict[str, float | None]:
    findings, records = measured.findings, measured.records
    answers = [r for r in records if r.expects == "answer" and not r.cut]
    kills = [e for e in measured.events if e.by == "kill"]
    slowest = max((e.recovery_s for e in kills if e.recovery_s is not None), default=None)
    slopes = [s.mib_per_hour for s in measured.slopes.values() if s.mib_per_hour is not None]
    exempt = sum(findings.exempt.values())
    return {
        "requests": len(records),
        "wrong": findings.count("wrong"),
        "late": findings.count("late"),
        "silent_ends": findings.count("silent"),
        "exempt_share": exempt / max(1, exempt + findings.judged),
        "answered_share": sum(r.answered for r in answers) / max(1, len(answers)),
        "temporary_share": sum(r.code in TEMPORARY for r in records) / max(1, len(records)),
        "slowest_recovery_s": slowest,
        "recovery_goal_met": _goal_met(kills),
        "idle_after_s": measured.idle_after_s,
        "orphan_bytes": measured.condition["left_over"]["bytes"],
        "largest_rss_slope_mib_per_hour": max(slopes, default=None),
    }


def _goal_met(kills: Sequence[Event]) -> float | None:
    if not kills:
        return None
    return float(all(e.recovery_s is not None and e.recovery_s <= RECOVERY_GOAL_S for e in kills))


def _details(measured: Measured) -> dict[str, Any]:
    records = measured.records
    return {
        "options": dict(measured.options),
        "settings": dict(measured.settings),
        "load_seconds": round(measured.load_s, 1),
        "paced_per_second": measured.paced_per_s,
        "kinds": counted(r.kind for r in records),
        "statuses": counted(str(r.status) for r in records),
        "codes": counted(r.code for r in records if r.code),
        "tiers": counted(r.tier for r in records if r.tier),
        "judged": measured.findings.judged,
        "exempt": measured.findings.exempt,
        "faults": dict(measured.faults),
        "latency_s": _percentiles([r.seconds for r in records if r.answered]),
        "condition": dict(measured.condition),
        "not_judged": _not_judged(measured.condition),
        "memory_mib": measured.memory,
        "memory_per_minute": measured.memory_per_minute,
        "valkey_data_bytes_per_request": measured.valkey_data_per_request,
        "rss_slopes": {name: asdict(one) for name, one in measured.slopes.items()},
    }


def _not_judged(condition: Mapping[str, Any]) -> list[str]:
    """Return what could not be compared: processes that were restarted, or did not answer."""
    before, after = condition["before"], condition["after"]
    names = compared(before, after)
    new = [name for name in after["descriptors"] if name not in names]
    silent = [name for name, count in condition["occupied"].items() if count is None]
    return [f"descriptors of {name}" for name in new if not name.startswith("valkey:")] + silent


def _shown(finding: Finding, records: Sequence[Record]) -> dict[str, Any]:
    return {**asdict(finding), "request": asdict(records[finding.record])}


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{p}": round(float(np.percentile(seconds, p)), 4) for p in (50, 90, 99, 100)}
