"""The plan of faults: every failpoint, no more often than asked."""

from __future__ import annotations

from pathlib import Path

from criticalkv.services.chaos.faults import STORE_PLACES, WORKER_PLACES, plan
from criticalkv.shared.failpoints import PLACES, Failpoints

JOURNAL = Path("/nowhere")


def test_every_failpoint_is_used_in_one_kind_of_process() -> None:
    assert not STORE_PLACES.keys() & WORKER_PLACES.keys()
    assert STORE_PLACES.keys() | WORKER_PLACES.keys() == PLACES.keys()


def test_plans_are_what_failpoints_read() -> None:
    for places in (STORE_PLACES, WORKER_PLACES):
        assert Failpoints.parse(plan(places, 0.01, 3, JOURNAL)) is not None


def test_a_place_fails_as_often_as_asked() -> None:
    made = Failpoints.parse(plan({"store.segment.read": ("error", "flip")}, 0.1, 3, JOURNAL))
    assert made is not None
    made._journal = ""
    kinds = [fault.kind for _ in range(20_000) if (fault := made.draw("store.segment.read"))]
    assert 1600 < len(kinds) < 2400
    assert {"error", "flip"} == set(kinds)


def test_without_faults_there_is_no_plan() -> None:
    assert plan(STORE_PLACES, 0.0, 3, JOURNAL) == ""
