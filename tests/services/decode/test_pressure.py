"""A pool far too small: everybody gets the right answer, and everything is given back."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from decode_requests import (
    PAGE,
    assert_empty,
    capacity,
    config,
    ids,
    is_end,
    request,
    tokens_of,
)
from near_ties import TOLERANCE, first_difference, noting_margins

from criticalkv.services.decode import publication as publication_module
from criticalkv.services.decode.engine import DecodeEngine
from criticalkv.services.local import LocalEngine, LocalNode
from criticalkv.shared.errors import (
    CancelledError,
    CriticalKVError,
    DeadlineError,
    NodeMissingError,
    PoolLimitError,
    StoreUnavailableError,
)
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import DecodeDelta, DecodeEnd, DecodeRequest, DecodeStart

Factory = Callable[..., LoadedModel]


@pytest.fixture
def small(tiny_model: Factory) -> Iterator[LocalEngine]:
    """A pool of one MiB, in which a few turns fit."""
    with LocalEngine(tiny_model(), decode=config()) as engine:
        yield engine


def test_two_hundred_requests_and_a_pool_far_too_small(tiny_model: Factory) -> None:
    rng = random.Random(5)
    model = tiny_model()
    with LocalEngine(model) as roomy:
        contexts = [roomy.compress_tokens(ids(n, n), policy="default") for n in (90, 200, 333)]
        wanted = [spec(rng, contexts) for _ in range(200)]
        right, margins = {}, {}
        for i, item in enumerate(wanted):
            if i not in cancelled(wanted):
                with noting_margins() as margins[i]:
                    events = list(roomy.decode.generate(item.model_copy(update={"publish": False})))
                right[i] = tokens_of(events)
        with LocalEngine(model, roomy.store, decode=config(max_num_seqs=24)) as small:
            got = run_all(small.decode, wanted, cancelled(wanted))
            assert small.decode.in_flight == 0
            assert_empty(small.decode)
    preempted = sum(
        e.preemptions for events in got.values() for e in events[-1:] if isinstance(e, DecodeEnd)
    )
    assert preempted > 20, "the pool was not too small"
    near_ties = []
    for i, tokens in right.items():
        at = first_difference(tokens_of(got[i]), tokens)
        if at is not None:
            assert margins[i][at] < TOLERANCE, f"request {i}, token {at}"
            near_ties.append((i, at))
        assert got[i][-1].node_id is not None
    assert len(near_ties) <= 0.02 * len(right), near_ties
    for i in cancelled(wanted):
        last = got[i][-1]
        assert isinstance(last, CancelledError) or last.finish_reason in ("cancelled", "length")


def spec(rng: random.Random, contexts: list[LocalNode]) -> DecodeRequest:
    context = rng.choice([*contexts, None])
    view = (rng.choice(["0.1", "0.2", "0.4", "1"]),) if context else ()
    sampling = {
        "max_tokens": rng.randint(1, 70),
        "temperature": rng.choice([0.0, 1.0]),
        "seed": rng.randrange(1 << 30),
    }
    tenant = rng.choice("abc")
    prompt = tuple(ids(rng.choice([1, 5, 40, 90]), rng.randrange(999)))
    return request(context, view, token_ids=prompt, tenant=tenant, sampling=sampling)


def cancelled(wanted: list[DecodeRequest]) -> set[int]:
    return {i for i in range(len(wanted)) if i % 9 == 4}


def run_all(
    engine: DecodeEngine, wanted: list[DecodeRequest], giving_up: set[int]
) -> dict[int, list[Any]]:
    """Submit everything at once; give some up while they wait, pull or run."""
    got: dict[int, list[Any]] = {i: [] for i in range(len(wanted))}
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def emit(i: int, event: Any) -> None:
        got[i].append(event)
        if is_end(event):
            ended.put(i)

    running = [
        engine.submit(item, lambda event, i=i: emit(i, event)) for i, item in enumerate(wanted)
    ]
    rng = random.Random(1)

    def give_up() -> None:
        for i in sorted(giving_up):
            time.sleep(rng.random() * 0.05)
            running[i].cancelled.set()

    thread = threading.Thread(target=give_up)
    thread.start()
    for _ in wanted:
        ended.get(timeout=120)
    thread.join()
    return got


@pytest.mark.parametrize("fault", ["none", "store fails", "node lost"])
def test_who_makes_room_goes_on_as_if_nothing_had_happened(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Swapped out to the store and read back, or, if that fails, run once more."""
    model = tiny_model()
    swapped: list[str | None] = []
    original = publication_module.Publication._swapped

    def noting(self: Any, *args: Any) -> Any:
        if fault == "store fails":
            with monkeypatch.context() as patch:
                patch.setattr(publication_module, "publish_cache", unavailable)
                swapped.append(original(self, *args))
        else:
            swapped.append(original(self, *args))
        if fault == "node lost":
            self._store.delete(swapped[-1])
        return swapped[-1]

    wanted = [
        request(None, (), token_ids=tuple(ids(40, n)), sampling={"max_tokens": 300})
        for n in range(6)
    ]
    with LocalEngine(model) as roomy:
        right = [tokens_of(list(roomy.decode.generate(item))) for item in wanted]
    with LocalEngine(model, decode=config(node_cache_mb=0)) as small:
        monkeypatch.setattr(publication_module.Publication, "_swapped", noting)
        got = run_all(small.decode, wanted, set())
        assert_empty(small.decode)
    assert len(swapped) >= 2
    assert (None in swapped) == (fault == "store fails")
    assert [tokens_of(got[i]) for i in range(6)] == right
    ends = [got[i][-1] for i in range(6)]
    assert sum(end.preemptions for end in ends) == len(swapped)
    assert ends[0].preemptions == 0, "the oldest never makes room"
    assert all(sum(isinstance(e, DecodeStart) for e in got[i]) == 1 for i in range(6))


def unavailable(*_: Any, **__: Any) -> Any:
    raise StoreUnavailableError("planted")


def test_a_turn_larger_than_the_pool_is_refused_with_the_figures(small: LocalEngine) -> None:
    fits = capacity(small.decode, small.model.spec)
    with pytest.raises(PoolLimitError, match="pool has 1 MiB"):
        small.decode.generate(request(None, (), sampling={"max_tokens": fits + PAGE})).__next__()
    end = list(small.decode.generate(request(None, (), sampling={"max_tokens": fits - 1})))[-1]
    assert (end.finish_reason, end.completion_tokens) == ("length", fits - 1)
    assert_empty(small.decode)


def test_a_context_larger_than_the_pool_can_be_read_at_a_lower_tier(small: LocalEngine) -> None:
    fits = capacity(small.decode, small.model.spec)
    context = small.compress_tokens(ids(fits + 100, 1), policy="default")
    with pytest.raises(PoolLimitError, match="lower tier"):
        list(small.decode.generate(request(context, ("1",))))
    turn = small.generate(context, [65], tier="0.2", max_tokens=4, ignore_eos=True)
    lowered = list(small.decode.generate(request(context, ("1",), min_tier="0.1")))
    assert turn.end is not None
    assert isinstance(lowered[-1], DecodeEnd)
    assert lowered[-1].view == (lowered[0].tier,)
    assert 0.1 <= float(lowered[0].tier) < 1


def test_a_full_pool_admits_at_a_lower_tier_only_who_allows_it(small: LocalEngine) -> None:
    fits = capacity(small.decode, small.model.spec)
    first, second = (small.compress_tokens(ids(fits // 2, n), policy="default") for n in (1, 2))
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    holding = small.decode.submit(
        request(first, ("1",), sampling={"max_tokens": fits // 3}), events.put
    )
    assert isinstance(events.get(timeout=10), DecodeStart)
    low = list(small.decode.generate(request(second, ("1",), min_tier="0.05")))
    assert low[0].tier not in ("1", "0.05"), "the highest tier that fits, no lower"
    assert low[-1].view == (low[0].tier,)
    with pytest.raises(DeadlineError):
        list(small.decode.generate(request(second, ("1",), deadline_s=0.3)))
    holding.cancelled.set()
    high = list(small.decode.generate(request(second, ("1",))))
    assert high[0].tier == "1"
    alone = small.generate(second, [65], tier=low[0].tier, max_tokens=8, ignore_eos=True)
    assert tokens_of(low) == alone.token_ids


def test_sequences_over_one_node_share_its_pages(tiny_model: Factory) -> None:
    with LocalEngine(tiny_model(), decode=config(pool_mb=8)) as local:
        context = local.compress_tokens(ids(300, 1), policy="default")
        heads = local.model.spec.num_layers * local.model.spec.num_kv_heads
        used = []
        running = []
        for tier in ("0.4", "0.4", "0.2"):
            events: queue.SimpleQueue[Any] = queue.SimpleQueue()
            item = request(context, (tier,), sampling={"max_tokens": 1500}, publish=False)
            running.append(local.decode.submit(item, events.put))
            while not isinstance(events.get(timeout=10), DecodeDelta):
                pass
            own = sum(-(-len(s.tokens) // PAGE) for s in local.decode._running) * heads
            used.append((local.decode.pages.total - local.decode.pages.free, own))
        for sequence in running:
            sequence.cancelled.set()
        manifest = local.manifest(context)
        lens = manifest.lens[manifest.tier_index("0.4")]
        node_pages = int((-(-lens // PAGE)).sum())
        assert_empty(local.decode)
    # Own pages keep growing while they are counted: a page per head and sequence of slack.
    assert all(0 <= total - node_pages - own + heads <= 4 * heads for total, own in used), used


def test_kept_nodes_go_before_anybody_waits(tiny_model: Factory) -> None:
    with LocalEngine(tiny_model(), decode=config()) as small:
        contexts = [small.compress_tokens(ids(400, n), policy="default") for n in range(8)]
        for context in contexts:
            turn = small.generate(context, [65], tier="0.6", max_tokens=2, ignore_eos=True)
            assert turn.start is not None
            assert turn.start.bytes_pulled > 0
        again = small.generate(contexts[-1], [66], tier="0.6", max_tokens=2, ignore_eos=True)
        smaller = small.generate(contexts[-1], [66], tier="0.2", max_tokens=2, ignore_eos=True)
        first = small.generate(contexts[0], [66], tier="0.6", max_tokens=2, ignore_eos=True)
        assert again.start is not None
        assert smaller.start is not None
        assert first.start is not None
        assert (again.start.bytes_pulled, smaller.start.bytes_pulled) == (0, 0)
        assert first.start.bytes_pulled > 0
        assert set(small.decode.resident_ids(2)) == {first.node_id, contexts[0].node_id}
        assert_empty(small.decode)


def test_choices_share_the_prompt_and_differ_by_their_seeds(tiny_model: Factory) -> None:
    sampling: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 7}
    prompt = tuple(ids(37, 3))
    with LocalEngine(tiny_model(), decode=config(pool_mb=8)) as local:
        context = local.compress_tokens(ids(120, 1), policy="default")
        alone = []
        for seed in (7, 8, 9):
            item = request(context, ("0.4",), token_ids=prompt, sampling={**sampling, "seed": seed})
            alone.append(tokens_of(list(local.decode.generate(item))))
        seeds = {"branch_seeds": (8, 9), "token_ids": prompt, "sampling": sampling}
        events = list(local.decode.generate(request(context, ("0.4",), **seeds)))
        assert [tokens_of(events, choice) for choice in range(3)] == alone
        assert len(set(alone)) == 3
        ends = {e.choice: e for e in events if isinstance(e, DecodeEnd)}
        starts = [e.choice for e in events if isinstance(e, DecodeStart)]
        assert sorted(starts) == sorted(ends) == [0, 1, 2]
        for choice, end in ends.items():
            node = LocalNode(str(end.node_id), (), False)
            manifest = local.manifest(node)
            assert manifest.num_tokens == len(prompt) + 19
            assert manifest.pending_ids[0] == alone[choice][-1]
        assert_empty(local.decode)


def test_choices_without_a_slot_come_later(tiny_model: Factory) -> None:
    sampling: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 1}
    seeds = {"branch_seeds": (2, 3, 4, 5), "sampling": sampling, "token_ids": tuple(ids(20, 1))}
    with LocalEngine(tiny_model(), decode=config(max_num_seqs=2)) as local:
        events = list(local.decode.generate(request(None, (), **seeds)))
        assert_empty(local.decode)
    with LocalEngine(tiny_model(), decode=config()) as roomy:
        together = list(roomy.decode.generate(request(None, (), **seeds)))
    for choice in range(5):
        assert tokens_of(events, choice) == tokens_of(together, choice)
        assert len(tokens_of(events, choice)) == 6


def test_a_cancelled_request_frees_all_its_choices(small: LocalEngine) -> None:
    item = request(None, (), branch_seeds=(2, 3), sampling={"max_tokens": 1000, "temperature": 1})
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sequence = small.decode.submit(item, events.put)
    while not isinstance(events.get(timeout=10), DecodeDelta):
        pass
    sequence.cancelled.set()
    assert_empty(small.decode)


def test_a_lost_context_fails_who_waits_for_it_and_nobody_else(
    tiny_model: Factory,
) -> None:
    with LocalEngine(tiny_model(), decode=config(pool_mb=8)) as local:
        context = local.compress_tokens(ids(200, 1), policy="default")
        item = request(context, ("0.4",))
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        other = local.decode.submit(request(None, (), sampling={"max_tokens": 800}), events.put)
        manifest = local.manifest(context)
        # Measured, then lost: only the first layers arrive.
        store: Any = local.store
        segments = store._nodes[context.node_id].segments
        half = len(segments) // 2
        segments[half:] = [bytearray(len(s)) for s in segments[half:]]
        for _ in range(3):
            with pytest.raises(CriticalKVError):
                list(local.decode.generate(item))
        other.cancelled.set()
        store.delete(context.node_id)
        with pytest.raises(NodeMissingError):
            list(local.decode.generate(item))
        assert manifest.node_id not in local.decode.resident_ids(99)
        assert_empty(local.decode)
