"""The decode engine: turns as nodes, pending tokens, concurrency, cancellation."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from criticalkv.services.decode import engine as engine_module
from criticalkv.services.decode import publication as publication_module
from criticalkv.services.decode import sequence as sequence_module
from criticalkv.services.local import LocalEngine
from criticalkv.services.local.memory_store import MemoryStore
from criticalkv.shared.config import DecodeConfig
from criticalkv.shared.errors import (
    CancelledError,
    ContextLengthError,
    CriticalKVError,
    DeadlineError,
    NodeMissingError,
    NumericsError,
    OverloadedError,
    WorkerLostError,
)
from criticalkv.shared.identity import tenant_salt
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import DecodeDelta, DecodeEnd, DecodeRequest, Sampling

Factory = Callable[..., LoadedModel]
IDS = list(range(40, 80))


@pytest.fixture
def local(tiny_model: Factory) -> Iterator[LocalEngine]:
    with LocalEngine(tiny_model(), decode=DecodeConfig(max_num_seqs=4, max_queued=4)) as engine:
        yield engine


def request(**fields: Any) -> DecodeRequest:
    sampling = {"max_tokens": 4, "ignore_eos": True, **fields.pop("sampling", {})}
    base = {"request_id": "t", "token_ids": (65, 66), "salt": tenant_salt("local")}
    return DecodeRequest(**{**base, "sampling": Sampling(**sampling), **fields})


def force_tokens(monkeypatch: pytest.MonkeyPatch, tokens: list[int], vocab: int) -> None:
    """Make the model's logits choose these tokens, one per step."""
    script = iter(tokens)
    forward = engine_module.forward

    def forced(*args: Any) -> torch.Tensor:
        out = forward(*args)
        assert out.shape[0] == 1
        return torch.nn.functional.one_hot(torch.tensor([next(script)]), vocab).float()

    monkeypatch.setattr(engine_module, "forward", forced)


def text_ids(engine: LocalEngine, text: str) -> list[int]:
    return engine.model.chat.encode_content(text)


def test_length_leaves_the_last_token_pending(local: LocalEngine) -> None:
    turn = local.generate(None, IDS, max_tokens=3, ignore_eos=True)
    manifest = local.manifest(turn)
    assert turn.finish_reason == "length"
    assert manifest.num_tokens == len(IDS) + 2
    assert manifest.pending_ids == (turn.token_ids[-1], *local.model.chat.closing_ids)


def test_end_of_turn_token_comes_back_only_through_the_template(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    eos = local.model.spec.eos_token_ids[0]
    ids = text_ids(local, "hi")
    force_tokens(monkeypatch, [*ids, eos], len(local.model.tokenizer))
    turn = local.generate(None, IDS, max_tokens=9)
    manifest = local.manifest(turn)
    assert (turn.finish_reason, turn.text) == ("stop", "hi")
    assert manifest.num_tokens == len(IDS) + 2
    assert manifest.pending_ids == tuple(local.model.chat.closing_ids)
    assert manifest.pending_ids[0] == eos


def test_nothing_after_a_stop_match_is_published(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = text_ids(local, "well##never")
    force_tokens(monkeypatch, ids, len(local.model.tokenizer))
    turn = local.generate(None, IDS, max_tokens=30, stop=("##",))
    assert (turn.finish_reason, turn.text) == ("stop", "well")
    assert turn.token_ids == tuple(ids[:4])
    manifest = local.manifest(turn)
    assert manifest.num_tokens == len(IDS) + 4
    assert manifest.pending_ids == tuple(local.model.chat.closing_ids)


def test_stop_at_the_first_token(local: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    force_tokens(monkeypatch, text_ids(local, "#"), len(local.model.tokenizer))
    turn = local.generate(None, IDS, max_tokens=3, stop=("#",))
    assert (turn.text, turn.token_ids, turn.finish_reason) == ("", (), "stop")
    assert local.manifest(turn).num_tokens == len(IDS)


def test_continuing_runs_the_pending_tokens_first(local: LocalEngine) -> None:
    """Two turns of 3 tokens are the same as one of 6, if the template adds nothing."""
    whole = local.generate(None, IDS, max_tokens=6, ignore_eos=True)
    first = local.generate(None, IDS, max_tokens=3, ignore_eos=True)
    pending = local.manifest(first).pending_ids[:1]
    second = local.generate(first, pending, max_tokens=3, ignore_eos=True)
    assert first.token_ids + second.token_ids == whole.token_ids


def test_a_turn_is_the_same_whatever_runs_beside_it(local: LocalEngine) -> None:
    context = local.compress_tokens(list(range(100, 200)), policy="default")
    alone = {
        n: local.generate(
            context, [n], tier="0.2", max_tokens=8, temperature=1.0, seed=n, ignore_eos=True
        ).token_ids
        for n in range(4)
    }
    results: queue.Queue[tuple[int, tuple[int, ...]]] = queue.Queue()

    def run(n: int) -> None:
        turn = local.generate(
            context, [n], tier="0.2", max_tokens=8, temperature=1.0, seed=n, ignore_eos=True
        )
        results.put((n, turn.token_ids))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(results.get() for _ in threads) == alone


def test_cancel_ends_within_a_step_and_publishes_what_is_there(local: LocalEngine) -> None:
    events: queue.Queue[Any] = queue.Queue()
    sequence = local.decode.submit(request(sampling={"max_tokens": 1500}), events.put)
    while not isinstance(events.get(timeout=10), DecodeDelta):
        pass
    sequence.cancelled.set()
    started = time.monotonic()
    end = next(e for e in iter(lambda: events.get(timeout=10), None) if isinstance(e, DecodeEnd))
    assert time.monotonic() - started < 2
    assert end.finish_reason == "cancelled"
    assert end.node_id is not None
    assert local.decode.in_flight == 0


def test_leaving_the_iterator_frees_the_request(local: LocalEngine) -> None:
    events = local.decode.generate(request(sampling={"max_tokens": 1500}))
    next(events)
    events.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 2
    while local.decode.in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert local.decode.in_flight == 0


def test_too_many_requests_are_refused_at_once(local: LocalEngine) -> None:
    events: queue.Queue[Any] = queue.Queue()
    long = request(sampling={"max_tokens": 1500})
    running = [local.decode.submit(long, events.put) for _ in range(8)]
    with pytest.raises(OverloadedError):
        local.decode.submit(long, events.put)
    for sequence in running:
        sequence.cancelled.set()
    # Those with a slot end as turns, those still waiting for one with an error.
    ends = [terminal(events) for _ in running]
    assert all(isinstance(e, CancelledError) or e.finish_reason == "cancelled" for e in ends)
    assert local.decode.in_flight == 0


def terminal(events: queue.Queue[Any]) -> Any:
    while True:
        event = events.get(timeout=20)
        if isinstance(event, (DecodeEnd, CriticalKVError)):
            return event


def iter_until(events: queue.Queue[Any], count: int) -> list[DecodeEnd]:
    ends: list[DecodeEnd] = []
    while len(ends) < count:
        event = events.get(timeout=20)
        if isinstance(event, DecodeEnd):
            ends.append(event)
    return ends


def test_missing_parent_is_a_miss(local: LocalEngine) -> None:
    with pytest.raises(NodeMissingError):
        list(local.decode.generate(request(parent="ab" * 32, view=("1",))))
    assert local.decode.in_flight == 0


def test_another_tenants_node_is_a_miss(local: LocalEngine) -> None:
    context = local.compress_tokens(IDS, policy="dense")
    with pytest.raises(NodeMissingError):
        list(
            local.decode.generate(
                request(parent=context.node_id, view=("1",), salt=tenant_salt("somebody else"))
            )
        )


def test_another_models_node_is_a_miss(tiny_model: Factory) -> None:
    store = MemoryStore()
    with (
        LocalEngine(tiny_model(seed=1), store) as one,
        LocalEngine(tiny_model(seed=2), store) as two,
    ):
        context = one.compress_tokens(IDS, policy="dense")
        with pytest.raises(NodeMissingError):
            list(two.decode.generate(request(parent=context.node_id, view=("1",))))


def test_positions_are_limited_over_the_whole_chain(local: LocalEngine) -> None:
    limit = local.model.spec.max_positions
    with pytest.raises(ContextLengthError, match=str(limit)):
        list(local.decode.generate(request(sampling={"max_tokens": limit - 1})))
    end = list(local.decode.generate(request(sampling={"max_tokens": 2})))[-1]
    assert isinstance(end, DecodeEnd)


def test_non_finite_logits_end_one_request_only(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine_module.forward
    monkeypatch.setattr(engine_module, "forward", lambda *a: forward(*a) * float("nan"))
    with pytest.raises(NumericsError):
        list(local.decode.generate(request()))
    monkeypatch.setattr(engine_module, "forward", forward)
    assert isinstance(list(local.decode.generate(request()))[-1], DecodeEnd)


def test_a_crash_in_a_step_ends_its_requests_and_not_the_engine(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine_module.forward

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine_module, "forward", broken)
    with pytest.raises(CriticalKVError, match="RuntimeError"):
        list(local.decode.generate(request()))
    monkeypatch.setattr(engine_module, "forward", forward)
    assert isinstance(list(local.decode.generate(request()))[-1], DecodeEnd)


def test_deadline_ends_a_running_request(local: LocalEngine) -> None:
    with pytest.raises(DeadlineError):
        list(local.decode.generate(request(sampling={"max_tokens": 1500}, deadline_s=0.2)))


def test_logprobs_come_with_their_tokens(local: LocalEngine) -> None:
    turn = local.generate(None, IDS, max_tokens=5, logprobs=2, ignore_eos=True)
    logprobs = [entry for delta in turn.deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in logprobs] == list(turn.token_ids)
    assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in logprobs)
    assert all(entry.logprob == pytest.approx(entry.top[0][1]) for entry in logprobs)


def test_a_store_that_fails_to_publish_is_reported_with_the_answer(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from criticalkv.shared.errors import StoreFullError

    def full(*_: Any, **__: Any) -> Any:
        raise StoreFullError("planted")

    monkeypatch.setattr(local.store, "open_put", full)
    end = list(local.decode.generate(request()))[-1]
    assert isinstance(end, DecodeEnd)
    assert (end.node_id, end.publish_error) == (None, "planted")


def test_a_tiny_temperature_is_greedy_and_harmless(local: LocalEngine) -> None:
    greedy = local.generate(None, IDS, max_tokens=4, ignore_eos=True)
    for temperature in (1e-310, 1e-30, 1e-6):
        turn = local.generate(None, IDS, max_tokens=4, ignore_eos=True, temperature=temperature)
        assert turn.token_ids == greedy.token_ids


def test_any_error_with_one_token_ends_that_request_only(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(sequence_module.Sequence, "take", broken)
        with pytest.raises(CriticalKVError, match="ValueError"):
            list(local.decode.generate(request()))
    assert isinstance(list(local.decode.generate(request()))[-1], DecodeEnd)
    local.decode.check_health()


def test_steps_that_always_fail_make_the_replica_unhealthy(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine_module, "forward", broken)
    for _ in range(3):
        with pytest.raises(CriticalKVError):
            list(local.decode.generate(request()))
    with pytest.raises(RuntimeError, match="steps failed"):
        local.decode.check_health()


def test_any_publishing_error_is_reported_with_the_answer(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(publication_module, "publish_cache", broken)
    end = list(local.decode.generate(request()))[-1]
    assert isinstance(end, DecodeEnd)
    assert end.publish_error == "publishing failed: ValueError"
    assert local.decode.in_flight == 0


def test_hanging_publications_do_not_keep_new_requests_waiting(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, entered = threading.Event(), queue.SimpleQueue[int]()

    def hanging(*_: Any, **__: Any) -> Any:
        entered.put(1)
        release.wait(30)
        raise ValueError("planted")

    monkeypatch.setattr(publication_module, "publish_cache", hanging)
    with LocalEngine(tiny_model(), decode=DecodeConfig(max_num_seqs=8)) as local:
        events: queue.Queue[Any] = queue.Queue()
        for _ in range(4):
            local.decode.submit(request(), events.put)
        for _ in range(4):
            entered.get(timeout=20)
        try:
            answered = list(local.decode.generate(request(publish=False, deadline_s=10)))
            assert isinstance(answered[-1], DecodeEnd)
        finally:
            release.set()


@pytest.fixture
def full(tiny_model: Factory) -> Iterator[tuple[LocalEngine, Any]]:
    """An engine whose one slot is taken by a long turn."""
    config = DecodeConfig(max_num_seqs=1, max_queued=8)
    with LocalEngine(tiny_model(), decode=config) as engine:
        events: queue.Queue[Any] = queue.Queue()
        running = engine.decode.submit(request(sampling={"max_tokens": 1900}), events.put)
        events.get(timeout=10)
        yield engine, running


def test_waiting_requests_end_when_cancelled_or_late(full: tuple[LocalEngine, Any]) -> None:
    engine, running = full
    cancelled: queue.Queue[Any] = queue.Queue()
    waiting = [engine.decode.submit(request(), cancelled.put) for _ in range(6)]
    waiting[-1].cancelled.set()
    assert isinstance(cancelled.get(timeout=2), CancelledError)
    with pytest.raises(DeadlineError):
        list(engine.decode.generate(request(deadline_s=0.3)))
    running.cancelled.set()
    ends = iter_until(cancelled, 5)
    assert {end.finish_reason for end in ends} == {"length"}
    assert engine.decode.in_flight == 0


def test_closing_ends_waiting_requests(full: tuple[LocalEngine, Any]) -> None:
    engine, _ = full
    events: queue.Queue[Any] = queue.Queue()
    for _ in range(6):
        engine.decode.submit(request(), events.put)
    engine.close()
    assert all(isinstance(terminal(events), WorkerLostError) for _ in range(6))
    assert engine.decode.in_flight == 0


def test_the_view_is_read_exactly_whatever_is_held(local: LocalEngine) -> None:
    """A replica that holds a smaller read pulls the larger one that is asked for."""
    low = local.compress_tokens(IDS, policy="window+uniform+plain:window=4", store_tier="0.2")
    local.generate(low, [65], tier="0.2", max_tokens=1)
    local.compress_tokens(IDS, policy="window+uniform+plain:window=4", store_tier="0.8")
    turn = local.generate(low, [65], tier="0.8", max_tokens=1)
    assert turn.end is not None
    assert turn.end.view == ("0.8",)
    with pytest.raises(NodeMissingError, match="not stored"):
        list(local.decode.generate(request(parent=low.node_id, view=("0.7",))))
