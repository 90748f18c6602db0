"""What a quantized node's manifest says of it: errors per layer, and KL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from criticalkv.services.local import LocalEngine
from criticalkv.services.local.engine import LocalNode
from criticalkv.services.local.memory_store import MemoryWriter
from criticalkv.services.prefill import codec_probe
from criticalkv.services.prefill.engine import _Prefill
from criticalkv.services.prefill.side_forward import SideForward
from criticalkv.shared.cache.quality import CodecQuality
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.errors import CancelledError, DeadlineError
from criticalkv.shared.model.attention import LayerCall, forward
from criticalkv.shared.model.loader import LoadedModel

Factory = Callable[..., LoadedModel]
DRAW = torch.Generator().manual_seed(21)
IDS = [int(t) for t in torch.randint(0, 256, (90,), generator=DRAW)]
PARENT = [int(t) for t in torch.randint(0, 256, (40,), generator=DRAW)]
PROBES = 32
TIERS = EvictionConfig(tiers=("0.2", "0.5"))


class Reading:
    """AttentionPlan in plain loops: one query sees stored entries by position, and its tail."""

    def __init__(self, caches: Sequence[RaggedCache], start: int) -> None:
        self.caches = caches
        self.start = start  # position of the first query; later entries are not read

    def attend(self, call: LayerCall) -> Tensor:
        out = torch.empty_like(call.query)
        group = call.query.shape[0] // call.key.shape[0]
        for h in range(call.query.shape[0]):
            kv = h // group
            parts = [cache.layers[call.layer].head(kv) for cache in self.caches]
            keys, values, positions = (torch.cat(part) for part in zip(*parts, strict=True))
            for q in range(call.query.shape[1]):
                oldest = -1 if call.window is None else self.start + q - call.window
                there = (positions < self.start) & (positions > oldest)
                first = max(0, oldest + 1 - self.start)
                k = torch.cat([keys[there], call.key[kv, first : q + 1]]).double()
                v = torch.cat([values[there], call.value[kv, first : q + 1]]).double()
                weights = (k @ call.query[h, q].double() * call.scaling).softmax(0)
                out[h, q] = (weights @ v).float()
        return out


def logprobs(
    model: LoadedModel, caches: Sequence[RaggedCache], ids: Sequence[int], start: int
) -> Tensor:
    tokens = torch.tensor(ids)
    positions = torch.arange(start, start + len(ids))
    every = torch.arange(len(ids))
    logits = forward(model.model, tokens, positions, Reading(caches, start), every)
    return logits.double().log_softmax(-1)


def kl(exact: Tensor, other: Tensor) -> float:
    return float((exact.exp() * (exact - other)).sum(-1).mean())


def read(engine: LocalEngine, node: LocalNode) -> RaggedCache:
    with engine.store.open_get(node.node_id) as reader:
        return assemble(reader.manifest, reader.tier, reader)


def codec(engine: LocalEngine, node: LocalNode) -> CodecQuality:
    quality = engine.manifest(node).quality
    assert quality is not None
    assert quality.codec is not None
    return quality.codec


def error(exact: Sequence[Tensor], stored: Sequence[Tensor]) -> float:
    a, b = torch.cat(list(exact)).double(), torch.cat(list(stored)).double()
    return float((a - b).norm() / a.norm())


@pytest.mark.parametrize("policy", ["snapkv", "window+model+critical", "default"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_errors_are_those_of_what_readers_get(policy: str, bits: str, tiny_model: Factory) -> None:
    with LocalEngine(tiny_model(), eviction=TIERS) as engine:
        raw = engine.compress_tokens(IDS, policy=policy, store_tier="0.5")
        node = engine.compress_tokens(IDS, policy=f"{policy}:codec={bits}", store_tier="0.5")
        exact, stored, found = read(engine, raw), read(engine, node), codec(engine, node)
    assert len(found.key_error) == len(found.value_error) == len(exact.layers)
    for index, (a, b) in enumerate(zip(exact.layers, stored.layers, strict=True)):
        assert torch.equal(a.positions, b.positions)
        assert found.key_error[index] == pytest.approx(error([a.keys], [b.keys]), rel=1e-3)
        assert found.value_error[index] == pytest.approx(error([a.values], [b.values]), rel=1e-3)
    assert all(0 < e < (0.02 if bits == "int8" else 0.3) for e in found.key_error)


@pytest.mark.parametrize("policy", ["snapkv", "default"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("has_parent", [False, True])
def test_kl_is_that_of_two_reads(
    policy: str, family: str, has_parent: bool, tiny_model: Factory
) -> None:
    """Of a raw and a quantized node, each by itself, forced on the same tokens."""
    model = tiny_model(family)
    with LocalEngine(model, eviction=TIERS) as engine:
        parent = None
        if has_parent:
            parent = engine.compress_tokens(PARENT, policy="snapkv:codec=int8", store_tier="0.5")
        nodes = [
            engine.compress_tokens(
                IDS, policy=f"{policy}:codec={name}", store_tier="0.5", parent=parent
            )
            for name in ("raw", "int4")
        ]
        above = [read(engine, parent)] if parent else []
        found = codec(engine, nodes[1]).kl
        start = (len(PARENT) if parent else 0) + len(IDS) - PROBES
        raw, small = (
            logprobs(model, [*above, read(engine, node)], IDS[-PROBES:], start) for node in nodes
        )
    assert kl(raw, small) > 1e-5
    assert found == pytest.approx(kl(raw, small), rel=1e-3)


def test_fewer_bits_cost_more(tiny_model: Factory) -> None:
    with LocalEngine(tiny_model()) as engine:
        small, smaller = (
            codec(engine, engine.compress_tokens(IDS, policy=f"snapkv:codec={name}")).kl
            for name in ("int8", "int4")
        )
    assert small is not None
    assert smaller is not None
    assert 0 < 10 * small < smaller


@pytest.mark.parametrize(("count", "asked"), [(1, 0), (2, 1), (20, 19)])
def test_a_short_context(count: int, asked: int, tiny_model: Factory) -> None:
    model = tiny_model()
    with LocalEngine(model) as engine:
        nodes = [
            engine.compress_tokens(IDS[:count], policy=f"snapkv:codec={name}")
            for name in ("raw", "int4")
        ]
        found = codec(engine, nodes[1]).kl
        if not asked:
            assert found is None
            return
        raw, small = (
            logprobs(model, [read(engine, node)], IDS[count - asked : count], count - asked)
            for node in nodes
        )
    assert found == pytest.approx(kl(raw, small), rel=1e-3, abs=1e-9)


def test_a_stepwise_node_is_measured_too(tiny_model: Factory) -> None:
    policy = "window+uniform+plain:interval=32,keep=0.5,window=8,codec=int4"
    with LocalEngine(tiny_model()) as engine:
        node = engine.compress_tokens(IDS, policy=policy)
        quality, found = engine.manifest(node).quality, codec(engine, node)
    assert quality is not None
    assert quality.tiers == ()
    assert found.kl is not None
    assert found.kl > 0


@pytest.mark.parametrize("policy", ["snapkv", "default"])
def test_the_node_is_the_same_without_the_probe(
    policy: str, tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = tiny_model(), []
    for watched in (True, False):
        with LocalEngine(model, eviction=TIERS) as engine:
            node = engine.compress_tokens(IDS, policy=f"{policy}:codec=int8", store_tier="0.5")
            manifest = engine.manifest(node)
            assert manifest.quality is not None
            assert (manifest.quality.codec is not None) == watched
            found.append((manifest.segments, manifest.tier_lens, manifest.quality.tiers))
        monkeypatch.setattr(_Prefill, "_watch", lambda *_: None)
    assert found[0] == found[1]


def test_each_layer_goes_before_the_next_one_is_computed(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probes' pass follows; it holds no layer back, and is done with it before it is sent."""
    events: list[str] = []
    attend, send = codec_probe.CodecProbe._attend, MemoryWriter.send

    def attending(self: Any, call: LayerCall, kept: Any) -> Tensor:
        events.append(f"probe {call.layer}")
        return attend(self, call, kept)

    def sending(self: Any, payload: Any) -> None:
        events.append("send")
        send(self, payload)

    monkeypatch.setattr(codec_probe.CodecProbe, "_attend", attending)
    monkeypatch.setattr(MemoryWriter, "send", sending)
    with LocalEngine(tiny_model(), eviction=EvictionConfig(tiers=("0.5",))) as engine:
        engine.compress_tokens(IDS, policy="snapkv:codec=int8", store_tier="0.5")
    assert events == ["probe 0", "send", "probe 1", "send", "probe 2", "send"]


@pytest.mark.parametrize("layer", [0, 2])
def test_a_failed_probe_fails_the_prefill_and_leaves_no_thread(
    layer: int, tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Any, call: LayerCall, __: Any) -> Tensor:
        if call.layer == layer:
            raise RuntimeError("planted")
        return call.query

    monkeypatch.setattr(codec_probe.CodecProbe, "_attend", failing)
    with LocalEngine(tiny_model()) as engine:
        with pytest.raises(RuntimeError, match="planted"):
            engine.compress_tokens(IDS, policy="snapkv:codec=int8")
        assert not engine.store._nodes  # type: ignore[attr-defined]
    assert not side_threads()


def test_a_cancelled_prefill_leaves_no_thread(
    tiny_model: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelling(*_: Any) -> None:
        raise CancelledError("planted")

    monkeypatch.setattr(MemoryWriter, "send", cancelling)
    with LocalEngine(tiny_model()) as engine, pytest.raises(CancelledError, match="planted"):
        engine.compress_tokens(IDS, policy="snapkv:codec=int8")
    assert not side_threads()


def side_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("side-forward")]


def call(layer: int) -> LayerCall:
    return LayerCall(layer, torch.zeros(1), torch.zeros(1), torch.zeros(1), 1.0, None)


def test_a_side_pass_goes_on_only_as_it_is_shown() -> None:
    log: list[str] = []

    def run(plan: Any) -> Tensor:
        for layer in range(3):
            log.append(f"before {layer}")
            plan.attend(call(layer))
        return torch.tensor(7)

    def attend(asked: LayerCall, shown: str) -> Tensor:
        log.append(f"{shown} at {asked.layer}")
        return torch.zeros(1)

    side: SideForward[str] = SideForward(run, attend, 30.0)
    with side:
        assert log == ["before 0"]
        side.show("a")
        assert log[1:] == ["a at 0", "before 1"]
        side.show("b")
        side.show("c")
        assert log[3:] == ["b at 1", "before 2", "c at 2"]
        assert int(side.result()) == 7


def test_a_side_pass_that_hangs_is_given_up() -> None:
    release = threading.Event()

    def attend(*_: Any) -> Tensor:
        release.wait(30.0)
        return torch.zeros(1)

    side: SideForward[str] = SideForward(lambda plan: plan.attend(call(0)), attend, 30.0)
    with side:
        side._timeout_s = 0.2
        with pytest.raises(DeadlineError):
            side.show("a")
        release.set()
    assert not side_threads()


def test_a_pass_that_nobody_shows_anything_ends() -> None:
    side: SideForward[str] = SideForward(lambda plan: plan.attend(call(0)), torch.add, 2.0)
    with side, pytest.raises(DeadlineError):
        side.result()


def test_a_pass_that_fails_at_once_leaves_no_thread() -> None:
    def failing(_: Any) -> Tensor:
        raise RuntimeError("planted")

    side: SideForward[str] = SideForward(failing, torch.add, 30.0)
    with pytest.raises(RuntimeError, match="planted"):
        side.__enter__()
    assert not side_threads()


def test_raw_nodes_have_no_codec_figures(tiny_model: Factory) -> None:
    with LocalEngine(tiny_model()) as engine:
        quality = engine.manifest(engine.compress_tokens(IDS, policy="snapkv")).quality
    assert quality is not None
    assert quality.codec is None
