"""A running service answers as this process does, cell by cell."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from near_ties import TOLERANCE, noting_margins
from whole_service import Service, of_its_own

from criticalkv.services.decode.sampling import Sampler
from criticalkv.services.evaluation.answer import FULL_CELL, Answer, Answers, Cell, History
from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.local_answerer import LocalAnswerer
from criticalkv.services.evaluation.prompt import Setting
from criticalkv.services.evaluation.service_answerer import (
    Reply,
    ServiceAnswerer,
    same_context,
)
from criticalkv.services.store.process import StoreProcess
from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.errors import (
    ContextLengthError,
    CriticalKVError,
    DeadlineError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PolicyError,
    StoreUnavailableError,
)
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.loader import LoadedModel

CELLS = (FULL_CELL, Cell("snapkv", "0.2"), Cell("snapkv", "0.4"), Cell("default", "0.1"))
Factory = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def model(tiny_model: Factory) -> LoadedModel:
    return of_its_own(tiny_model())


@pytest.fixture
def service(model: LoadedModel, store_process: StoreProcess) -> Iterator[Service]:
    # A provisional policy must not change what is measured.
    eviction = EvictionConfig(first_policy="knorm")
    running = Service(model, store_process, eviction, decode_max_suffix_tokens=512)
    yield running
    running.close()


def example(name: str, *, turns: int = 1, prefix: str = "") -> Example:
    """Lines of numbers, no two examples with the same, and questions about them."""
    context = "".join(f"{name} {i}: {i * 7919 % 1000}. " for i in range(12))
    questions = tuple(
        Question(f" What is {i}?", (str(i * 7919 % 1000), "so"), "string_match_all", 9, prefix)
        for i in range(turns)
    )
    return Example("numbers", name, context, questions)


def asking(service: Service, **fields: Any) -> ServiceAnswerer:
    return ServiceAnswerer(service.url, "none", **fields)


def collect(answerer: Any, item: Example, cells: tuple[Cell, ...] = CELLS) -> dict[Cell, Answers]:
    answerer.check(cells)
    found = dict(answerer.answer(item, cells))
    assert set(found) == set(cells)
    return found


@pytest.mark.parametrize("prefix", ["", " It is"])
@pytest.mark.parametrize(
    ("setting", "history", "turns"),
    [
        ("context-only", "model", 3),
        ("context-only", "gold", 3),
        ("context-only", "none", 2),
        ("context+question", "model", 2),
        ("context+question", "gold", 2),
        ("context+question", "none", 2),
    ],
)
def test_it_answers_as_this_process_does(
    service: Service,
    model: LoadedModel,
    setting: Setting,
    history: History,
    turns: int,
    prefix: str,
) -> None:
    item = example(f"{setting} {history}{prefix}", turns=turns, prefix=prefix)
    how: dict[str, Any] = {"setting": setting, "history": history}
    with closing(LocalAnswerer(model, kl=False, **how)) as local, noting_margins() as margins:
        expected = collect(local, item)
    with closing(asking(service, **how)) as answerer:
        found = collect(answerer, item)
    for cell in CELLS:
        assert len(found[cell]) == turns
        for one, other in zip(found[cell], expected[cell], strict=True):
            assert (one.tier, one.kept, one.kept_bytes) == (cell.tier, other.kept, other.kept_bytes)
            same = (one.text, one.finish_reason) == (other.text, other.finish_reason)
            assert same or min(margins) < TOLERANCE, cell
    assert len({tuple(a.text for a in answers) for answers in found.values()}) > 1


def test_a_context_is_prefilled_once_for_a_policy_and_under_no_other(service: Service) -> None:
    item = example("once", turns=2)
    with closing(asking(service, concurrency=8)) as answerer:
        found = collect(answerer, item)
        collect(answerer, item)
    assert found[FULL_CELL][0].kept == 1
    prefills = [(p.policy, p.store_tier) for p in service.workers.prefills]
    expected = {"streamingllm": "1", "snapkv": "0.4", "default": "0.1"}
    assert sorted(prefills) == sorted(
        (Policy.parse(name).canonical(), tier) for name, tier in expected.items()
    )
    assert {d.policy for d in service.workers.decodes} == {"dense"}


def test_a_policys_first_request_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []

    async def ask(_: Any, __: Example, ___: int, asking: Any, ____: Any) -> Reply:
        events.append((asking.cell.policy, "begins"))
        await asyncio.sleep(0)
        events.append((asking.cell.policy, "ends"))
        return Reply(Answer("a", "stop", asking.read_tier, 0.2, 100), "resp", True)

    monkeypatch.setattr(ServiceAnswerer, "_ask", ask)
    cells = (*CELLS, Cell("snapkv", "0.1"), Cell("default", "0.2"))
    with closing(ServiceAnswerer("http://127.0.0.1:9/v1", "none", "m")) as answerer:
        assert len(dict(answerer.answer(example("alone"), cells))) == len(cells)
    for policy in ("snapkv", "default"):
        own = [what for name, what in events if name == policy]
        assert own[:2] == ["begins", "ends"]
        assert len(own) == 2 * sum(cell.policy == policy for cell in cells)


def test_the_tier_that_was_read_is_told(service: Service) -> None:
    low, high = Cell("snapkv", "0.25"), Cell("snapkv", "0.6")
    with closing(asking(service)) as answerer:
        found = collect(answerer, example("tiers", turns=2), (low, high))
    assert [answer.tier for answer in found[low]] == ["0.2"] * 2
    assert [answer.tier for answer in found[high]] == ["0.6"] * 2
    assert found[low][0].kept < found[high][0].kept < 0.7
    assert found[low][0].kept_bytes < found[high][0].kept_bytes


def test_right_answers_never_stand_for_an_answer_at_another_tier(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored turn that says the same is found by its text, whatever tier it read."""
    item, cells = example("alias", turns=2), (Cell("snapkv", "0.4"), Cell("snapkv", "0.1"))
    right = replace(item.questions[0], references=("a" * 9,))
    item = replace(item, questions=(right, *item.questions[1:]))
    monkeypatch.setattr(Sampler, "pick", lambda *_: 64)
    with closing(asking(service)) as answerer:
        assert collect(answerer, item, cells[:1])[cells[0]][0].text == "a" * 9
    with closing(asking(service, history="gold")) as answerer:
        collect(answerer, item, cells[1:])
    [context] = service.workers.prefills
    parents = [decode.parent for decode in service.workers.decodes]
    assert parents[2:] == [context.node_id] * 2


def test_a_full_service_is_asked_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, refused = service.workers.decode, []

    def full(request: Any) -> Any:
        if len(refused) < 2:
            refused.append(request)
            raise OverloadedError("full", retry_after_s=0.01)
        return decode(request)

    monkeypatch.setattr(service.workers, "decode", full)
    with closing(asking(service)) as answerer:
        assert collect(answerer, example("full"), CELLS[:1])
    assert len(refused) == 2


def test_a_failure_keeps_its_type_and_names_its_cell(service: Service) -> None:
    long = replace(example("long"), context="x" * 3000)
    with closing(asking(service)) as answerer:
        with pytest.raises(ContextLengthError, match=r"question 1 under snapkv at tier 0\.2: "):
            list(answerer.answer(long, CELLS[1:2]))
        assert collect(answerer, example("good"), CELLS[1:2])


def test_a_later_turn_does_not_go_on_from_one_that_was_not_stored(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = service.workers.decoder

    def lost(*_: Any) -> Any:
        raise StoreUnavailableError("gone")

    monkeypatch.setattr(engine._publication, "publish", lost)
    with closing(asking(service)) as answerer:
        assert collect(answerer, example("lost"), CELLS[:1])
        with pytest.raises(CriticalKVError, match=r"question 2 under full at tier 1: .*not store"):
            collect(answerer, example("lost twice", turns=2), CELLS[:1])


def test_a_context_that_changes_its_tier_is_no_conversation() -> None:
    answer = Answer("a", "stop", "0.2", 0.2, 100)
    later = Reply(replace(answer, tier="0.1", kept=0.3, kept_bytes=150), "resp", True)
    with pytest.raises(CriticalKVError, match=r"q: read at tier 0\.1, before at 0\.2"):
        same_context("q", later, answer)
    same = replace(later, answer=replace(later.answer, tier="0.2"))
    assert same_context("q", same, answer).answer == answer


def test_who_does_not_answer_is_given_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    async def hang(request: Any) -> Any:
        try:
            await asyncio.sleep(60)
            yield request
        finally:
            ended.set()

    monkeypatch.setattr(service.workers, "decode", hang)
    late = pytest.raises(DeadlineError, match=r"question 1 under full at tier 1: no answer")
    with closing(asking(service, timeout_s=0.5)) as answerer, late:
        list(answerer.answer(example("slow"), CELLS[:2]))
    assert ended.wait(30), "the request goes on"


def test_who_stops_listening_ends_the_requests(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, ended = service.workers.decode, threading.Event()

    async def hang(request: Any) -> Any:
        if request.view == ("1",):
            async for event in decode(request):
                yield event
            return
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    monkeypatch.setattr(service.workers, "decode", hang)
    with closing(asking(service)) as answerer:
        answers = answerer.answer(example("leave"), CELLS[:2])
        assert next(answers)[0] == FULL_CELL
        answers.close()
        assert ended.wait(30), "the request goes on"


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        (Cell("best", "0.2"), PolicyError),
        (Cell("snapkv", "2"), InvalidRequestError),
        (Cell("full", "0.5"), InvalidRequestError),
        (Cell("h2o:interval=16,target=16", "0.5"), InvalidRequestError),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_refused_before_anything_is(
    service: Service, cell: Cell, error: type[Exception]
) -> None:
    with closing(asking(service)) as answerer, pytest.raises(error):
        answerer.check((FULL_CELL, cell))
    assert service.workers.decodes == []


def test_the_service_must_be_there_and_serve_the_model(service: Service) -> None:
    other = asking(service, model="other")
    with closing(other), pytest.raises(ModelNotFoundError, match=f"{service.model}, not other"):
        other.check(CELLS)
    gone = ServiceAnswerer("http://127.0.0.1:9/v1", "none")
    with closing(gone), pytest.raises(CriticalKVError, match="cannot reach the service"):
        gone.check(CELLS)
