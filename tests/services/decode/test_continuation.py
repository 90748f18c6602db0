"""A turn that another engine goes on with, after exactly what the first one has told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from decode_requests import SALT, ids, request

from criticalkv.services.decode import engine as engine_module
from criticalkv.services.local import LocalEngine, LocalNode
from criticalkv.shared.config import DecodeConfig
from criticalkv.shared.errors import (
    CriticalKVError,
    NumericsError,
    StoreUnavailableError,
    WorkerLostError,
)
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.failpoints import Failpoints
from criticalkv.shared.identity import tokens_digest
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import DecodeDelta, DecodeEnd, DecodeRequest, DecodeStart

Factory = Callable[..., LoadedModel]
STEPWISE = Policy.parse("window+adakv+twostage:window=4,interval=8,target=6").canonical()
VIEW = ("0.4",)
PROMPT = 11


@pytest.fixture(scope="module")
def local(tiny_model: Factory) -> Iterator[LocalEngine]:
    config = DecodeConfig(max_num_seqs=4, max_num_batched_tokens=7)
    with LocalEngine(tiny_model(), decode=config) as engine:
        yield engine


@pytest.fixture(scope="module")
def context(local: LocalEngine) -> LocalNode:
    return local.compress_tokens(ids(90, 3), policy="default", store_tier="0.6")


def turn(context: LocalNode, **sampling: Any) -> DecodeRequest:
    policy = sampling.pop("policy", "dense")
    prompt = tuple(ids(PROMPT, 1))
    return request(context, VIEW, token_ids=prompt, policy=policy, sampling=sampling)


def run(local: LocalEngine, item: DecodeRequest) -> list[Any]:
    local.decode.drop_unused()
    return list(local.decode.generate(item))


def cut_and_continued(
    local: LocalEngine, item: DecodeRequest, whole: list[Any], at: int
) -> list[Any]:
    """The first `at` events, then what another worker tells after them."""
    before = whole[:at]
    emitted = tuple(t for e in before if isinstance(e, DecodeDelta) for t in e.sampled)
    after = run(local, item.model_copy(update={"emitted": emitted}))
    assert isinstance(after[0], DecodeStart)
    return [*before, *after[1:]]


def told(events: list[Any]) -> dict[str, Any]:
    """What a client learns in the end, whatever it came in."""
    deltas = [e for e in events if isinstance(e, DecodeDelta)]
    end = events[-1]
    assert isinstance(end, DecodeEnd)
    return {
        "text": "".join(d.text for d in deltas),
        "tokens": [t for d in deltas for t in d.token_ids],
        "sampled": [t for d in deltas for t in d.sampled],
        "reason": end.finish_reason,
        "usage": (end.prompt_tokens, end.completion_tokens),
        "node": (end.node_id, end.view, end.ancestors),
        "error": end.publish_error,
    }


def assert_goes_on_from_everywhere(local: LocalEngine, item: DecodeRequest) -> dict[str, Any]:
    whole = run(local, item)
    expected, logprobs = told(whole), logprobs_of(whole)
    assert expected["node"][0] is not None
    manifest = local.manifest(LocalNode(expected["node"][0], (), False))
    for at in range(1, len(whole)):
        events = cut_and_continued(local, item, whole, at)
        assert told(events) == expected, f"after event {at}"
        assert_same_logprobs(logprobs_of(events), logprobs)
    again = local.manifest(LocalNode(expected["node"][0], (), False))
    assert (again.num_tokens, again.pending_ids) == (manifest.num_tokens, manifest.pending_ids)
    return expected


def logprobs_of(events: list[Any]) -> list[Any]:
    return [p for e in events if isinstance(e, DecodeDelta) for p in e.logprobs]


def assert_same_logprobs(one: list[Any], two: list[Any]) -> None:
    assert [p.token_id for p in one] == [p.token_id for p in two]
    torch.testing.assert_close(
        torch.tensor([p.logprob for p in one]),
        torch.tensor([p.logprob for p in two]),
        atol=1e-3,
        rtol=0,
    )


# ------------------------------------------------------------------ a real model


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"logprobs": 2},
        {"temperature": 1.0, "seed": 7, "top_p": 0.9},
        {"temperature": 1.0, "seed": 8, "logprobs": 0},
        {"policy": STEPWISE},
        {"policy": STEPWISE, "temperature": 1.0, "seed": 9, "logprobs": 1},
    ],
    ids=str,
)
def test_a_turn_goes_on_from_every_event(
    local: LocalEngine, context: LocalNode, sampling: dict[str, Any]
) -> None:
    expected = assert_goes_on_from_everywhere(local, turn(context, max_tokens=14, **sampling))
    assert len(expected["sampled"]) == 14


def test_what_shrinks_while_it_goes_on_holds_the_same_entries(
    local: LocalEngine, context: LocalNode
) -> None:
    item = turn(context, max_tokens=20, policy=STEPWISE)
    whole = run(local, item)
    first = local.manifest(LocalNode(whole[-1].node_id, (), False))
    for at in (1, 6, 14, 20):
        local.store.delete(whole[-1].node_id)  # type: ignore[attr-defined]
        end = cut_and_continued(local, item, whole, at)[-1]
        again = local.manifest(LocalNode(end.node_id, (), False))
        assert again.node_id == first.node_id
        assert (again.lens == first.lens).all()


# --------------------------------------------------------------- scripted tokens


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, local: LocalEngine) -> Callable[[list[int]], None]:
    """Make the model choose these tokens, by position: however it comes there."""
    forward, vocab = engine_module.forward, len(local.model.tokenizer)

    def set_script(tokens: list[int], first: int = 90 + PROMPT - 1) -> None:
        def scripted(model: Any, ids: Any, positions: Any, plan: Any, last: Any) -> torch.Tensor:
            out = forward(model, ids, positions, plan, last)
            at = [int(p) - first for p in positions[last]]
            chosen = torch.tensor([tokens[i] for i in at], dtype=torch.int64)
            wanted = torch.nn.functional.one_hot(chosen, vocab).float()
            return out * 1e-3 + 50 * wanted

        monkeypatch.setattr(engine_module, "forward", scripted)

    return set_script


EMOJI = "é 😀漢👩‍👧!"
SCRIPTS = {
    "stop across tokens": ("well # said##never", ("##",)),
    "overlapping stops": ("abababaX", ("abaX", "babaY", "aX")),
    "stop at the first token": ("#", ("#",)),
    "held back to the end": ("so it is ##", ("##!",)),
    "characters across tokens": (EMOJI, ()),
    "stop inside characters": (EMOJI, ("漢👩",)),
}


@pytest.mark.parametrize(("logprobs", "reason"), [(None, "length"), (1, "end")])
@pytest.mark.parametrize("name", SCRIPTS)
def test_withheld_text_is_neither_lost_nor_doubled(
    local: LocalEngine,
    context: LocalNode,
    script: Callable[[list[int]], None],
    name: str,
    logprobs: int | None,
    reason: str,
) -> None:
    text, stop = SCRIPTS[name]
    tokens = local.model.chat.encode_content(text)
    script([*tokens, local.model.spec.eos_token_ids[0]])
    most = len(tokens) + 5 if reason == "end" else len(tokens)
    item = turn(context, max_tokens=most, stop=stop, logprobs=logprobs, ignore_eos=False)
    expected = assert_goes_on_from_everywhere(local, item)
    cut = min((text.find(s) for s in stop if s in text), default=len(text))
    assert expected["text"] == text[:cut]
    stopped = cut < len(text) or reason == "end"
    assert expected["reason"] == ("stop" if stopped else "length")


def test_bytes_that_never_become_a_character_go_on_as_they_are(
    local: LocalEngine, context: LocalNode, script: Callable[[list[int]], None]
) -> None:
    broken = [*local.model.chat.encode_content("a😀b")]
    del broken[3]  # in the middle of the emoji
    script([*broken, *local.model.chat.encode_content("cd")])
    assert_goes_on_from_everywhere(local, turn(context, max_tokens=len(broken) + 2, logprobs=0))


def test_what_was_told_is_kept_where_the_new_worker_would_choose_otherwise(
    local: LocalEngine, context: LocalNode, script: Callable[[list[int]], None]
) -> None:
    """At a near tie low bits decide: the node holds what was streamed, not what would be."""
    script(local.model.chat.encode_content("abcdefgh"))
    item = turn(context, max_tokens=8)
    whole = run(local, item)
    script(local.model.chat.encode_content("ABCDEFGH"))
    end = cut_and_continued(local, item, whole, 4)
    assert told(end)["text"] == "abcDEFGH"
    manifest = local.manifest(LocalNode(end[-1].node_id, (), False))
    *said, last = local.model.chat.encode_content("abcDEFGH")
    assert manifest.identity.tokens == tokens_digest([*item.token_ids, *said], manifest.pending_ids)
    assert manifest.pending_ids[0] == last


# ------------------------------------------------------------------------- ends


def test_every_token_is_told_as_soon_as_it_is_drawn(
    local: LocalEngine, context: LocalNode, script: Callable[[list[int]], None]
) -> None:
    tokens = local.model.chat.encode_content("a##漢")
    script([*tokens, local.model.spec.eos_token_ids[0]])
    item = turn(context, max_tokens=20, stop=("##!",), ignore_eos=False)
    deltas = [e for e in run(local, item) if isinstance(e, DecodeDelta)]
    assert [d.sampled for d in deltas] == [(t,) for t in (*tokens, *item_eos(local))]
    assert [d.token_ids for d in deltas[:3]] == [(tokens[0],), (), ()]


def item_eos(local: LocalEngine) -> tuple[int, ...]:
    return local.model.spec.eos_token_ids[:1]


def test_a_continuation_is_of_one_choice_and_no_longer_than_the_answer(
    context: LocalNode,
) -> None:
    item = turn(context, max_tokens=3)
    fields = item.model_dump()
    with pytest.raises(ValueError, match="branch_seeds"):
        DecodeRequest.model_validate({**fields, "emitted": (1,), "branch_seeds": (5,)})
    with pytest.raises(ValueError, match="max_tokens"):
        DecodeRequest.model_validate({**fields, "emitted": (1, 2, 3, 4)})


def test_an_engine_that_is_closed_says_go_on_elsewhere_and_another_does(
    local: LocalEngine, context: LocalNode
) -> None:
    item = turn(context, max_tokens=400)
    whole = run(local, item)
    with LocalEngine(local.model, local.store) as closing:
        events = closing.decode.generate(item)
        before = list(islice(events, 20))
        closing.decode.close()
        with pytest.raises(WorkerLostError):
            before.extend(events)
        with pytest.raises(WorkerLostError):
            next(closing.decode.generate(item))
    assert not any(isinstance(e, DecodeEnd) for e in before)
    assert told(cut_and_continued(local, item, whole, 21)) == told(whole)


def test_an_engine_that_closes_before_a_finished_turn_is_stored_says_go_on_elsewhere(
    local: LocalEngine, context: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: Any) -> Any:
        raise WorkerLostError("stopping")

    item = turn(context, max_tokens=5)
    whole = run(local, item)
    with LocalEngine(local.model, local.store) as closing:
        monkeypatch.setattr(closing.decode._publication, "publish", closed)
        events: list[Any] = []
        with pytest.raises(WorkerLostError):
            events.extend(closing.decode.generate(item))
    assert not any(isinstance(e, DecodeEnd) for e in events)
    assert told(cut_and_continued(local, item, whole, len(whole) - 1)) == told(whole)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_step_thread_dies_everybody_is_told_at_once(
    local: LocalEngine, context: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, steps = engine_module.forward, iter(range(5))

    def deadly(*args: Any) -> torch.Tensor:
        if next(steps, None) is None:
            raise SystemExit
        return forward(*args)

    item = turn(context, max_tokens=400)
    with LocalEngine(local.model, local.store) as dying:
        monkeypatch.setattr(engine_module, "forward", deadly)
        ended, errors = threading.Barrier(3), []

        def ask() -> None:
            try:
                list(dying.decode.generate(item))
            except CriticalKVError as error:
                errors.append(type(error))
            ended.wait(30)

        for _ in range(2):
            threading.Thread(target=ask).start()
        ended.wait(30)
        monkeypatch.undo()
        assert errors == [WorkerLostError] * 2
        with pytest.raises(WorkerLostError):
            dying.decode.submit(item, print)
        with pytest.raises(RuntimeError, match="step thread"):
            dying.decode.check_health()


@pytest.mark.parametrize("place", ["decode.step", "decode.publish"])
def test_failpoints_are_where_they_say(
    local: LocalEngine, context: LocalNode, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr("criticalkv.shared.failpoints._active", Failpoints.parse(f"{place}=error"))
    item = turn(context, max_tokens=3)
    if place == "decode.step":
        with pytest.raises(StoreUnavailableError, match=place):
            run(local, item)
    else:
        end = run(local, item)[-1]
        assert (end.finish_reason, end.node_id) == ("length", None)
        assert "failpoint decode.publish" in end.publish_error
    assert local.decode.in_flight == 0


def test_nan_in_a_continuation_is_an_error(
    local: LocalEngine, context: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = turn(context, max_tokens=8)
    whole = run(local, item)
    forward = engine_module.forward
    monkeypatch.setattr(engine_module, "forward", lambda *a: forward(*a) * float("nan"))
    with pytest.raises(NumericsError):
        cut_and_continued(local, item, whole, 4)


def test_salts_stay_apart_in_a_continuation(local: LocalEngine, context: LocalNode) -> None:
    item = turn(context, max_tokens=4).model_copy(update={"emitted": (65,)})
    assert item.salt == SALT
    with pytest.raises(CriticalKVError, match="not usable"):
        run(local, item.model_copy(update={"salt": "ab" * 32}))
