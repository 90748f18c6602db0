"""`n` choices: one decode request, one stream, one retry, one bill."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from criticalkv.services.gateway import choices as choices_module
from criticalkv.services.gateway.choices import BUFFERED, Choices
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.shared.errors import NodeMissingError, OverloadedError, WorkerLostError
from criticalkv.shared.requests import (
    DecodeDelta,
    DecodeEnd,
    DecodeRequest,
    DecodeStart,
    Sampling,
)

ASK = [{"role": "user", "content": "why?"}]
TEXTS = {5: "a", 6: "bcdef", 7: "gh"}


def say(gateway: Any, texts: dict[int, str]) -> None:
    gateway.workers.say = lambda request: texts[request.sampling.seed]


def fail_first_attempt(gateway: Any, **how: Any) -> None:
    """Have the first decode fail as told, and the second one work."""
    workers = gateway.workers
    before = {name: getattr(workers, name) for name in how}

    def set_all(values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(workers, name, value)

    workers.before_decode = [lambda: set_all(how), lambda: set_all(before)]


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def finishes(chunks: list[dict[str, Any]]) -> list[int]:
    ends = [choice for c in chunks for choice in c.get("choices", ()) if choice["finish_reason"]]
    return [choice["index"] for choice in ends]


def texts_of(answer: Any) -> list[str]:
    return [choice["message"]["content"] for choice in answer.json()["choices"]]


# ------------------------------------------------------------- one request


def test_choices_are_branches_of_one_request(gateway: Any) -> None:
    say(gateway, TEXTS)
    answer = gateway.chat(ASK, n=3, seed=5)
    assert texts_of(answer) == ["a", "bcdef", "gh"]
    (request,) = gateway.workers.decodes
    assert (request.sampling.seed, request.branch_seeds) == (5, (6, 7))
    assert request.request_id == answer.json()["id"]


def test_one_choice_has_no_branches(gateway: Any) -> None:
    gateway.chat(ASK)
    assert gateway.workers.decodes[0].branch_seeds == ()


def test_seeds_begin_anew_after_the_largest(gateway: Any) -> None:
    gateway.chat(ASK, n=3, seed=(1 << 63) - 2)
    (request,) = gateway.workers.decodes
    assert (request.sampling.seed, request.branch_seeds) == ((1 << 63) - 2, ((1 << 63) - 1, 0))


def test_the_prompt_is_billed_once_and_every_answer(gateway: Any) -> None:
    say(gateway, TEXTS)
    alone = gateway.chat(ASK, seed=5).json()["usage"]
    usage = gateway.chat(ASK, n=3, seed=5).json()["usage"]
    assert usage["prompt_tokens"] == alone["prompt_tokens"]
    assert usage["completion_tokens"] == len("a" + "bcdef" + "gh")
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    text = gateway.get("/metrics").text
    assert f'tokens_total{{kind="prompt"}} {2.0 * usage["prompt_tokens"]}' in text
    assert 'tokens_total{kind="generated"} 9.0' in text


def test_every_choice_has_its_handle_and_its_node(gateway: Any) -> None:
    say(gateway, TEXTS)
    choices = gateway.chat(ASK, n=3, seed=5).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    extensions = [choice["criticalkv"] for choice in choices]
    assert len({e["handle"] for e in extensions}) == len({e["node_id"] for e in extensions}) == 3
    for extension in extensions:
        context = gateway.get(f"/v1/contexts/{extension['handle']}").json()
        assert context["node_id"] == extension["node_id"]


def test_a_choice_that_ends_early_is_told_and_bound_while_the_others_go_on(gateway: Any) -> None:
    say(gateway, TEXTS)
    gateway.workers.token_delay = 0.1
    stream = gateway.client().chat.completions.create(
        model="tiny", messages=ASK, n=3, seed=5, stream=True
    )
    ended, later = [], []
    for chunk in stream:
        choice = chunk.choices[0]
        if choice.finish_reason:
            ended.append(choice.index)
            handle = chunk.model_extra["criticalkv"]["handle"]
            assert gateway.get(f"/v1/contexts/{handle}").status_code == 200
        elif ended and choice.delta.content:
            later.append(choice.index)
    assert ended == [0, 2, 1]
    assert set(later) == {1, 2}


def test_a_stream_of_choices_is_whole(gateway: Any) -> None:
    say(gateway, TEXTS)
    text = gateway.chat(ASK, n=3, seed=5, stream=True).text
    assert text.endswith("data: [DONE]\n\n")
    chunks, said = events(text), {0: "", 1: "", 2: ""}
    for chunk in chunks:
        choice = chunk["choices"][0]
        said[choice["index"]] += choice["delta"].get("content", "")
    assert list(said.values()) == ["a", "bcdef", "gh"]
    assert sorted(finishes(chunks)) == [0, 1, 2]


# ------------------------------------------------------------------- retry


@pytest.mark.parametrize(
    "how", [{"fail_after": 0, "fail_with": WorkerLostError("died")}, {"cut_after": 0}], ids=str
)
def test_a_worker_lost_before_any_text_is_retried_once_for_all(
    gateway: Any, how: dict[str, Any]
) -> None:
    say(gateway, TEXTS)
    fail_first_attempt(gateway, **how)
    answer = gateway.chat(ASK, n=3, seed=5)
    assert texts_of(answer) == ["a", "bcdef", "gh"]
    first, second = gateway.workers.decodes
    assert first.model_dump(exclude={"deadline_s"}) == second.model_dump(exclude={"deadline_s"})
    assert second.deadline_s < first.deadline_s
    assert answer.json()["usage"]["completion_tokens"] == 8


def test_a_lost_context_is_rebuilt_once_for_all(gateway: Any) -> None:
    doc = [{"role": "user", "content": "d" * 150}]
    gateway.chat(doc, seed=1)
    (node_id,) = gateway.node_ids()
    lost = NodeMissingError.of(node_id, "gone")
    fail_first_attempt(gateway, fail_after=0, fail_with=lost)
    assert gateway.chat(doc, n=3, seed=2).status_code == 200
    assert len(gateway.workers.decodes) == 3
    # A second loss is the end.
    gateway.workers.fail_after, gateway.workers.fail_with = 0, lost
    assert gateway.chat(doc, n=3, seed=3).status_code == 503
    assert len(gateway.workers.decodes) == 5


@pytest.mark.parametrize("how", [{"fail_after": 2}, {"cut_after": 2}], ids=str)
def test_after_a_worker_lost_after_text_each_choice_goes_on_by_itself(
    gateway: Any, how: dict[str, Any]
) -> None:
    say(gateway, TEXTS)
    fail_first_attempt(gateway, fail_with=WorkerLostError("died"), **how)
    text = gateway.chat(ASK, n=3, seed=5, stream=True).text
    assert text.endswith("data: [DONE]\n\n")
    chunks, said = events(text), {0: "", 1: "", 2: ""}
    for chunk in chunks:
        choice = chunk["choices"][0]
        said[choice["index"]] += choice["delta"].get("content", "")
    assert list(said.values()) == ["a", "bcdef", "gh"]
    assert sorted(finishes(chunks)) == [0, 1, 2]
    first, *others = gateway.workers.decodes  # choice 0 was over before, and stays so
    assert first.emitted == ()
    assert [(r.sampling.seed, r.branch_seeds, len(r.emitted)) for r in others] == [
        (6, (), 2),
        (7, (), 2),
    ]
    assert {r.deadline_s < first.deadline_s for r in others} == {True}
    assert gateway.workers.open_decodes == 0


@pytest.mark.parametrize("how", [{"fail_after": 2}, {"cut_after": 2}], ids=str)
def test_workers_lost_again_and_again_end_all_that_still_ran(
    gateway: Any, how: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices_module, "PAUSE_S", 0.01)
    say(gateway, {**TEXTS, 7: "ghijk"})
    gateway.workers.fail_with = WorkerLostError("died")
    for name, value in how.items():
        setattr(gateway.workers, name, value)
    text = gateway.chat(ASK, n=3, seed=5, stream=True).text
    *chunks, last = events(text)
    assert last["error"]["code"] == "worker_lost"
    assert finishes(chunks) == [0]  # it was over before, and stays so
    assert "[DONE]" not in text
    again = Counter(request.sampling.seed for request in gateway.workers.decodes[1:])
    assert max(again.values()) == choices_module.MAX_LOST_WORKERS
    handle = chunks[0]["id"]
    assert gateway.get(f"/v1/contexts/{handle}").status_code == 200
    others = [c["choices"][0]["criticalkv"]["handle"] for c in chunks[1:3]]
    assert {gateway.get(f"/v1/contexts/{h}").status_code for h in others} == {404}
    assert gateway.chat(ASK, n=3, seed=5).status_code == 503
    assert gateway.workers.open_decodes == 0


def test_an_empty_answer_counts_as_told(gateway: Any) -> None:
    # Tried again, its choice would be answered twice.
    say(gateway, {5: "", 6: "bc"})
    fail_first_attempt(gateway, fail_after=0, fail_with=WorkerLostError("died"))
    chunks = events(gateway.chat(ASK, n=2, seed=5, stream=True).text)
    assert finishes(chunks) == [0, 1]
    assert [r.sampling.seed for r in gateway.workers.decodes] == [5, 6]


def test_a_context_lost_in_the_middle_is_rebuilt_and_the_told_view_kept(gateway: Any) -> None:
    doc = [{"role": "user", "content": "d" * 150}]
    gateway.chat(doc, seed=1)
    (node_id,) = gateway.node_ids()
    say(gateway, {2: "abcdef"})
    lost = NodeMissingError.of(node_id, "gone")
    fail_first_attempt(gateway, fail_after=3, fail_with=WorkerLostError("died"))
    gateway.workers.before_decode.insert(1, lambda: gateway.workers.fail_decode.append(lost))
    assert texts_of(gateway.chat(doc, seed=2)) == ["abcdef"]
    first, *others = gateway.workers.decodes[1:]
    assert [len(r.emitted) for r in others] == [3, 3]
    assert {r.view for r in others} == {first.view}


def test_a_full_replica_is_asked_again_to_go_on(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices_module, "PAUSE_S", 0.01)
    say(gateway, {5: "abcdef"})
    fail_first_attempt(gateway, fail_after=3, fail_with=WorkerLostError("died"))
    full = OverloadedError("full", retry_after_s=0.05)
    gateway.workers.before_decode.insert(1, lambda: gateway.workers.fail_decode.append(full))
    assert texts_of(gateway.chat(ASK, seed=5)) == ["abcdef"]
    assert [len(r.emitted) for r in gateway.workers.decodes] == [0, 3, 3]
    # A new answer is refused at once: the client can wait as well.
    gateway.workers.fail_decode = [full]
    assert gateway.chat(ASK, seed=5).status_code == 429


def test_the_deadline_holds_for_all_attempts(
    make_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices_module, "MAX_LOST_WORKERS", 10**6)
    monkeypatch.setattr(choices_module, "PAUSE_S", 0.05)
    gateway = make_gateway(request_timeout_s=1.5)
    gateway.workers.cut_after = 2
    began = time.monotonic()
    *_, last = events(gateway.chat(ASK, stream=True).text)
    assert last["error"]["code"] == "deadline_exceeded"
    assert time.monotonic() - began < 15


# ------------------------------------------------------------------ stream


START = DecodeStart(
    replica="r", bytes_pulled=0, cached_tokens=0, tier="1", retained_fraction=1.0, store_ms=0.0
)
REQUEST = DecodeRequest(
    request_id="r", token_ids=(1,), salt="0" * 64, sampling=Sampling(max_tokens=9)
)
END = DecodeEnd(finish_reason="stop", prompt_tokens=1, completion_tokens=2, node_id=None)


class Decoding:
    """Yields what it is given, a little apart, and notes how far it came."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.told = 0
        self.closed = False

    async def decode(self, _: DecodeRequest) -> AsyncGenerator[Any, None]:
        try:
            for event in self.events:
                await asyncio.sleep(0.002)
                self.told += 1
                yield event
        finally:
            self.closed = True


def choices(workers: Decoding) -> Choices:
    plan, planner = SimpleNamespace(parent=None), SimpleNamespace()
    return Choices(workers, planner, plan, lambda _: REQUEST, Deadline.after(5))  # type: ignore[arg-type]


async def test_a_late_reader_does_not_change_when_tokens_came() -> None:
    running = choices(Decoding([START, DecodeDelta(text="a"), DecodeDelta(text="b"), END]))
    times = []
    for _ in range(4):
        times.append((await running.next())[1])
        await asyncio.sleep(0.1)
    await running.aclose()
    assert 0.002 <= times[2] - times[1] < 0.09


async def test_a_reader_that_does_not_read_lets_the_worker_wait_and_close_ends_it() -> None:
    workers = Decoding([START, *[DecodeDelta(text="a")] * 1000])
    running = choices(workers)
    await running.next()
    await asyncio.sleep(0.5)
    assert workers.told <= BUFFERED + 3
    assert not workers.closed
    await running.aclose()
    assert workers.closed
