"""Quantized contexts through the prefill engine: the raw node's entries, in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from criticalkv.services.local import LocalEngine
from criticalkv.services.local.memory_store import MemoryStore
from criticalkv.shared.cache.codec import layout_of
from criticalkv.shared.cache.quantized import QuantizedLayer, quantize_layer
from criticalkv.shared.cache.ragged import RaggedCache, RaggedLayer, cu_seqlens_of
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.chain import ChainLoader, read_groups
from criticalkv.shared.errors import NumericsError, PolicyError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import Identity, tokens_digest
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.publish import NodePublisher

Factory = Callable[..., LoadedModel]
IDS = [int(t) for t in torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(5))]
POLICIES = {
    "streaming": "criticaladakv:",
    "spooling": "kvzip:",
    "stepwise": "snapkv:interval=32,keep=0.5,",
}


@pytest.fixture
def local(tiny_model: Factory) -> Iterator[LocalEngine]:
    with LocalEngine(tiny_model()) as engine:
        yield engine


def read(engine: LocalEngine, node_id: str) -> RaggedCache:
    with engine.store.open_get(node_id) as reader:
        return assemble(reader.manifest, reader.tier, reader)


def groups(engine: LocalEngine, node_id: str) -> list[QuantizedLayer]:
    with engine.store.open_get(node_id) as reader:
        return list(read_groups(reader))


@pytest.mark.parametrize("way", POLICIES)
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_quantized_node_holds_what_the_raw_one_does(
    local: LocalEngine, way: str, codec: str
) -> None:
    name = POLICIES[way]
    raw = local.compress_tokens(IDS, policy=name + "codec=raw")
    node = local.compress_tokens(IDS, policy=f"{name}codec={codec}")
    manifest, exact = local.manifest(node), read(local, raw.node_id)
    assert manifest.identity.codec == codec
    assert manifest.lens.tolist() == exact.tier_lens.tolist()
    layout = layout_of(codec, 16)
    assert layout is not None
    stored, seen = groups(local, node.node_id), read(local, node.node_id)
    for i, layer in enumerate(exact.layers):
        expected = quantize_layer(layer, exact.tier_lens[:, i], layout)
        assert torch.equal(stored[i].key_groups, expected.key_groups)
        assert torch.equal(stored[i].value_groups, expected.value_groups)
        assert torch.equal(seen.layers[i].positions, layer.positions)
        assert torch.equal(seen.layers[i].keys, expected.ragged(torch.float32).keys)
    assert raw.prefill is not None
    assert node.prefill is not None
    assert node.prefill.tier_bytes == tuple(manifest.tier_bytes())
    assert node.prefill.stored_bytes == manifest.tier_bytes()[-1] < raw.prefill.stored_bytes


def test_a_child_is_computed_over_the_expanded_parent(local: LocalEngine) -> None:
    """A raw child's own KV depends on the parent's entries as they are read."""
    parent = local.compress_tokens(IDS, policy="snapkv:codec=int4")
    child = local.compress_tokens(IDS[:40], policy="snapkv", parent=parent, tier="0.4")
    loader = ChainLoader(local.store, local.model.spec)
    chain = loader.load(child.node_id, local.manifest(child).identity.salt, ["0.4", "1"])
    manifest = local.manifest(parent)
    at = manifest.tier_index("0.4")
    assert chain.bytes_pulled == manifest.tier_bytes()[at] + local.manifest(child).tier_bytes()[-1]
    whole = groups(local, parent.node_id)[1].prefix(
        manifest.group_counts[: at + 1, 1].sum(0).tolist()
    )
    assert torch.equal(chain.nodes[0].cache.layers[1].keys, whole.ragged(torch.float32).keys)
    turn = local.ask(child, "why?", max_tokens=4)
    assert local.manifest(turn).identity.codec == "raw"


def test_another_engine_computes_the_same_node(local: LocalEngine, tiny_model: Factory) -> None:
    first = local.compress_tokens(IDS, policy="default:codec=int8")
    with LocalEngine(tiny_model()) as other:
        again = other.compress_tokens(IDS, policy="default:codec=int8")
        assert again.node_id == first.node_id
        same = zip(groups(local, first.node_id), groups(other, again.node_id), strict=True)
        assert all(torch.equal(a.key_groups, b.key_groups) for a, b in same)


def test_an_odd_head_dim_is_refused_before_the_forward(tiny_model: Factory) -> None:
    with LocalEngine(tiny_model(head_dim=16)) as engine:
        spec: Any = engine.model.spec
        object.__setattr__(spec, "head_dim", 15)
        with pytest.raises(PolicyError, match=r"even, got 15; use codec=raw"):
            engine.compress_tokens(IDS, policy="snapkv:codec=int8")


# ------------------------------------------------------------------- publisher


def publish(codec: str, keys: torch.Tensor, **options: Any) -> MemoryStore:
    store, rows = MemoryStore(), keys.shape[0]
    identity = Identity(
        model_digest="ab" * 32,
        tokenizer_digest="ab" * 32,
        dtype="float32",
        codec=codec,
        policy=Policy.parse(f"snapkv:codec={codec}").canonical(),
        salt="ab" * 32,
        tokens=tokens_digest(range(rows)),
    )
    layer = RaggedLayer(
        keys, keys / 2, torch.arange(rows, dtype=torch.int32), cu_seqlens_of([rows])
    )
    with NodePublisher(store, identity, "ab" * 8, **options) as publisher:
        publisher.send(layer, torch.tensor([[rows]]))
        publisher.commit(
            token_ids=range(rows), next_position=rows, head_dim=keys.shape[1], tiers=["1"]
        )
    return store


@pytest.mark.parametrize("value", [65536.0, -65536.0])
def test_what_the_codec_cannot_hold_is_refused(value: float) -> None:
    keys = torch.zeros(40, 4)
    keys[33, 2] = value
    publish("raw", keys)
    with pytest.raises(PolicyError, match=r"layer 0 .* beyond ±65504.*use codec=raw"):
        publish("int8", keys)
    keys[33, 2] = value * 65504 / 65536
    publish("int8", keys)


def test_what_is_not_finite_is_refused_as_ever() -> None:
    with pytest.raises(NumericsError):
        publish("int4", torch.full((3, 4), torch.nan))


def test_an_odd_head_dim_is_refused() -> None:
    with pytest.raises(PolicyError, match="use codec=raw"):
        publish("int4", torch.zeros(3, 5))


def test_groups_are_shown_before_they_are_sent() -> None:
    seen: list[tuple[RaggedLayer, QuantizedLayer]] = []
    keys = torch.randn(40, 4)
    publish("int8", keys, watch=lambda *pair: seen.append(pair))
    publish("raw", keys, watch=lambda *pair: seen.append(pair))
    [(layer, stored)] = seen
    assert layer.keys is keys
    assert stored.fills.tolist() == [32, 8]
