"""What a run must hold, and which of it does not, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from criticalkv.services.chaos.check import Findings
from criticalkv.services.chaos.faults import MIN_PAUSE_S, STORE_PLACES, VICTIMS, WORKER_PLACES
from criticalkv.shared.report import Report

DEADLINE_S = 30.0
MARGIN_S = 3.0
IDLE_LIMIT_S = 2.0
RECOVERY_GOAL_S = 10.0
RECOVERY_LIMIT_S = 30.0  # a replica of a loaded small machine takes longer than the goal
SLOPE_LIMIT = 8.0
EXEMPT_LIMIT = 0.02
JUDGED_FLOOR = 0.2  # of all requests; refusals, registrations and samples are among them
ANSWERED_FLOOR = 0.5
CALM_ANSWERED_FLOOR = 0.99
CALM_TEMPORARY_LIMIT = 0.01
DESCRIPTORS = 8
CONNECTIONS = 16
CERTAIN = 3.0
"""Faults expected per place; with so many, none at all is no accident."""


def broken(report: Report, findings: Findings) -> list[str]:
    """Return what does not hold, in words."""
    condition = report.details["condition"]
    return [
        *_found(report, findings),
        *_answers(report),
        *_recoveries(report),
        *_injected(report),
        *_growth(report),
        *_leaks(condition["before"], condition["after"]),
        *_left(report),
    ]


def is_calm(options: dict[str, Any]) -> bool:
    """Whether a run injects nothing."""
    return bool(options["soak_minutes"]) or not (
        options["store_faults"] or options["kills_per_minute"]
    )


def compared(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the processes that lived all the time; a new one has no earlier count.

    Each descriptor of Valkey is a connection, and those are counted by themselves.
    """
    both = before["descriptors"].keys() & after["descriptors"].keys()
    return sorted(name for name in both if not name.startswith("valkey:"))


def _found(report: Report, findings: Findings) -> Iterator[str]:
    for rule, key in (("wrong", "wrong"), ("late", "late"), ("silent", "silent_ends")):
        if count := report.headline[key]:
            first = next(f for f in findings.broken if f.rule == rule)
            yield f"{count:.0f} {key}; the first: request {first.record}, {first.why}"


def _answers(report: Report) -> Iterator[str]:
    """Whether enough was answered and compared for the run to say anything."""
    head, judged = report.headline, report.details["judged"]
    calm = is_calm(report.details["options"])
    if judged < max(1, JUDGED_FLOOR * _number(head["requests"])):
        yield f"only {judged} answers of {head['requests']:.0f} requests were judged"
    if _number(head["exempt_share"]) > EXEMPT_LIMIT:
        yield f"{head['exempt_share']:.3f} of the answers could not be judged"
    floor = CALM_ANSWERED_FLOOR if calm else ANSWERED_FLOOR
    if _number(head["answered_share"]) < floor:
        yield f"only {head['answered_share']:.3f} of the valid requests were answered"
    if calm and _number(head["temporary_share"]) > CALM_TEMPORARY_LIMIT:
        yield f"{head['temporary_share']:.3f} of the requests got a temporary error, without cause"


def _recoveries(report: Report) -> Iterator[str]:
    for event in report.samples["events"]:
        if event["by"] != "kill":
            continue
        if event["until"] is None:
            yield f"the service did not come back after {event['what']} was killed"
        elif (took := event["until"] - event["at"]) > RECOVERY_LIMIT_S:
            yield f"the service came back {took:.1f} s after {event['what']} was killed"


def _injected(report: Report) -> Iterator[str]:
    """Whether what was to be done to the system was done."""
    options, details = report.details["options"], report.details
    if options["soak_minutes"]:
        return
    killed = {event["what"] for event in report.samples["events"] if event["by"] == "kill"}
    for victim in _due(options["kills_per_minute"], details["load_seconds"]):
        if victim not in killed:
            yield f"{victim} was never killed"
    if options["store_faults"] * _number(report.headline["requests"]) >= CERTAIN:
        places = {name.split()[0] for name in details["faults"]}
        for what, planned in (("the store", STORE_PLACES), ("the replicas", WORKER_PLACES)):
            if not places & planned.keys():
                yield f"no failpoint of {what} was hit"


def _due(per_minute: float, load_s: float) -> tuple[str, ...]:
    """Return whose turn must have come: even if each recovery took as long as it may."""
    if not per_minute:
        return ()
    longest = max(60 / per_minute, RECOVERY_LIMIT_S + MIN_PAUSE_S)
    return VICTIMS[: max(0, int((load_s - MIN_PAUSE_S) / longest))]


def _growth(report: Report) -> Iterator[str]:
    """Yield the processes that grow in a soak; one that cannot be judged is none of them."""
    if not report.details["options"]["soak_minutes"]:
        return
    for name, one in report.details["rss_slopes"].items():
        value = one["mib_per_hour"]
        if value is not None and value > SLOPE_LIMIT:
            yield f"{name} grows by {value:.1f} MiB per hour"


def _leaks(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield what is open now and was not; the pools were full before."""
    names = compared(before, after)
    if not names:
        yield "the descriptors of no process could be compared"
    for name in names:
        grown = after["descriptors"][name] - before["descriptors"][name]
        if grown > DESCRIPTORS:
            yield f"descriptors of {name} grew by {grown}"
    grown = after["connections"] - before["connections"]
    if grown > CONNECTIONS:
        yield f"connections to Redis grew by {grown}"


def _left(report: Report) -> Iterator[str]:
    """Yield what goes on, or lies about, after the load."""
    idle, condition = report.headline["idle_after_s"], report.details["condition"]
    if idle is None or idle > IDLE_LIMIT_S:
        yield f"requests were in flight for longer than {IDLE_LIMIT_S:.0f} s"
    for name, count in condition["occupied"].items():
        if count:  # None = could not be asked; the report says so
            yield f"{name} is still {count:.0f}"
    left = condition["left_over"]
    if left["bytes"] or left["books_differ_by"]:
        yield f"left over after {left['seconds']} s: {left}"


def _number(value: float | None) -> float:
    return value or 0.0
