"""The report of a run: what was counted, and what of it does not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from criticalkv.services.bench.report import Report
from criticalkv.services.chaos.check import Finding, Findings
from criticalkv.services.chaos.history import Event, Record, counted
from criticalkv.services.chaos.slope import Slope

FULL_RUN = 10_000
DEADLINE_S = 30.0
MARGIN_S = 3.0
IDLE_LIMIT_S = 2.0
RECOVERY_LIMIT_S = 10.0
SLOPE_LIMIT = 8.0
SHOWN = 50
POOLED = 80  # descriptors and connections that full pools keep open
MEANING = {
    "requests": "requests sent, probes included",
    "wrong": "requests whose answer or status is not the right one; 0 is the goal",
    "late": f"requests that ended later than {DEADLINE_S + MARGIN_S:.0f} s; 0 is the goal",
    "silent_ends": "requests that ended without [DONE] and finish_reason, a body or an error; "
    "0 is the goal",
    "exempt_share": "answers not judged (near-ties) / answers; 0.02 is the limit",
    "answered_share": "valid requests that got their answer / valid requests; higher is better",
    "slowest_recovery_s": "longest time from a kill until the service answered again, seconds; "
    f"{RECOVERY_LIMIT_S:.0f} is the limit",
    "idle_after_s": f"from the load's end until nothing is in flight, seconds; {IDLE_LIMIT_S:.0f} "
    "is the limit",
    "orphan_bytes": "payload bytes that nothing accounts for after TTL and grace; 0 is the goal",
    "largest_rss_slope_mib_per_hour": f"of a process after warm-up; {SLOPE_LIMIT:.0f} is the limit",
}


@dataclass(frozen=True)
class Measured:
    """All that is known after a run.

    Attributes:
        options, settings: of the run and of the service.
        condition: descriptors and connections before and after, and what was left over.
        idle_after_s: from the load's end until nothing was in flight; None = too long.
        load_s: how long the load lasted.
        paced_per_s: requests per second of a soak; None = a closed loop.
        faults: by failpoint and kind.
        memory: MiB by role.
        slopes: by process.
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
    slopes: Mapping[str, Slope]


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
    recoveries = [e.recovery_s for e in measured.events if e.by == "kill"]
    slopes = [s.mib_per_hour for s in measured.slopes.values() if s.mib_per_hour is not None]
    exempt = sum(findings.exempt.values())
    return {
        "requests": len(records),
        "wrong": findings.count("wrong"),
        "late": findings.count("late"),
        "silent_ends": findings.count("silent"),
        "exempt_share": exempt / max(1, exempt + findings.judged),
        "answered_share": sum(r.answered for r in answers) / max(1, len(answers)),
        "slowest_recovery_s": max((r for r in recoveries if r is not None), default=None),
        "idle_after_s": measured.idle_after_s,
        "orphan_bytes": measured.condition["left_over"]["bytes"],
        "largest_rss_slope_mib_per_hour": max(slopes, default=None),
    }


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
        "memory_mib": measured.memory,
        "rss_slopes": {name: asdict(one) for name, one in measured.slopes.items()},
    }


def _shown(finding: Finding, records: Sequence[Record]) -> dict[str, Any]:
    return {**asdict(finding), "request": asdict(records[finding.record])}


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{p}": round(float(np.percentile(seconds, p)), 4) for p in (50, 90, 99, 100)}


def broken(report: Report, findings: Findings) -> list[str]:
    """Return what does not hold, in words."""
    head, out = report.headline, []
    for rule, key in (("wrong", "wrong"), ("late", "late"), ("silent", "silent_ends")):
        if head[key]:
            first = next(f for f in findings.broken if f.rule == rule)
            out.append(f"{head[key]:.0f} {key}; the first: request {first.record}, {first.why}")
    idle = head["idle_after_s"]
    if idle is None or idle > IDLE_LIMIT_S:
        out.append(f"requests were in flight for longer than {IDLE_LIMIT_S:.0f} s")
    away = [e for e in report.samples["events"] if e["by"] == "kill" and e["until"] is None]
    out += [f"the service did not come back after {e['what']} was killed" for e in away]
    if report.details["options"]["soak_minutes"]:
        out += _growth(report.details["rss_slopes"])
    condition = report.details["condition"]
    out += _leaks(condition["before"], condition["after"])
    left = condition["left_over"]
    if left["bytes"] or left["books_differ_by"]:
        out.append(f"left over after {left['seconds']} s: {left}")
    return out


def _growth(slopes: dict[str, dict[str, Any]]) -> list[str]:
    """Return the processes that grow; one that cannot be judged is none of them."""
    judged = {name: one["mib_per_hour"] for name, one in slopes.items()}
    return [
        f"{name} grows by {value:.1f} MiB per hour"
        for name, value in judged.items()
        if value is not None and value > SLOPE_LIMIT
    ]


def _leaks(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what is open now and was not; pools have filled, within their size."""
    grown = {
        f"descriptors of {role}": count - before["descriptors"].get(role, 0)
        for role, count in after["descriptors"].items()
    }
    grown["connections to Redis"] = after["connections"] - before["connections"]
    return [f"{name} grew by {count}" for name, count in grown.items() if count > POOLED]
