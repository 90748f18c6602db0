"""Seeded chaos against the whole service: nothing wrong, nothing late, no silent end.

CRITICALKV_CHAOS_SECONDS sets how long the load lasts; starting and judging come on top.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from criticalkv.services.chaos.command import Options, Outcome, run

SECONDS = float(os.environ.get("CRITICALKV_CHAOS_SECONDS", "300"))
SEED = int(os.environ.get("CRITICALKV_CHAOS_SEED", "7"))
REST_S = 900  # start, the last kill's recovery, the oracle
KILLS_PER_MINUTE = 3.0


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("chaos")
    options = Options(
        requests=None,
        seconds=SECONDS,
        seed=SEED,
        kills_per_minute=KILLS_PER_MINUTE,
        folder=folder,
    )
    found = run(options)
    found.report.write(folder / "chaos.json")
    print(folder, found.report.headline, found.report.details["codes"])
    return found


@pytest.mark.timeout(SECONDS + REST_S)
def test_no_client_sees_anything_wrong(outcome: Outcome) -> None:
    head = outcome.report.headline
    assert outcome.broken == []
    assert (head["wrong"], head["late"], head["silent_ends"]) == (0, 0, 0)


def test_the_run_was_worth_something(outcome: Outcome) -> None:
    details, head = outcome.report.details, outcome.report.headline
    assert details["judged"] >= SECONDS / 2
    assert (head["exempt_share"] or 0) <= 0.02
    assert (head["answered_share"] or 0) >= 0.5
    assert {e.what for e in outcome.history.events} >= ({"prefill"} if SECONDS >= 60 else set())
    assert {f.split()[0] for f in details["faults"]} >= {"store.redis", "client.put.frame"}


def test_the_history_is_on_disk(outcome: Outcome) -> None:
    lines = Path(outcome.history.path).read_text().splitlines()
    assert len(lines) == len(outcome.history.records) + len(outcome.history.events)
