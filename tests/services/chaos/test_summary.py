"""The report says in words what does not hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from criticalkv.services.chaos.check import Finding, Findings
from criticalkv.services.chaos.history import Event, Record
from criticalkv.services.chaos.limits import compared
from criticalkv.services.chaos.slope import Slope
from criticalkv.services.chaos.summary import Measured, summarize

OPEN = {
    "descriptors": {"store:1": 14, "gateway:2": 70, "valkey:3": 9, "decode:4": 60},
    "connections": 2,
}
CLEAN = {"segments": 0, "bytes": 0, "books_differ_by": 0, "seconds": 0.1}
FREE = {"decode running": 0.0, "decode waiting": 0.0, "store running calls": 0.0}
ANSWER = Record(0, 0, "north", "chat", "answer", 1.0, 2.0, 200, complete=True)
AWAY = replace(ANSWER, status=503, code="store_unavailable")
REFUSED = replace(ANSWER, expects="refused", status=400, code="invalid_request")
KILLS = [
    Event("prefill", 30.0, 39.0),
    Event("decode", 60.0, 63.0),
    Event("store", 90.0, 91.0),
    Event("valkey", 120.0, 121.0),
    Event("store", 130.0, 130.0, by="failpoint"),
]
GOOD = Measured(
    options={"soak_minutes": 0.0, "store_faults": 0.01, "kills_per_minute": 2.0},
    settings={},
    records=[ANSWER] * 280 + [AWAY] * 70 + [REFUSED] * 50,
    events=KILLS,
    findings=Findings(judged=250, exempt={"near-tie": 5}),
    condition={"before": OPEN, "after": OPEN, "occupied": FREE, "left_over": CLEAN},
    idle_after_s=0.1,
    load_s=150.0,
    paced_per_s=None,
    faults={"store.redis error": 2, "client.call error": 1},
    memory={},
    memory_per_minute={"store:1": [60.0, None, 61.5]},
    valkey_data_per_request=2048.5,
    slopes={"store:1": Slope(500.0, 400.0, 600.0)},
)
CALM = replace(
    GOOD,
    options={"soak_minutes": 20.0, "store_faults": 0.01, "kills_per_minute": 2.0},
    records=[ANSWER] * 999 + [AWAY],
    findings=Findings(judged=900),
    events=[],
    faults={},
    slopes={"store:1": Slope(2.0, 1.0, 3.0)},
)
NOTHING = {"soak_minutes": 0.0, "store_faults": 0.0, "kills_per_minute": 0.0}


def with_condition(**changes: Any) -> Measured:
    return replace(GOOD, condition={**GOOD.condition, **changes})


def with_descriptors(**changes: int) -> Measured:
    names = {name.replace("_", ":"): count for name, count in changes.items()}
    return with_condition(after={**OPEN, "descriptors": {**OPEN["descriptors"], **names}})  # type: ignore[dict-item]


def with_finding(rule: str) -> Measured:
    return replace(GOOD, findings=Findings([Finding(rule, "because", 1)], judged=250))


def said(measured: Measured) -> list[str]:
    found: list[str] = summarize(measured).details["broken"]
    return found


def test_a_good_run(tmp_path: Path) -> None:
    report = summarize(GOOD)
    assert report.details["broken"] == []
    assert report.headline["slowest_recovery_s"] == 9.0
    assert report.headline["recovery_goal_met"] == 1.0
    assert (report.headline["requests"], report.quick) == (400, True)
    assert report.headline["answered_share"] == 0.8
    assert report.headline["temporary_share"] == 0.175
    assert report.details["memory_per_minute"] == {"store:1": [60.0, None, 61.5]}
    assert report.details["valkey_data_bytes_per_request"] == 2048.5
    report.write(tmp_path / "chaos.json")


def test_a_good_soak() -> None:
    assert said(CALM) == []
    assert said(replace(CALM, options=NOTHING)) == []
    assert summarize(CALM).headline["recovery_goal_met"] is None


def test_a_goal_that_is_missed_is_said_and_breaks_nothing() -> None:
    report = summarize(replace(GOOD, events=[*KILLS, Event("prefill", 140.0, 152.0)]))
    assert report.details["broken"] == []
    assert report.headline["recovery_goal_met"] == 0.0


BROKEN: dict[str, Measured] = {
    "1 wrong; the first: request 1, because": with_finding("wrong"),
    "1 late; the first": with_finding("late"),
    "1 silent_ends; the first": with_finding("silent"),
    "in flight for longer": replace(GOOD, idle_after_s=None),
    "in flight for longer than 2 s": replace(GOOD, idle_after_s=2.5),
    "left over after": with_condition(left_over={**CLEAN, "bytes": 9}),
    "'books_differ_by': -9": with_condition(left_over={**CLEAN, "books_differ_by": -9}),
    "connections to Redis grew by 17": with_condition(after={**OPEN, "connections": 19}),
    "descriptors of store:1 grew by 9": with_descriptors(store_1=23),
    "descriptors of gateway:2 grew by 40": with_descriptors(gateway_2=110),
    "of no process could be compared": with_condition(
        after={**OPEN, "descriptors": {"store:9": 14, "valkey:3": 9}}
    ),
    "decode running is still 1": with_condition(occupied={**FREE, "decode running": 1.0}),
    "decode waiting is still 2": with_condition(occupied={**FREE, "decode waiting": 2.0}),
    "store running calls is still 3": with_condition(occupied={**FREE, "store running calls": 3.0}),
    "did not come back after valkey": replace(GOOD, events=[*KILLS, Event("valkey", 5.0)]),
    "came back 31.0 s after decode": replace(GOOD, events=[*KILLS, Event("decode", 5.0, 36.0)]),
    "store:1 grows by 500.0 MiB": replace(CALM, slopes=GOOD.slopes),
    "0.024 of the answers could not be judged": replace(
        GOOD, findings=Findings(judged=200, exempt={"near-tie": 5})
    ),
    "only 79 answers of 400 requests": replace(GOOD, findings=Findings(judged=79)),
    "only 0.495 of the valid requests": replace(GOOD, records=[ANSWER] * 99 + [AWAY] * 101),
    "only 0.985 of the valid requests": replace(
        CALM, records=[ANSWER] * 985 + [replace(REFUSED, expects="answer")] * 15
    ),
    "0.020 of the requests got a temporary error": replace(
        CALM, records=[ANSWER] * 980 + [replace(AWAY, expects="ok")] * 20
    ),
    "prefill was never killed": replace(GOOD, events=KILLS[1:]),
    "decode was never killed": replace(GOOD, events=[KILLS[0], *KILLS[2:]]),
    "store was never killed": replace(GOOD, events=[*KILLS[:2], *KILLS[3:]]),
    "valkey was never killed": replace(GOOD, events=[*KILLS[:3], KILLS[4]]),
    "no failpoint of the store was hit": replace(GOOD, faults={"client.call error": 1}),
    "no failpoint of the replicas was hit": replace(GOOD, faults={"store.redis error": 1}),
}


@pytest.mark.parametrize("words", BROKEN)
def test_what_does_not_hold_is_said(words: str) -> None:
    (one,) = said(BROKEN[words])
    assert words in one


def test_a_service_that_never_answers_is_broken() -> None:
    found = said(
        replace(
            GOOD,
            records=[AWAY] * 10_000,
            findings=Findings(judged=0, exempt={"near-tie": 9000}),
            events=[Event("store", 1.0, 100.0)],
            faults={},
        )
    )
    for words in (
        "only 0 answers of 10000",
        "1.000 of the answers",
        "only 0.000 of the valid",
        "99.0 s after store",
        "prefill was never",
        "of the store was hit",
        "of the replicas was hit",
    ):
        assert any(words in one for one in found), words


def test_a_run_without_requests_is_broken() -> None:
    empty = replace(GOOD, records=[], findings=Findings(), load_s=1.0, events=[], faults={})
    assert len(said(empty)) == 2


def test_a_short_run_need_not_kill_all() -> None:
    """Whose turn may not have come, if recoveries are slow, is not asked for."""
    assert said(replace(GOOD, load_s=70.0, events=KILLS[:2])) == []
    assert said(replace(GOOD, load_s=70.0, events=KILLS[:1])) == ["decode was never killed"]
    assert said(replace(GOOD, load_s=20.0, events=[])) == []


def test_within_a_handful_nothing_has_leaked() -> None:
    assert said(with_descriptors(store_1=22, gateway_2=78, valkey_3=25)) == []
    assert said(with_condition(after={**OPEN, "connections": 18})) == []


def test_what_was_restarted_or_says_nothing_is_not_judged_and_said() -> None:
    after = {**OPEN, "descriptors": {"store:9": 900, "gateway:2": 70, "valkey:8": 9}}
    report = summarize(with_condition(after=after, occupied={**FREE, "decode running": None}))
    assert report.details["broken"] == []
    assert report.details["not_judged"] == ["descriptors of store:9", "decode running"]
    assert compared(OPEN, after) == ["gateway:2"]
