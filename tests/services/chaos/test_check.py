"""The checker finds what is planted in a history, and nothing in a good one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from criticalkv.services.chaos.check import Findings, Verdict, check
from criticalkv.services.chaos.history import Ask, Event, History, Record, Turn, read

ASK = Ask(0, "default", "handle", Turn("Which one?", 6), read_tier="0.4", min_tier="0.1")
SAMPLED = replace(ASK, sampling="temperature=1.1 seed=1")
EMPTIED = Event("valkey", 50.0, 52.0)

Judge = Callable[[Record], Verdict]


def record(**fields: Any) -> Record:
    """A good, whole answer, unless `fields` say otherwise."""
    good = Record(
        id=0,
        client=0,
        tenant="north",
        kind="chat",
        expects="answer",
        start=1.0,
        end=2.0,
        status=200,
        complete=True,
        finish="length",
        text="abc",
        tier="0.4",
        handle="resp_1",
        published=True,
        cached=100,
        born=0.5,
        ask=ASK,
    )
    return replace(good, **fields)


def stream(**fields: Any) -> Record:
    return record(**{"stream": True, "complete": False, "done": True, **fields})


def error(status: int, code: str, **fields: Any) -> Record:
    none = {"text": "", "tier": "", "handle": "", "finish": "", "published": False}
    return record(**{**none, "status": status, "code": code, **fields})


def judged(
    *records: Record, events: tuple[Event, ...] = (), judge: Judge = lambda _: Verdict()
) -> Findings:
    numbered = [replace(one, id=number) for number, one in enumerate(records)]
    return check(numbered, events, judge, deadline_s=30, margin_s=3)


GOOD = {
    "an answer": record(),
    "a stream": stream(),
    "a cut stream": stream(done=False, finish="", cut=True),
    "an error event": stream(done=False, code="store_unavailable", event=True),
    "overload": error(429, "overloaded", retry_after=True),
    "a store away": error(503, "store_unavailable", retry_after=True),
    "a deadline": error(504, "deadline_exceeded"),
    "a refusal": error(400, "invalid_request", expects="refused"),
    "a wrong key": error(401, "invalid_api_key", expects="refused"),
    "a refusal while overloaded": error(429, "overloaded", expects="refused", retry_after=True),
    "a foreign handle": error(404, "context_not_found", expects="foreign"),
    "a deleted handle": error(404, "context_not_found", expects="gone"),
    "a list": record(expects="ok", ask=None, tier="", finish="", text=""),
    "a pin without KV": error(404, "context_expired", expects="pin", ask=None),
    "no foreign tokens": record(most_cached=0, cached=0),
    "an idempotency conflict": error(409, "idempotency_key_reused", group="k"),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_is_not_found(name: str) -> None:
    assert judged(GOOD[name]).broken == []


def test_a_handle_may_be_lost_with_redis_memory_only() -> None:
    lost = error(404, "context_not_found", born=10.0, start=60.0, end=61.0)
    assert judged(lost, events=(EMPTIED,)).broken == []
    assert judged(replace(lost, born=51.0), events=(EMPTIED,)).count("wrong") == 1
    assert judged(lost).count("wrong") == 1
    assert judged(lost, events=(replace(EMPTIED, what="store"),)).count("wrong") == 1


ENDED = {
    "a cancelled stream": stream(done=False, code="cancelled", event=True),
    "a lost worker": error(503, "worker_lost", retry_after=True),
    "a worker lost in a stream": stream(done=False, code="worker_lost", event=True),
}


@pytest.mark.parametrize("name", ENDED)
def test_a_request_is_ended_only_near_a_kill(name: str) -> None:
    one = replace(ENDED[name], start=60.0, end=61.0)
    killed = Event("decode", 58.0, 60.5)
    assert judged(one).count("wrong") == 1
    assert judged(one, events=(killed,)).broken == []
    assert judged(one, events=(replace(killed, until=None),)).broken == []
    assert judged(one, events=(Event("store", 60.5, 60.5, by="failpoint"),)).broken == []
    for far in (Event("decode", 30.0, 40.0), Event("decode", 62.0, 70.0)):
        assert judged(one, events=(far,)).count("wrong") == 1
    memory = Event("memory", 58.0, 60.5, by="maxmemory")
    assert judged(one, events=(memory,)).count("wrong") == 1


BAD: dict[str, tuple[str, Record]] = {
    "late": ("late", record(end=34.1)),
    "a late error": ("late", error(504, "deadline_exceeded", end=40.0)),
    "a stream without an end": ("silent", stream(done=False, finish="")),
    "finish_reason without [DONE]": ("silent", stream(done=False)),
    "[DONE] without finish_reason": ("silent", stream(finish="")),
    "[DONE] after an error": ("silent", stream(code="store_unavailable", event=True)),
    "half a body": ("silent", record(complete=False)),
    "an error without a body": ("silent", error(503, "", complete=False, retry_after=True)),
    "a broken connection": ("silent", record(transport="ReadError", complete=False)),
    "no answer at all": ("silent", record(status=0, transport="ReadTimeout", complete=False)),
    "500": ("wrong", error(500, "internal_error")),
    "an internal error event": ("wrong", stream(done=False, code="internal_error", event=True)),
    "an unknown error": ("wrong", error(503, "made_up", retry_after=True)),
    "an error of somebody else": ("wrong", error(500, "none")),
    "no Retry-After": ("wrong", error(503, "store_unavailable")),
    "429 without Retry-After": ("wrong", error(429, "overloaded")),
    "a good request refused": ("wrong", error(400, "invalid_request")),
    "a bad request accepted": ("wrong", record(expects="refused", ask=None)),
    "a bad request breaks the server": ("wrong", error(500, "internal_error", expects="refused")),
    "a refusal without a code": ("wrong", error(400, "", expects="refused")),
    "a foreign hit": ("wrong", record(expects="foreign", ask=None)),
    "a foreign handle told apart": ("wrong", error(403, "forbidden", expects="foreign")),
    "a deleted handle lives": ("wrong", record(expects="gone", ask=None)),
    "foreign tokens": ("wrong", record(most_cached=0, cached=7)),
    "a higher tier than asked": ("wrong", record(tier="0.6")),
    "a lower tier than allowed": ("wrong", record(tier="0.05")),
    "a conflict without a key": ("wrong", error(409, "idempotency_key_reused")),
    "a chat whose KV is said to be gone": ("wrong", error(404, "context_expired")),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_planted_is_found(name: str) -> None:
    rule, planted = BAD[name]
    findings = judged(record(), planted, record())
    assert {(f.rule, f.record) for f in findings.broken} == {(rule, 1)}
    assert findings.count(rule) == 1


def test_the_judge_is_asked_about_every_greedy_answer() -> None:
    asked: list[int] = []

    def judge(one: Record) -> Verdict:
        asked.append(one.id)
        return Verdict(wrong="other") if one.id == 1 else Verdict()

    cut = stream(done=False, finish="", cut=True)
    broken = stream(done=False, code="store_unavailable", event=True)
    others = (record(ask=None), record(ask=SAMPLED), error(503, "store_full", retry_after=True))
    findings = judged(record(), record(), cut, broken, *others, judge=judge)
    assert asked == [0, 1, 2, 3]
    assert [(f.rule, f.record) for f in findings.broken] == [("wrong", 1)]
    assert findings.judged == 4


def test_exemptions_are_counted_by_reason() -> None:
    findings = judged(record(), record(), judge=lambda _: Verdict(exempt="near-tie"))
    assert (findings.judged, findings.exempt) == (0, {"near-tie": 2})


@pytest.mark.parametrize("other", [{"text": "xyz"}, {"handle": "resp_2"}])
def test_a_retry_must_get_the_same(other: dict[str, Any]) -> None:
    first = record(group="k", ask=SAMPLED, tier="0.1")
    again = replace(first, start=3.0, end=4.0, tier="0.2", **other)
    assert judged(first, replace(first, start=3.0, end=4.0)).broken == []
    assert [f.record for f in judged(first, again).broken] == [1]
    assert judged(first, replace(again, group="l")).broken == []
    between = (Event("valkey", 2.5, 2.6),)
    assert judged(first, again, events=between).broken == []
    assert judged(first, again, events=(EMPTIED,)).count("wrong") == 1


def test_a_failed_attempt_is_no_answer_of_its_key() -> None:
    first = error(503, "store_unavailable", group="k", retry_after=True)
    assert judged(first, record(group="k")).broken == []


def test_one_seed_draws_one_answer_per_tier() -> None:
    one = record(ask=SAMPLED)
    other = replace(one, text="xyz")
    assert [f.record for f in judged(one, other).broken] == [1]
    assert judged(one, replace(other, tier="0.2")).broken == []
    before = (Turn("Which one?", 6, "0.4", "abc"),)
    for change in ({"sampling": "temperature=1.1 seed=2"}, {"stop": "z"}, {"before": before}):
        assert judged(one, replace(other, ask=replace(SAMPLED, **change))).broken == [], change


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    kept = History(tmp_path / "history.jsonl")
    later = replace(ASK, before=(Turn("Which one?", 6, "0.4", "abc"),))
    records = [kept.add(record(text="1")), kept.add(stream(ask=later)), kept.add(record(ask=None))]
    kept.happened(EMPTIED)
    kept.close()
    assert [r.id for r in records] == [0, 1, 2]
    assert read(kept.path) == (records, [EMPTIED])
