"""One forward, many policies: each node is the one that its policy makes alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import make_model

from criticalkv.services.local import LocalEngine, LocalNode
from criticalkv.services.local.engine import SALT
from criticalkv.services.prefill.context_pass import ComputedContext
from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    NodeMissingError,
    PolicyError,
)
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import PrefillRequest, PrefillResult

IDS = [int(x) for x in torch.randint(0, 200, (151,), generator=torch.Generator().manual_seed(1))]
TIERS = ("0.1", "0.3", "0.5", "1")
NESTED = [
    "snapkv:window=8",
    "criticaladakv:window=8",
    "default",
    "kvzip",
    "window+model+critical:window=8",
    "criticaladakv-kvpress:window=8",
    "snapkv:window=8,codec=int8",
    "kvzip:codec=int4",
    "dense",
]
STEPWISE = "snapkv:window=8,interval=40,keep=0.5"
NOT_NESTED = "pyramidkv-kvpress:window=2"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.set_num_threads(1)
    return make_model()


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[LocalEngine]:
    with LocalEngine(model, eviction=EvictionConfig(tiers=TIERS)) as made:
        yield made


@contextmanager
def counting_forwards(model: LoadedModel, tokens: int) -> Iterator[list[int]]:
    """Note each forward over the context: so many tokens, from position 0 on."""
    seen: list[int] = []

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs["position_ids"][0]
        if positions.numel() == tokens and int(positions[0]) == 0:
            seen.append(tokens)

    hook = model.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def bytes_of(manifest: Manifest) -> list[tuple[Any, ...]]:
    return [(s.layer, s.tier, s.rows, s.checksum) for s in manifest.segments]


def positions(engine: LocalEngine, node: LocalNode, tier: str) -> list[list[int]]:
    with engine.store.open_get(node.node_id, tier=tier) as reader:
        assert reader.tier == tier
        return [x.positions.tolist() for x in assemble(reader.manifest, tier, reader).layers]


def test_every_node_is_what_its_policy_makes_alone(model: LoadedModel, engine: LocalEngine) -> None:
    """Bit for bit: it is the same forward, and the same engine that publishes."""
    with counting_forwards(model, len(IDS)) as forwards:
        found = engine.compress_each(IDS, [*NESTED, STEPWISE])
    assert len(forwards) == 1
    assert list(found) == [*NESTED, STEPWISE]
    with LocalEngine(model, eviction=EvictionConfig(tiers=TIERS)) as other:
        for policy, nodes in found.items():
            (node,) = set(nodes.values())
            alone = other.compress_tokens(IDS, policy=policy)
            assert node.node_id == alone.node_id
            ours, theirs = engine.manifest(node), other.manifest(alone)
            assert tuple(nodes) == ours.tiers == theirs.tiers
            assert ours.tiers == (("1",) if policy in ("dense", STEPWISE) else TIERS)
            assert ours.tier_lens == theirs.tier_lens
            assert bytes_of(ours) == bytes_of(theirs)
            assert ours.quality == theirs.quality
            assert node.prefill is not None
            assert node.prefill.tier_bytes == tuple(theirs.tier_bytes())


def test_a_tier_that_is_asked_for_is_stored_beside_the_configured_ones(
    engine: LocalEngine,
) -> None:
    found = engine.compress_each(IDS, ["snapkv:window=8"], tiers=(0.4, "0.30"))
    nodes = found["snapkv:window=8"]
    assert list(nodes) == ["0.3", "0.4"]
    assert engine.manifest(nodes["0.4"]).tiers == ("0.1", "0.3", "0.4")
    turn = engine.generate(nodes["0.4"], IDS[:5], tier="0.4", max_tokens=2)
    assert turn.start is not None
    assert turn.start.tier == "0.4"


def test_tiers_that_are_not_nested_are_nodes_of_their_own(
    model: LoadedModel, engine: LocalEngine
) -> None:
    nodes = engine.compress_each(IDS, [NOT_NESTED], tiers=("0.1", "0.3"))[NOT_NESTED]
    assert list(nodes) == ["0.1", "0.3"]
    assert nodes["0.1"].node_id != nodes["0.3"].node_id
    for tier, node in nodes.items():
        assert engine.manifest(node).tiers == (tier,)
        with LocalEngine(model, eviction=EvictionConfig(tiers=("1",))) as other:
            alone = other.compress_tokens(IDS, policy=NOT_NESTED, store_tier=tier)
            assert positions(engine, node, tier) == positions(other, alone, tier)
        # And is asked like any other, turn after turn.
        turn = engine.generate(node, IDS[:5], tier=tier, max_tokens=3)
        assert engine.ask(turn, "And?", max_tokens=2, ignore_eos=True).token_ids


def test_what_cannot_be_compressed_is_refused_before_the_forward(
    model: LoadedModel, engine: LocalEngine
) -> None:
    with counting_forwards(model, len(IDS)) as forwards, pytest.raises(PolicyError):
        engine.compress_each(IDS, ["default", "headkv:profile=" + 64 * "a"])
    assert forwards == []
    limit = model.spec.max_positions
    with counting_forwards(model, limit) as forwards, pytest.raises(ContextLengthError):
        engine.compress_each([5] * limit, ["default"])
    assert forwards == []
    assert len(engine.store) == 0  # type: ignore[arg-type]


def test_another_contexts_forward_is_refused(model: LoadedModel, engine: LocalEngine) -> None:
    """A node's name says what it is computed from."""
    context = ComputedContext.of(model, IDS)
    request = engine._request(IDS[:-1], "snapkv", "1", SALT)
    with pytest.raises(InvalidRequestError):
        engine.prefill.run(request, context=context)
    assert len(engine.store) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["dense", "snapkv:window=8", "kvzip", STEPWISE])
def test_a_forward_that_has_run_counts(
    model: LoadedModel, engine: LocalEngine, policy: str
) -> None:
    """In what a node cost in all; a stepwise policy ran its own."""
    context = replace(ComputedContext.of(model, IDS), forward_s=5000.0)
    request = engine._request(IDS, policy, "1", SALT)
    result = engine.prefill.run(request, context=context)
    with engine.store.open_get(result.node_id) as reader:
        costs = [result.total_ms, reader.manifest.prefill_ms]
    assert [cost >= 5e6 for cost in costs] == 2 * [policy != STEPWISE]
    assert result.total_ms >= result.prefill_ms


def test_the_forward_has_a_deadline(
    model: LoadedModel, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.prefill, "run", None)  # it never comes to that
    with counting_forwards(model, len(IDS)) as forwards, pytest.raises(DeadlineError):
        engine.compress_each(IDS, ["default"], deadline_s=1e-9)
    assert len(forwards) == 1
    assert len(engine.store) == 0  # type: ignore[arg-type]


def test_every_node_has_the_deadline(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    run = engine.prefill.run

    def noting(request: PrefillRequest, **options: Any) -> PrefillResult:
        seen.append(request.deadline_s)
        return run(request, **options)

    monkeypatch.setattr(engine.prefill, "run", noting)
    engine.compress_each(IDS, [*NESTED[:2], NOT_NESTED], tiers=("0.1", "0.3"), deadline_s=70)
    engine.compress_tokens(IDS, deadline_s=80)
    engine.compress("Herons wade at dawn.", policy="dense", deadline_s=90)
    engine.compress("Grey ones rest.", policy="dense")
    assert seen == [*4 * [70], 80, 90, 600]


def test_a_turn_that_is_not_kept_stores_nothing(engine: LocalEngine) -> None:
    node = engine.compress_tokens(IDS, policy="snapkv:window=8", store_tier="0.5")
    kept = engine.generate(node, IDS[:9], max_tokens=4, ignore_eos=True)
    stored = len(engine.store)  # type: ignore[arg-type]
    turn = engine.generate(node, IDS[:9], max_tokens=4, ignore_eos=True, keep=False)
    assert turn.token_ids == kept.token_ids
    assert len(engine.store) == stored  # type: ignore[arg-type]
    with pytest.raises(NodeMissingError):
        engine.ask(turn, "And?")


def test_a_turn_that_is_given_up_ends(engine: LocalEngine) -> None:
    node = engine.compress_tokens(IDS, policy="snapkv:window=8", store_tier="0.5")
    seen = 0

    def check() -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            raise KeyError("enough")

    with pytest.raises(KeyError):
        engine.generate(node, IDS[:9], max_tokens=1500, ignore_eos=True, check=check)
    until = time.monotonic() + 60
    while engine.decode.in_flight and time.monotonic() < until:
        time.sleep(0.01)
    assert not engine.decode.in_flight
    assert seen == 3
