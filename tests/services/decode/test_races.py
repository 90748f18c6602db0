"""Moments at which threads meet, and faults that must stay with the one they befall."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from decode_requests import (
    assert_empty,
    capacity,
    config,
    ids,
    is_end,
    request,
    tokens_of,
    until_end,
    wait_until,
)
from small_pool import SALT, SmallPool

from criticalkv.services.decode import engine as engine_module
from criticalkv.services.decode import preparation as preparation_module
from criticalkv.services.decode.engine import DecodeEngine
from criticalkv.services.decode.opening import ChainOpener, OpenedChain
from criticalkv.services.decode.resident import ResidentNode, Residents
from criticalkv.services.decode.sequence import Sequence
from criticalkv.services.decode.stepwise_kv import StepwiseKV
from criticalkv.services.local import LocalEngine, LocalNode
from criticalkv.services.local.memory_store import MemoryReader, MemoryStore
from criticalkv.shared.errors import (
    CancelledError,
    CriticalKVError,
    NodeMissingError,
    NumericsError,
    StoreUnavailableError,
    WorkerLostError,
)
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import DecodeDelta, DecodeEnd, DecodeStart

Factory = Callable[..., LoadedModel]
Events = queue.SimpleQueue[Any]
STEPWISE = "window+uniform+plain:interval=8,keep=0.5,window=2"
LENS, NODE_PAGES = [[[4, 4, 4], [4, 4, 4]]], 6  # of four slots


class WatchedStore(MemoryStore):
    """Calls hooks before and after a node's entries are read; they may wait, or raise."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[str], None] = lambda _: None
        self.after: Callable[[str], None] = lambda _: None

    def open_get(self, node_id: str, **options: Any) -> MemoryReader:
        reader = super().open_get(node_id, **options)
        return reader if options.get("layers") is not None else WatchedReader(self, reader)


class WatchedReader(MemoryReader):
    """See WatchedStore."""

    def __init__(self, store: WatchedStore, reader: MemoryReader) -> None:
        super().__init__(reader.manifest, reader._segments, reader.tier, None)
        self._store = store

        self._is_read = False

    def __iter__(self) -> Iterator[tuple[int, memoryview]]:
        self._is_read = True
        self._store.before(self.manifest.node_id)
        yield from super().__iter__()

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._is_read and kind is None:
            self._store.after(self.manifest.node_id)


@pytest.fixture
def watched() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def local(tiny_model: Factory, watched: WatchedStore) -> Iterator[LocalEngine]:
    """A pool with room for all, over a store that can be slow or fail."""
    with LocalEngine(tiny_model(), watched, decode=config(pool_mb=8)) as engine:
        yield engine


@pytest.fixture
def context(local: LocalEngine) -> LocalNode:
    return local.compress_tokens(ids(200, 1), policy="default")


@contextmanager
def step_thread_held(engine: DecodeEngine) -> Iterator[Callable[[int], None]]:
    """Hold the step thread in a listener; yields what waits until so many are measured."""
    is_held, release = threading.Event(), threading.Event()

    def listen(event: Any) -> None:
        if isinstance(event, DecodeEnd):
            is_held.set()
            release.wait(20)

    engine.submit(request(None, (), publish=False, sampling={"max_tokens": 1}), listen)
    assert is_held.wait(10)
    before = engine._inbox.qsize()
    try:
        yield lambda count: wait_until(lambda: engine._inbox.qsize() >= before + count)
    finally:
        release.set()


def run_long(engine: DecodeEngine, tokens: int = 1500) -> tuple[Sequence, Events]:
    """Begin a long turn without a context; it runs when this returns."""
    events: Events = queue.SimpleQueue()
    item = request(None, (), publish=False, sampling={"max_tokens": tokens})
    sequence = engine.submit(item, events.put)
    assert isinstance(events.get(timeout=10), DecodeStart)
    return sequence, events


def assert_unharmed(running: tuple[Sequence, Events]) -> None:
    """A turn of `run_long` ends as a turn."""
    sequence, events = running
    sequence.cancelled.set()
    assert isinstance(until_end(events)[-1], DecodeEnd)


def preempt_once(
    engine: DecodeEngine, monkeypatch: pytest.MonkeyPatch, *, parent: str | None
) -> list[Sequence]:
    """Let one over `parent` make room when it has ten tokens, as if the pool were full."""
    step = engine._step
    made_room: list[Sequence] = []

    def stepping() -> bool:
        progressed = step()
        for sequence in list(engine._running):
            is_meant = sequence.request.parent == parent and len(sequence.generated) == 10
            if is_meant and not made_room:
                made_room.append(sequence)
                engine._preempt(sequence)
        return progressed

    monkeypatch.setattr(engine, "_step", stepping)
    return made_room


def ends_after_closing(events: Events) -> list[Any]:
    """All ends that ever came, once nobody is left who could tell more."""
    return [e for e in [events.get() for _ in range(events.qsize())] if is_end(e)]


# -- the pool ------------------------------------------------------------------


def test_a_node_cannot_be_dropped_between_being_found_and_being_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread drops all unused nodes at just that moment: it has to wait."""
    pool = SmallPool()
    manifest, cache = pool.publish(LENS)
    pool.residents.leave(pool.hold(manifest, cache))
    chain = pool.opener.measure(manifest.node_id, SALT, ("1",), lambda: None)
    find = Residents.find
    dropping = threading.Thread(target=pool.residents.make_room, args=(pool.pages.total,))

    def found_then_dropped(self: Residents, node_id: str, tier: str) -> ResidentNode | None:
        node = find(self, node_id, tier)
        dropping.start()
        dropping.join(0.2)  # all the time it needs, if it is not made to wait
        return node

    monkeypatch.setattr(Residents, "find", found_then_dropped)
    opened = pool.opener.open(chain, own=2)
    monkeypatch.undo()
    dropping.join(10)
    assert opened is not None
    node = opened.views[0].node
    others = pool.pages.take(pool.pages.free)
    assert others is not None
    assert not {*others.tolist(), *opened.own.tolist()} & set(node.pages.tolist())
    pool.pages.give_back(others)
    pool.pages.give_back(opened.own)
    pool.residents.leave(node)
    pool.assert_empty()


def test_room_for_an_ancestor_is_not_made_of_its_unused_descendant() -> None:
    pool = SmallPool(total=2 * NODE_PAGES)
    root, _ = pool.publish(LENS)
    leaf, leaf_cache = pool.publish(LENS, parent=root, seed=1)
    pool.residents.leave(pool.hold(leaf, leaf_cache))  # least recently used
    other = pool.hold(*pool.publish(LENS, seed=2))
    pool.residents.leave(other)
    chain = pool.opener.measure(leaf.node_id, SALT, ("1", "1"), lambda: None)
    opened = pool.opener.open(chain, own=0)
    assert opened is not None
    assert [node.manifest for node in opened.to_pull] == [root]
    assert pool.residents.find(other.manifest.node_id, "1") is None


def test_room_that_vanishes_before_it_is_taken_makes_the_request_wait(
    local: LocalEngine, context: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a node that was on its way fails between the look for room and the taking."""
    running = run_long(local.decode)
    opened, vanishing = ChainOpener.open, iter(range(1, 4))

    def full_at_first(self: ChainOpener, *args: Any) -> OpenedChain | None:
        return None if next(vanishing, 0) else opened(self, *args)

    monkeypatch.setattr(ChainOpener, "open", full_at_first)
    events = list(local.decode.generate(request(context, ("0.4",))))
    assert isinstance(events[-1], DecodeEnd)
    assert_unharmed(running)
    assert_empty(local.decode)


def test_a_turn_begins_at_no_tier_at_which_it_could_not_end(tiny_model: Factory) -> None:
    """Nobody could make room for it later, and everybody behind it would wait."""
    with LocalEngine(tiny_model(), decode=config()) as small:
        fits = capacity(small.decode, small.model.spec)
        context = small.compress_tokens(ids(fits // 2, 1), policy="default")
        sampling = {"max_tokens": fits * 7 // 10}
        item = request(context, ("1",), min_tier="0.05", deadline_s=40, sampling=sampling)
        events: list[Any] = list(small.decode.generate(item))
        assert float(events[0].tier) < 1
        assert len(tokens_of(events)) == fits * 7 // 10
        assert_empty(small.decode)


def test_a_stepwise_turn_that_cannot_be_prepared_gives_its_pages_back(
    local: LocalEngine, context: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise MemoryError("planted")

    monkeypatch.setattr(preparation_module, "copied_chain", broken)
    with pytest.raises(CriticalKVError, match="MemoryError"):
        list(local.decode.generate(request(context, ("0.4",), policy=STEPWISE)))
    assert_empty(local.decode)


# -- pulls ---------------------------------------------------------------------


def test_who_starts_before_its_context_has_come_fails_alone(
    local: LocalEngine, context: LocalNode, watched: WatchedStore
) -> None:
    """Two wait at once; the first runs while its context is pulled, which fails."""

    def lost(node_id: str) -> None:
        raise NodeMissingError.of(node_id, "planted")

    watched.before = lost
    first: Events = queue.SimpleQueue()
    second: Events = queue.SimpleQueue()
    with step_thread_held(local.decode) as wait_for_measured:
        local.decode.submit(request(context, ("0.4",)), first.put)
        wait_for_measured(1)
        local.decode.submit(request(None, ()), second.put)
        wait_for_measured(2)
    assert isinstance(until_end(first)[-1], NodeMissingError)
    assert isinstance(until_end(second)[-1], DecodeEnd)
    assert_empty(local.decode)


@pytest.mark.parametrize("beside", ["nobody", "another"])
def test_a_pull_that_fails_when_all_has_come_harms_nobody(
    local: LocalEngine, context: LocalNode, watched: WatchedStore, beside: str
) -> None:
    item = request(context, ("0.4",), publish=False, sampling={"max_tokens": 60})
    right = tokens_of(list(local.decode.generate(item)))
    assert_empty(local.decode)
    other = run_long(local.decode) if beside == "another" else None
    has_begun, has_failed = threading.Event(), threading.Event()

    def fail_late(_: str) -> None:
        has_begun.wait(10)
        has_failed.set()
        raise StoreUnavailableError("planted at the stream's end")

    events: Events = queue.SimpleQueue()

    def listen(event: Any) -> None:
        events.put(event)
        if isinstance(event, DecodeDelta):
            has_begun.set()
            has_failed.wait(10)

    watched.after = fail_late
    local.decode.submit(item, listen)
    assert tokens_of(until_end(events)) == right
    assert has_failed.is_set()
    if other is not None:
        assert_unharmed(other)
    assert_empty(local.decode)


@pytest.mark.parametrize("nodes", ["one", "several"])
def test_waiting_for_slow_nodes_keeps_no_other_request_waiting(
    local: LocalEngine, context: LocalNode, watched: WatchedStore, nodes: str
) -> None:
    """As many wait for them as there are threads that read."""
    release, count = threading.Event(), engine_module.IO_THREADS
    contexts = [context] * count
    if nodes == "several":
        contexts = [local.compress_tokens(ids(60, n), policy="snapkv") for n in range(count)]

    def hang(_: str) -> None:
        release.wait(20)

    watched.before = hang
    running = run_long(local.decode)
    events: Events = queue.SimpleQueue()
    try:
        for slow in contexts:
            local.decode.submit(request(slow, ("0.4",)), events.put)
        wait_until(lambda: len(local.decode._opening) == count)
        answered = list(local.decode.generate(request(None, (), deadline_s=5)))
        assert isinstance(answered[-1], DecodeEnd)
    finally:
        release.set()
    for _ in contexts:
        assert isinstance(until_end(events)[-1], DecodeEnd)
    assert_unharmed(running)


@pytest.mark.parametrize("beside", ["nobody", "another"])
def test_a_pull_that_ends_late_says_nothing_about_a_later_opening(
    local: LocalEngine,
    context: LocalNode,
    watched: WatchedStore,
    monkeypatch: pytest.MonkeyPatch,
    beside: str,
) -> None:
    """A turn runs as its layers have come, makes room, and is being read back again.

    Only now does its first pull end: it must not run before its own KV is there.
    """
    engine = local.decode
    item = request(context, ("0.4",), publish=False, sampling={"max_tokens": 60})
    right = tokens_of(list(engine.generate(item)))
    assert_empty(engine)
    other = run_long(engine) if beside == "another" else None
    is_read_back, has_reported = threading.Event(), threading.Event()
    prepared = engine._prepared

    def noting(*args: Any) -> None:
        prepared(*args)
        has_reported.set()

    def read_back_slowly(node_id: str) -> None:
        if node_id != context.node_id:
            is_read_back.set()
            has_reported.wait(0.5)  # one that ran alone has nothing to report
            time.sleep(0.2)  # a slow store: steps go on meanwhile

    def end_late(node_id: str) -> None:
        if node_id == context.node_id:
            is_read_back.wait(10)

    watched.before, watched.after = read_back_slowly, end_late
    monkeypatch.setattr(engine, "_prepared", noting)
    made_room = preempt_once(engine, monkeypatch, parent=context.node_id)
    events: Events = queue.SimpleQueue()
    engine.submit(item, events.put)
    assert tokens_of(until_end(events)) == right
    assert len(made_room) == 1
    assert is_read_back.is_set()
    if other is not None:
        assert_unharmed(other)
    assert_empty(engine)


# -- ends ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "error"), [("cancelled", CancelledError), ("closed", WorkerLostError)]
)
def test_a_request_given_up_before_it_branches_ends_once(
    tiny_model: Factory, how: str, error: type[CriticalKVError]
) -> None:
    """Its prompt is still running: nobody would ever end the other choices."""
    events: Events = queue.SimpleQueue()
    slow = config(pool_mb=8, max_num_seqs=2, max_num_batched_tokens=2)
    with LocalEngine(tiny_model(), decode=slow) as local:
        item = request(None, (), token_ids=tuple(ids(900, 1)), branch_seeds=(1, 2))
        sequence = local.decode.submit(item, events.put)
        assert isinstance(events.get(timeout=10), DecodeStart)
        if how == "cancelled":
            sequence.cancelled.set()
            assert_empty(local.decode)
    assert [type(end) for end in ends_after_closing(events)] == [error]


def test_choices_that_fail_together_end_with_one_error(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, good = engine_module.forward, iter(range(3))

    def broken_later(*args: Any) -> torch.Tensor:
        out: torch.Tensor = forward(*args)
        return out if next(good, None) is not None else out * float("nan")

    monkeypatch.setattr(engine_module, "forward", broken_later)
    events: Events = queue.SimpleQueue()
    with LocalEngine(tiny_model(), decode=config(pool_mb=8)) as local:
        item = request(None, (), branch_seeds=(1, 2), sampling={"max_tokens": 20})
        local.decode.submit(item, events.put)
        assert_empty(local.decode)
    assert [type(end) for end in ends_after_closing(events)] == [NumericsError]


@pytest.mark.parametrize("kind", [DecodeStart, DecodeDelta, CriticalKVError])
def test_a_listener_that_fails_ends_its_own_request_only(
    local: LocalEngine, kind: type[Any]
) -> None:
    running = run_long(local.decode)
    gone = threading.Event()

    def listen(event: Any) -> None:
        if isinstance(event, kind):
            gone.set()
        if gone.is_set():
            raise RuntimeError("the event loop is closed")

    late = {"deadline_s": 0.3, "sampling": {"max_tokens": 1500}}
    fields: dict[str, Any] = late if kind is CriticalKVError else {}
    local.decode.submit(request(None, (), publish=False, **fields), listen)
    wait_until(lambda: gone.is_set() and local.decode.in_flight <= 1)
    local.decode.check_health()
    assert_unharmed(running)
    assert_empty(local.decode)


def test_who_fails_at_a_steps_end_takes_no_others_logits_along(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two stepwise turns fails; the second's next token is still its own."""
    stepwise: dict[str, Any] = {"policy": STEPWISE, "publish": False}
    prompts = tuple(ids(5, 5)), tuple(ids(6, 6))
    long = request(None, (), token_ids=prompts[0], sampling={"max_tokens": 400}, **stepwise)
    short = request(None, (), token_ids=prompts[1], sampling={"max_tokens": 40}, **stepwise)
    right = tokens_of(list(local.decode.generate(short)))
    end_step = StepwiseKV.end_step

    def failing(self: StepwiseKV) -> None:
        first, *others = sorted(local.decode._running, key=lambda s: s.arrival)
        if first.kv is self and first.generated and any(len(s.generated) > 2 for s in others):
            raise NumericsError("planted")
        end_step(self)

    monkeypatch.setattr(StepwiseKV, "end_step", failing)
    failed: Events = queue.SimpleQueue()
    unharmed: Events = queue.SimpleQueue()
    with step_thread_held(local.decode) as wait_for_measured:
        local.decode.submit(long, failed.put)
        local.decode.submit(short, unharmed.put)
        wait_for_measured(2)
    assert isinstance(until_end(failed)[-1], NumericsError)
    assert tokens_of(until_end(unharmed)) == right
    assert_empty(local.decode)


def put_for(local: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the tenants that nodes are put for."""
    store, tenants = local.decode._publication._store, []
    open_put = store.open_put

    def noted(*args: Any, **how: Any) -> Any:
        tenants.append(how["tenant"])
        return open_put(*args, **how)

    monkeypatch.setattr(store, "open_put", noted)
    return tenants


def test_a_turn_that_ends_where_another_was_swapped_out_is_a_node_of_its_own(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt and tokens: but its last token is pending, and it is kept longer."""
    prompt = tuple(ids(20, 1))
    made_room = preempt_once(local.decode, monkeypatch, parent=None)
    long = request(None, (), token_ids=prompt, sampling={"max_tokens": 50}, tenant="ab")
    short = request(None, (), token_ids=prompt, sampling={"max_tokens": 10})
    tenants = put_for(local, monkeypatch)
    swapped: list[Any] = list(local.decode.generate(long))
    # Whose quota what was swapped out counts against, and the turn: the pool was short.
    assert tenants == ["", long.tenant]
    assert len(made_room) == swapped[-1].preemptions == 1
    events: list[Any] = list(local.decode.generate(short))
    manifest = local.manifest(LocalNode(events[-1].node_id, (), False))
    assert manifest.num_tokens == len(prompt) + 9
    assert manifest.pending_ids[0] == tokens_of(events)[-1]
