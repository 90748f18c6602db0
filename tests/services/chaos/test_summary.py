"""The report says in words what does not hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from criticalkv.services.chaos.check import Finding, Findings
from criticalkv.services.chaos.history import Event, Record
from criticalkv.services.chaos.slope import Slope
from criticalkv.services.chaos.summary import Measured, summarize

OPEN = {"descriptors": {"store": 14, "gateway": 70}, "connections": 2}
CLEAN = {"segments": 0, "bytes": 0, "books_differ_by": 0, "seconds": 0.1}
GOOD = Measured(
    options={"soak_minutes": 0.0},
    settings={},
    records=[Record(n, 0, "north", "chat", "answer", 1.0, 2.0, 200) for n in range(3)],
    events=[Event("store", 5.0, 8.0), Event("store", 9.0, 9.0, by="failpoint")],
    findings=Findings(judged=3),
    condition={"before": OPEN, "after": OPEN, "left_over": CLEAN},
    idle_after_s=0.1,
    load_s=10.0,
    paced_per_s=None,
    faults={"store.redis error": 2},
    memory={},
    slopes={"store:1": Slope(500.0, 400.0, 600.0)},
)


def with_condition(**changes: Any) -> Measured:
    return replace(GOOD, condition={**GOOD.condition, **changes})


def with_finding(rule: str) -> Measured:
    return replace(GOOD, findings=Findings([Finding(rule, "because", 1)]))


def test_a_good_run(tmp_path: Path) -> None:
    report = summarize(GOOD)
    assert report.details["broken"] == []
    assert report.headline["slowest_recovery_s"] == 3.0
    assert (report.headline["requests"], report.quick) == (3, True)
    report.write(tmp_path / "chaos.json")


BROKEN: dict[str, Measured] = {
    "1 wrong; the first: request 1, because": with_finding("wrong"),
    "1 late; the first": with_finding("late"),
    "1 silent_ends; the first": with_finding("silent"),
    "in flight for longer": replace(GOOD, idle_after_s=None),
    "in flight for longer than 2 s": replace(GOOD, idle_after_s=2.5),
    "left over after": with_condition(left_over={**CLEAN, "bytes": 9}),
    "'books_differ_by': -9": with_condition(left_over={**CLEAN, "books_differ_by": -9}),
    "connections to Redis grew by 900": with_condition(after={**OPEN, "connections": 902}),
    "descriptors of store grew by 100": with_condition(
        after={**OPEN, "descriptors": {"store": 114}}
    ),
    "did not come back after valkey": replace(GOOD, events=[Event("valkey", 5.0)]),
    "store:1 grows by 500.0 MiB": replace(GOOD, options={"soak_minutes": 20.0}),
}


@pytest.mark.parametrize("words", BROKEN)
def test_what_does_not_hold_is_said(words: str) -> None:
    (said,) = summarize(BROKEN[words]).details["broken"]
    assert words in said
