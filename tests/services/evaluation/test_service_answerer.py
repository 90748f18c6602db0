"""A running service answers as this process does, cell by cell."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pytest
from near_ties import TOLERANCE, noting_margins
from openai import APIConnectionError
from openai.resources.chat import AsyncCompletions
from openai.types.chat import ChatCompletion
from whole_service import Service, of_its_own

from criticalkv.services.decode.sampling import Sampler
from criticalkv.services.evaluation import loop_thread
from criticalkv.services.evaluation.answer import FULL_CELL, Answer, Answers, Cell, History
from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.failure import bounded
from criticalkv.services.evaluation.local_answerer import LocalAnswerer
from criticalkv.services.evaluation.loop_thread import LoopThread
from criticalkv.services.evaluation.prompt import Setting
from criticalkv.services.evaluation.service_answerer import (
    Reply,
    ServiceAnswerer,
    same_context,
)
from criticalkv.services.store.process import StoreProcess
from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.errors import (
    ConfigError,
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
IT_IS = " It is"
TWICE = ("", "")
NOBODY = "http://127.0.0.1:9/v1"
LONG_S = 60
Factory = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def model(tiny_model: Factory) -> LoadedModel:
    return of_its_own(tiny_model())


@pytest.fixture(scope="module")
def running(model: LoadedModel, store_process: StoreProcess) -> Iterator[Service]:
    # A provisional policy must not change what is measured.
    eviction = EvictionConfig(first_policy="knorm")
    service = Service(model, store_process, eviction, decode_max_suffix_tokens=512)
    yield service
    service.close()


@pytest.fixture
def service(running: Service) -> Service:
    """The module's; no test finds what another has asked."""
    running.workers.prefills.clear()
    running.workers.decodes.clear()
    return running


def example(name: str, prefixes: Sequence[str] = ("",)) -> Example:
    """Lines of numbers, no two examples with the same, and a question for each prefix."""
    context = "".join(f"{name} {i}: {i * 7919 % 1000}. " for i in range(12))
    questions = tuple(
        Question(f" What is {i}?", (str(i * 7919 % 1000), "so"), "string_match_all", 9, prefix)
        for i, prefix in enumerate(prefixes)
    )
    return Example("numbers", name, context, questions)


def asking(service: Service, **fields: Any) -> ServiceAnswerer:
    return ServiceAnswerer(service.url, "none", **{"model": service.model, **fields})


def collect(answerer: Any, item: Example, cells: tuple[Cell, ...] = CELLS) -> dict[Cell, Answers]:
    answerer.check(cells)
    found = dict(answerer.answer(item, cells))
    assert set(found) == set(cells)
    return found


@pytest.mark.parametrize(
    ("setting", "history", "prefixes"),
    [
        ("context-only", "model", ("", IT_IS, "")),
        ("context-only", "gold", (IT_IS, "", IT_IS)),
        ("context-only", "none", ("", IT_IS)),
        ("context+question", "model", (IT_IS, "")),
        ("context+question", "gold", ("", IT_IS)),
        ("context+question", "none", (IT_IS, "")),
    ],
)
def test_it_answers_as_this_process_does(
    service: Service,
    model: LoadedModel,
    setting: Setting,
    history: History,
    prefixes: tuple[str, ...],
) -> None:
    item = example(f"{setting} {history}", prefixes)
    how: dict[str, Any] = {"setting": setting, "history": history}
    with closing(LocalAnswerer(model, kl=False, **how)) as local, noting_margins() as margins:
        expected = collect(local, item)
    with closing(asking(service, **how)) as answerer:
        found = collect(answerer, item)
    for cell in CELLS:
        assert len(found[cell]) == len(prefixes)
        for one, other in zip(found[cell], expected[cell], strict=True):
            assert (one.tier, one.kept, one.kept_bytes) == (cell.tier, other.kept, other.kept_bytes)
            same = (one.text, one.finish_reason) == (other.text, other.finish_reason)
            assert same or min(margins) < TOLERANCE, cell
    assert len({tuple(a.text for a in answers) for answers in found.values()}) > 1


def test_a_context_is_prefilled_once_for_a_policy_and_under_no_other(service: Service) -> None:
    item = example("once", TWICE)
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
    cells = (*CELLS, Cell("snapkv", "0.1"), Cell("default", "0.2"))
    events: list[tuple[str, str]] = []
    start, left = LoopThread.start, [*cells]

    async def ask(_: Any, __: Example, ___: int, asking: Any, ____: Any) -> Reply:
        events.append((asking.cell.policy, "begins"))
        async with asyncio.timeout(LONG_S):
            while left:  # whoever would not wait begins before this ends
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        events.append((asking.cell.policy, "ends"))
        return Reply(Answer("a", "stop", asking.read_tier, 0.2, 100), "resp", True)

    def counted(self: LoopThread, work: Any) -> Any:
        future = start(self, work)
        del left[:1]
        return future

    monkeypatch.setattr(ServiceAnswerer, "_ask", ask)
    monkeypatch.setattr(LoopThread, "start", counted)
    with closing(ServiceAnswerer(NOBODY, "none", "m")) as answerer:
        assert len(dict(answerer.answer(example("alone"), cells))) == len(cells)
    for policy in ("snapkv", "default"):
        own = [what for name, what in events if name == policy]
        assert own[:2] == ["begins", "ends"]
        assert len(own) == 2 * sum(cell.policy == policy for cell in cells)


def test_the_tier_that_was_read_is_told(service: Service) -> None:
    low, high = Cell("snapkv", "0.25"), Cell("snapkv", "0.6")
    with closing(asking(service)) as answerer:
        found = collect(answerer, example("tiers", TWICE), (low, high))
    assert [answer.tier for answer in found[low]] == ["0.2"] * 2
    assert [answer.tier for answer in found[high]] == ["0.6"] * 2
    assert found[low][0].kept < found[high][0].kept < 0.7
    assert found[low][0].kept_bytes < found[high][0].kept_bytes


def test_right_answers_never_stand_for_an_answer_at_another_tier(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored turn that says the same is found by its text, whatever tier it read."""
    item, cells = example("alias", TWICE), (Cell("snapkv", "0.4"), Cell("snapkv", "0.1"))
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
            collect(answerer, example("lost twice", TWICE), CELLS[:1])


def test_a_context_that_changes_its_tier_is_no_conversation() -> None:
    answer = Answer("a", "stop", "0.2", 0.2, 100)
    later = Reply(replace(answer, tier="0.1", kept=0.3, kept_bytes=150), "resp", True)
    with pytest.raises(CriticalKVError, match=r"q: read at tier 0\.1, before at 0\.2"):
        same_context("q", later, answer)
    same = replace(later, answer=replace(later.answer, tier="0.2"))
    assert same_context("q", same, answer).answer == answer


def test_who_does_not_answer_is_given_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    item, ended = example("slow"), threading.Event()
    with closing(asking(service)) as answerer:
        collect(answerer, item, CELLS[:1])  # what is left to do is to decode

    async def hang(request: Any) -> Any:
        try:
            await asyncio.sleep(LONG_S)
            yield request
        finally:
            ended.set()

    monkeypatch.setattr(service.workers, "decode", hang)
    late = pytest.raises(DeadlineError, match=r"question 1 under full at tier 1: no answer")
    with closing(asking(service, timeout_s=4)) as answerer:
        answerer.check(CELLS[:1])
        with late:
            list(answerer.answer(item, CELLS[:1]))
    assert ended.wait(LONG_S / 2), "the request goes on"


def test_who_stops_listening_ends_the_requests(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, ended, hangs = service.workers.decode, threading.Event(), asyncio.Event()

    async def hang(request: Any) -> Any:
        if request.view == ("1",):
            async with asyncio.timeout(LONG_S):
                await hangs.wait()
            async for event in decode(request):
                yield event
            return
        hangs.set()
        try:
            await asyncio.sleep(LONG_S)
        finally:
            ended.set()

    monkeypatch.setattr(service.workers, "decode", hang)
    with closing(asking(service)) as answerer:
        answers = answerer.answer(example("leave"), CELLS[:2])
        assert next(answers)[0] == FULL_CELL
        answers.close()
        assert ended.wait(LONG_S / 2), "the request goes on"


@pytest.mark.parametrize(
    "extension", [None, {}, {"tier": "1", "retained_fraction": 1.0, "published": True}], ids=str
)
def test_an_answer_that_does_not_say_what_it_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, extension: dict[str, Any] | None
) -> None:
    """Other services have the same API, and know no tiers."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
    said = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    more = {} if extension is None else {"criticalkv": extension}

    async def create(_: Any, **__: Any) -> ChatCompletion:
        return ChatCompletion.model_validate(said | more)

    monkeypatch.setattr(AsyncCompletions, "create", create)
    refused = r"question 1 under full at tier 1: the service does not say what it read"
    answerer = ServiceAnswerer(NOBODY, "none", "m")
    with closing(answerer), pytest.raises(CriticalKVError, match=refused):
        list(answerer.answer(example("other"), CELLS[:1]))


def test_a_key_that_no_header_can_carry_is_refused_unsaid() -> None:
    with pytest.raises(ConfigError) as refused:
        ServiceAnswerer(NOBODY, "sesame\n", "m")
    assert "sesame" not in str(refused.value)


async def test_what_a_connection_failed_of_is_not_quoted() -> None:
    request: Any = None
    cause = ValueError("Illegal header value b'Bearer sesame'")
    with pytest.raises(CriticalKVError) as failed:
        async with bounded("q", LONG_S):
            raise APIConnectionError(request=request) from cause
    assert str(failed.value) == "q: cannot reach the service (ValueError)"


@pytest.mark.parametrize("blocks", [False, True])
def test_what_does_not_end_hides_no_error(monkeypatch: pytest.MonkeyPatch, blocks: bool) -> None:
    monkeypatch.setattr(loop_thread, "STOP_S", 0.05)
    answerer = ServiceAnswerer(NOBODY, "none", "m")
    begun, freed = threading.Event(), threading.Event()

    async def stubborn() -> None:
        begun.set()
        while not (blocks and freed.wait(LONG_S)):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(LONG_S)

    answerer._loop.start(stubborn())
    assert begun.wait(LONG_S)
    with pytest.raises(OverloadedError, match="the first"), closing(answerer):
        raise OverloadedError("the first")
    freed.set()
    answerer._loop._thread.join(LONG_S)
    assert not answerer._loop._thread.is_alive()
    loop = answerer._loop._loop
    if not loop.is_closed():  # as a blocked one is left
        loop.call_later(0.01, loop.stop)
        loop.run_forever()
        loop.close()


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
    gone = ServiceAnswerer(NOBODY, "none", "m")
    with closing(gone), pytest.raises(CriticalKVError, match="cannot reach the service"):
        gone.check(CELLS)
