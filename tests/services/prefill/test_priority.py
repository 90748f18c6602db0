"""Background prefills stand back, give memory up, and never block anybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from criticalkv.services.local.engine import SALT
from criticalkv.services.local.memory_store import MemoryStore
from criticalkv.services.prefill import context_pass
from criticalkv.services.prefill.engine import PrefillEngine
from criticalkv.services.prefill.spool import Spool
from criticalkv.shared.config import EvictionConfig, PrefillConfig
from criticalkv.shared.errors import CancelledError, DeadlineError, OverloadedError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import Identity, tokens_digest
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import PrefillRequest

IDS = [int(t) for t in torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(5))]


class Gates:
    """Lets a test stop runs before a layer and see which layers ran in which order.

    Runs are told apart by their number of tokens.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list[tuple[int, int]] = []
        self._closed: dict[tuple[int, int], threading.Event] = {}
        self._reached: dict[tuple[int, int], threading.Event] = {}
        attend = context_pass.ContextPass.attend

        def gated(plan: Any, call: Any) -> Any:
            at = (call.query.shape[1], call.layer)
            if at in self._closed:
                self._reached[at].set()
                assert self._closed[at].wait(20)
            out = attend(plan, call)
            self.layers.append(at)
            return out

        monkeypatch.setattr(context_pass.ContextPass, "attend", gated)

    def close(self, tokens: int, layer: int) -> None:
        self._closed[(tokens, layer)] = threading.Event()
        self._reached[(tokens, layer)] = threading.Event()

    def reached(self, tokens: int, layer: int) -> None:
        assert self._reached[(tokens, layer)].wait(20)

    def open(self, tokens: int, layer: int) -> None:
        self._closed[(tokens, layer)].set()


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Gates:
    return Gates(monkeypatch)


@pytest.fixture
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model()


@pytest.fixture
def engine(model: LoadedModel) -> PrefillEngine:
    return PrefillEngine(model, MemoryStore(), PrefillConfig(), EvictionConfig())


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def request(
    model: LoadedModel, tokens: int, policy: str = "snapkv", **fields: Any
) -> PrefillRequest:
    spec, ids = model.spec, tuple(IDS[:tokens])
    identity = Identity(
        model_digest=spec.model_digest,
        tokenizer_digest=spec.tokenizer_digest,
        dtype=spec.dtype,
        policy=Policy.parse(policy).canonical(),
        salt=SALT,
        tokens=tokens_digest(ids),
    )
    return PrefillRequest(
        node_id=identity.node_id,
        token_ids=ids,
        policy=identity.policy,
        store_tier="0.4",
        salt=SALT,
        **fields,
    )


def stored(engine: PrefillEngine, wanted: PrefillRequest) -> bool:
    assert isinstance(engine._store, MemoryStore)
    return wanted.node_id in engine._store._nodes


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def full_bytes(model: LoadedModel, tokens: int) -> int:
    spec = model.spec
    return tokens * spec.num_layers * spec.num_kv_heads * 2 * spec.head_dim * 4


@contextmanager
def standing_back(engine: PrefillEngine) -> Iterator[threading.Event]:
    """Yield an event that is set once a run has found others running, and looks again."""
    waits, looks, stand_back = threading.Event(), [0], engine._priority.stand_back

    def noting(check: Callable[[], None]) -> None:
        def counted() -> None:
            looks[0] += 1
            if looks[0] > 1:
                waits.set()
            check()

        looks[0] = 0
        stand_back(counted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._priority, "stand_back", noting)
        yield waits


@pytest.mark.parametrize("policy", ["snapkv", "default"])
def test_a_background_run_stands_back_while_another_runs(
    policy: str, engine: PrefillEngine, model: LoadedModel, gates: Gates, pool: ThreadPoolExecutor
) -> None:
    gates.close(60, 1)
    gates.close(40, 1)
    late = pool.submit(engine.run, request(model, 60, policy, background=True))
    gates.reached(60, 1)
    first = pool.submit(engine.run, request(model, 40))
    gates.reached(40, 1)
    with standing_back(engine) as waits:
        gates.open(60, 1)
        assert waits.wait(20)
    # Its layer 1 begins with a check, and waits there.
    assert gates.layers == [(60, 0), (40, 0)]
    gates.open(40, 1)
    assert first.result(20).published
    assert late.result(20).published
    assert gates.layers[:4] == [(60, 0), (40, 0), (40, 1), (40, 2)]


def test_background_runs_do_not_wait_for_each_other(
    engine: PrefillEngine, model: LoadedModel, gates: Gates, pool: ThreadPoolExecutor
) -> None:
    gates.close(60, 1)
    held = pool.submit(engine.run, request(model, 60, background=True))
    gates.reached(60, 1)
    assert engine.run(request(model, 40, background=True)).published
    gates.open(60, 1)
    assert held.result(20).published


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_run_that_stands_back_can_be_ended(
    how: str, engine: PrefillEngine, model: LoadedModel, gates: Gates, pool: ThreadPoolExecutor
) -> None:
    gates.close(40, 1)
    first = pool.submit(engine.run, request(model, 40))
    gates.reached(40, 1)
    cancelled = threading.Event()
    wanted = request(
        model, 60, background=True, **({"deadline_s": 0.3} if how == "deadline" else {})
    )
    with standing_back(engine) as waits:
        late = pool.submit(engine.run, wanted, cancelled)
        if how == "cancel":  # the deadline may come first
            assert waits.wait(20)
            assert not late.done()
            cancelled.set()
        with pytest.raises(CancelledError if how == "cancel" else DeadlineError):
            late.result(20)
    assert not stored(engine, wanted)
    gates.open(40, 1)
    assert first.result(20).published


def test_memory_that_a_background_run_holds_is_given_to_others(
    engine: PrefillEngine, model: LoadedModel, gates: Gates, pool: ThreadPoolExecutor
) -> None:
    """The others wait for it, instead of failing; it is asked again later."""
    engine._spool._limit = full_bytes(model, 70)
    gates.close(60, 1)
    wanted = request(model, 60, "default", background=True)
    late = pool.submit(engine.run, wanted)
    gates.reached(60, 1)
    first = pool.submit(engine.run, request(model, 40, "default"))
    until(lambda: engine._spool._claims == 1)
    assert not first.done()
    gates.open(60, 1)
    assert first.result(20).published
    with pytest.raises(OverloadedError, match="made room"):
        late.result(20)
    assert not stored(engine, wanted)
    assert (engine._spool._used, engine._spool._lent, engine._spool._claims) == (0, 0, 0)
    assert engine.run(wanted).published


def test_a_run_that_already_stands_back_gives_its_memory_up(
    engine: PrefillEngine, model: LoadedModel, gates: Gates, pool: ThreadPoolExecutor
) -> None:
    engine._spool._limit = full_bytes(model, 70)
    gates.close(60, 1)
    gates.close(30, 1)
    late = pool.submit(engine.run, request(model, 60, "default", background=True))
    gates.reached(60, 1)
    streaming = pool.submit(engine.run, request(model, 30))  # needs no memory
    gates.reached(30, 1)
    with standing_back(engine) as waits:
        gates.open(60, 1)
        assert waits.wait(20)
        assert engine._spool._lent > 0
        assert engine.run(request(model, 40, "default")).published
        with pytest.raises(OverloadedError):
            late.result(20)
    assert engine._spool._lent == 0
    gates.open(30, 1)
    assert streaming.result(20).published


def test_a_background_run_that_holds_no_memory_is_not_ended_for_it(
    engine: PrefillEngine, model: LoadedModel, gates: Gates, pool: ThreadPoolExecutor
) -> None:
    gates.close(60, 1)
    late = pool.submit(engine.run, request(model, 60, background=True))
    gates.reached(60, 1)
    engine._spool._claims = 1
    gates.open(60, 1)
    assert late.result(20).published


def test_others_that_run_are_still_no_reason_to_wait() -> None:
    spool = Spool(100)
    with spool.reserve(60), pytest.raises(OverloadedError, match="full"), spool.reserve(50):
        pass
    with spool.reserve(30, background=True), spool.reserve(60):
        with pytest.raises(OverloadedError, match="full"), spool.reserve(50):
            pass  # not even without the background run
        with pytest.raises(OverloadedError, match="full"), spool.reserve(20, background=True):
            pass
    assert spool._used == spool._lent == 0


def test_whoever_waits_for_memory_can_be_ended() -> None:
    spool = Spool(100)

    def stop() -> None:
        raise CancelledError("stop")

    with spool.reserve(60, background=True):
        with pytest.raises(CancelledError), spool.reserve(50, stop):
            pass
        spool.check_loan()  # nobody claims it any more
    assert spool._used == spool._lent == 0
