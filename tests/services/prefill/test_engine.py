"""The prefill engine: tiers, chains, cancellation, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from criticalkv.services.local import LocalEngine
from criticalkv.services.local.engine import SALT
from criticalkv.services.local.memory_store import MemoryStore, MemoryWriter
from criticalkv.services.prefill import context_pass
from criticalkv.services.prefill.engine import PrefillEngine
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.config import EvictionConfig, PrefillConfig
from criticalkv.shared.errors import (
    CancelledError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    NodeMissingError,
    NumericsError,
)
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import Identity, tokens_digest
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import PrefillRequest

Factory = Callable[..., LoadedModel]
IDS = [int(t) for t in torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(5))]


@pytest.fixture
def local(tiny_model: Factory) -> Iterator[LocalEngine]:
    with LocalEngine(tiny_model()) as engine:
        yield engine


def read(engine: LocalEngine, node_id: str, tier: str | None = None) -> RaggedCache:
    with engine.store.open_get(node_id, tier=tier) as reader:
        return assemble(reader.manifest, reader.tier, reader)


def request(engine: LocalEngine, **fields: Any) -> PrefillRequest:
    spec, policy = engine.model.spec, Policy.parse("window+uniform+plain").canonical()
    identity = Identity(
        model_digest=spec.model_digest,
        tokenizer_digest=spec.tokenizer_digest,
        dtype=spec.dtype,
        policy=policy,
        salt=SALT,
        tokens=tokens_digest(IDS),
    )
    base = {
        "node_id": identity.node_id,
        "token_ids": tuple(IDS),
        "policy": policy,
        "store_tier": "0.4",
        "salt": SALT,
    }
    return PrefillRequest(**{**base, **fields})


def equal(one: RaggedCache, two: RaggedCache) -> bool:
    return all(
        torch.equal(a.keys, b.keys)
        and torch.equal(a.values, b.values)
        and torch.equal(a.positions, b.positions)
        and torch.equal(a.cu_seqlens, b.cu_seqlens)
        for a, b in zip(one.layers, two.layers, strict=True)
    )


@pytest.mark.parametrize(
    "policy", ["snapkv", "criticaladakv", "window+model+critical", "kvzip", "default"]
)
@pytest.mark.parametrize("tier", ["0.05", "0.2", "0.4"])
def test_reading_a_tier_equals_compressing_at_it(
    policy: str, tier: str, local: LocalEngine, tiny_model: Factory
) -> None:
    whole = local.compress_tokens(IDS, policy=policy, store_tier="1")
    with LocalEngine(tiny_model(), eviction=EvictionConfig(tiers=(tier,))) as alone:
        direct = alone.compress_tokens(IDS, policy=policy, store_tier=tier)
        # One budget only: the entries are the same, their order within a head too,
        # apart from the tier that first admitted them.
        one, two = read(local, whole.node_id, tier), read(alone, direct.node_id)
        assert equal(by_position(one), by_position(two))


def by_position(cache: RaggedCache) -> RaggedCache:
    from dataclasses import replace

    layers = []
    for layer in cache.layers:
        heads = layer.cu_seqlens.numel() - 1
        rows = torch.cat(
            [int(layer.cu_seqlens[h]) + layer.head(h)[2].argsort() for h in range(heads)]
        )
        layers.append(
            replace(
                layer,
                keys=layer.keys[rows],
                values=layer.values[rows],
                positions=layer.positions[rows],
            )
        )
    return replace(cache, layers=tuple(layers))


@pytest.mark.parametrize("policy", ["snapkv", "default"])
def test_a_stored_tier_is_a_prefix_of_the_larger(policy: str, local: LocalEngine) -> None:
    node = local.compress_tokens(IDS, policy=policy, store_tier="1")
    whole = read(local, node.node_id)
    for tier in whole.tiers:
        assert equal(read(local, node.node_id, tier), whole.at_tier(tier))


def test_kept_entries_are_what_the_tier_table_says(local: LocalEngine) -> None:
    node = local.compress_tokens(IDS, policy="default", store_tier="0.4")
    manifest = local.manifest(node)
    assert manifest.tiers == ("0.05", "0.1", "0.2", "0.3", "0.4")
    spec = local.model.spec
    for tier, entries, nbytes in zip(
        manifest.tiers, manifest.tier_entries(), manifest.tier_bytes(), strict=True
    ):
        forced = 12 * spec.num_layers * spec.num_kv_heads
        budget = int(len(IDS) * spec.num_layers * spec.num_kv_heads * float(tier) + 1e-9)
        assert entries == max(forced, budget)
        assert nbytes == entries * (2 * spec.head_dim * 4 + 4)


def test_a_layer_is_sent_before_the_next_one_is_computed(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per-layer policies stream: segments leave while later layers are not there yet."""
    events: list[str] = []
    attend, send = context_pass.ContextPass.attend, MemoryWriter.send

    def noting_attend(self: Any, call: Any) -> Any:
        events.append(f"attend {call.layer}")
        return attend(self, call)

    def noting_send(self: Any, payload: Any) -> None:
        events.append("send")
        send(self, payload)

    monkeypatch.setattr(context_pass.ContextPass, "attend", noting_attend)
    monkeypatch.setattr(MemoryWriter, "send", noting_send)
    local.compress_tokens(IDS, policy="snapkv", store_tier="0.1")
    assert events[:2] == ["attend 0", "send"]
    assert [e for e in events if e != "send"] == ["attend 0", "attend 1", "attend 2"]
    for layer in (1, 2):
        assert events[events.index(f"attend {layer}") - 1] == "send"


def test_cancel_between_layers_publishes_nothing(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled, layers = threading.Event(), []
    attend = context_pass.ContextPass.attend

    def cancelling(self: Any, call: Any) -> Any:
        out = attend(self, call)
        layers.append(call.layer)
        cancelled.set()
        return out

    monkeypatch.setattr(context_pass.ContextPass, "attend", cancelling)
    wanted = request(local)
    with pytest.raises(CancelledError):
        local.prefill.run(wanted, cancelled)
    assert layers == [0]
    with pytest.raises(NodeMissingError):
        local.store.open_get(wanted.node_id)


def test_deadline(local: LocalEngine) -> None:
    with pytest.raises(DeadlineError):
        local.prefill.run(request(local, deadline_s=1e-9))


def test_a_request_that_does_not_name_its_node_is_refused(local: LocalEngine) -> None:
    with pytest.raises(InvalidRequestError, match="model, tokenizer, dtype or policy"):
        local.prefill.run(request(local, node_id="0" * 64))


def test_too_long_a_context_is_refused(local: LocalEngine) -> None:
    with pytest.raises(ContextLengthError, match="2048"):
        local.compress_tokens([65] * 2048, policy="snapkv")


def test_a_context_that_never_fits_the_spool_is_refused(tiny_model: Factory) -> None:
    engine = PrefillEngine(
        tiny_model(), MemoryStore(), PrefillConfig(spool_limit_mb=64), EvictionConfig()
    )
    engine._spool._limit = 1000
    with LocalEngine(tiny_model()) as local:
        local.prefill = engine
        with pytest.raises(ContextLengthError, match="spool_limit_mb"):
            local.compress_tokens(IDS, policy="default")
        assert local.compress_tokens(IDS, policy="snapkv").prefill is not None


def test_non_finite_kv_is_refused(tiny_model: Factory) -> None:
    model = tiny_model(seed=9)
    with torch.no_grad():
        model.model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with LocalEngine(model) as local:
        for policy in ("dense", "snapkv", "default"):
            with pytest.raises(NumericsError):
                local.compress_tokens(IDS, policy=policy)
        assert not local.store._nodes  # type: ignore[attr-defined]


def test_a_missing_ancestor_is_a_miss(local: LocalEngine) -> None:
    parent = local.compress_tokens(IDS, policy="snapkv")
    child = local.compress_tokens(IDS, policy="snapkv", parent=parent, tier=0.1)
    assert local.manifest(child).identity.view == ("0.1",)
    assert local.manifest(child).next_position == 2 * len(IDS)
    assert isinstance(local.store, MemoryStore)
    local.store.delete(parent.node_id)
    with pytest.raises(NodeMissingError):
        local.generate(child, [65], max_tokens=1)


def test_accepted_prefills_wait_until_they_end(local: LocalEngine) -> None:
    engine = local.prefill
    assert engine.load() == {"waiting": 0, "waiting_tokens": 0}
    with engine.accepted(request(local)), engine.accepted(request(local)):
        with engine.accepted(request(local, background=True)):
            assert engine.load() == {"waiting": 2, "waiting_tokens": 2 * len(IDS)}
        assert engine.waiting_tokens == 2 * len(IDS)
    with pytest.raises(CancelledError), engine.accepted(request(local)):
        raise CancelledError("cut")
    assert engine.waiting_tokens == 0
