"""The canary through a prefill: equal to transformers' own attention over the untouched cache."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from criticalkv.services.local import LocalEngine
from criticalkv.services.local.engine import LocalNode
from criticalkv.shared.cache.manifest import Manifest, decode_manifest, encode_manifest
from criticalkv.shared.cache.quality import TierQuality
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.model.loader import LoadedModel

Factory = Callable[..., LoadedModel]
DRAW = torch.Generator().manual_seed(12)
IDS = [int(t) for t in torch.randint(0, 256, (97,), generator=DRAW)]
PARENT = [int(t) for t in torch.randint(0, 256, (40,), generator=DRAW)]
ASKED = [72, 80, 88, 96]  # ends of the quarters of the last 32 of 97 tokens
TIERS = EvictionConfig(tiers=("0.2", "0.5"))


class Untouched:
    """Attention and values of a whole sequence, by an eager copy of the model."""

    def __init__(self, model: LoadedModel, ids: list[int]) -> None:
        config = deepcopy(model.model.config)
        eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        eager.load_state_dict(model.model.state_dict())
        cache = DynamicCache()
        with torch.inference_mode():
            out = eager(torch.tensor([ids]), cache=cache, output_attentions=True)
        self.attention = [layer[0].double() for layer in out.attentions]
        self.values = [layer.values[0].double() for layer in cache.layers]


def figures(
    model: LoadedModel, node: Any, manifest: Manifest, before: int, whole: Untouched
) -> list[list[float]]:
    """Per tier: mean σ, lowest head's σ, share of heads with σ ≤ 0.5, mean θ ÷ C."""
    spec, rows = model.spec, []
    for tier in manifest.tiers:
        cache = node.at_tier(tier)
        masses, thetas = [], []
        for index in range(spec.num_layers):
            if spec.sliding_windows[index] is not None:
                continue
            for q_head in range(spec.num_q_heads):
                kv = q_head * spec.num_kv_heads // spec.num_q_heads
                w_o = model.w_o(index).double()
                w_o = w_o[:, q_head * spec.head_dim : (q_head + 1) * spec.head_dim]
                sizes = (whole.values[index][kv] @ w_o.T).norm(dim=-1)
                kept = torch.zeros(before + len(IDS), dtype=torch.float64)
                kept[:before] = 1
                kept[cache.layers[index].head(kv)[2].long()] = 1
                seen = whole.attention[index][q_head][[before + i for i in ASKED]]
                sigma, part = seen @ kept, seen @ (kept * sizes)
                masses.append(sigma.mean())
                thetas.append((1 - (2 - 1 / sigma) * part / (seen @ sizes)).mean())
        mass = torch.stack(masses)
        bound = float(torch.stack(thetas).mean())
        low = float((mass <= 0.5).double().mean())
        rows.append([float(mass.mean()), float(mass.min()), low, bound])
    return rows


def row(tier: TierQuality) -> list[float]:
    return [tier.retained_mass, tier.lowest_mass, tier.low_mass_share, tier.theta]


def compressed(engine: LocalEngine, policy: str, parent: LocalNode | None = None) -> LocalNode:
    return engine.compress_tokens(IDS, policy=policy, store_tier="0.5", parent=parent)


def read(engine: LocalEngine, node: LocalNode) -> Any:
    with engine.store.open_get(node.node_id) as reader:
        return assemble(reader.manifest, reader.tier, reader)


@pytest.mark.parametrize("policy", ["snapkv", "criticaladakv", "default", "window+model+critical"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("has_parent", [False, True])
def test_figures_are_those_of_the_untouched_model(
    policy: str, family: str, has_parent: bool, tiny_model: Factory
) -> None:
    model = tiny_model(family, num_q_heads=6)
    with LocalEngine(model, eviction=TIERS) as engine:
        parent = engine.compress_tokens(PARENT, policy="dense") if has_parent else None
        node = compressed(engine, policy, parent)
        manifest, cache = engine.manifest(node), read(engine, node)
    before = PARENT if has_parent else []
    whole = Untouched(model, [*before, *IDS])
    assert manifest.tiers == ("0.2", "0.5")
    assert manifest.quality is not None
    assert manifest.quality.codec is None
    assert node.prefill is not None
    assert node.prefill.quality == manifest.quality
    expected = figures(model, cache, manifest, len(before), whole)
    for tier, want in zip(manifest.quality.tiers, expected, strict=True):
        assert row(tier) == pytest.approx(want, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("policy", ["snapkv", "default"])
def test_tier_one_keeps_all_mass(policy: str, tiny_model: Factory) -> None:
    with LocalEngine(tiny_model()) as engine:
        quality = engine.manifest(engine.compress_tokens(IDS, policy=policy)).quality
    assert quality is not None
    assert row(quality.tiers[-1]) == [1.0, 1.0, 0.0, 0.0]
    masses = [tier.retained_mass for tier in quality.tiers]
    assert masses == pytest.approx(sorted(masses))
    assert masses[0] < 0.99


def test_quality_shrinks_with_the_tiers(tiny_model: Factory) -> None:
    with LocalEngine(tiny_model(), eviction=TIERS) as engine:
        manifest = engine.manifest(compressed(engine, "snapkv"))
    smaller = decode_manifest(encode_manifest(manifest.shrunk_to("0.2")))
    assert manifest.quality is not None
    assert smaller.quality is not None
    assert smaller.quality.tiers == manifest.quality.tiers[:1]


@pytest.mark.parametrize(
    ("policy", "queries"),
    [
        ("snapkv", 0),
        ("default", 0),
        ("dense", 4),
        ("window+uniform+plain:interval=32,keep=0.5,window=8", 4),
    ],
)
def test_off_dense_and_stepwise_nodes_have_none(
    policy: str, queries: int, tiny_model: Factory
) -> None:
    config = TIERS.model_copy(update={"canary_queries": queries})
    with LocalEngine(tiny_model(), eviction=config) as engine:
        node = compressed(engine, policy) if policy != "dense" else None
        node = node or engine.compress_tokens(IDS, policy="dense")
        assert engine.manifest(node).quality is None
        assert node.prefill is not None
        assert node.prefill.quality is None


@pytest.mark.parametrize("policy", ["snapkv", "default"])
def test_it_changes_nothing_else(policy: str, tiny_model: Factory) -> None:
    model, found = tiny_model(), []
    for queries in (0, 4):
        config = TIERS.model_copy(update={"canary_queries": queries})
        with LocalEngine(model, eviction=config) as engine:
            manifest = engine.manifest(compressed(engine, policy))
            found.append((manifest.segments, manifest.tier_lens))
    assert found[0] == found[1]


def test_the_number_of_queries_counts(tiny_model: Factory) -> None:
    """One query is the last one alone."""
    model = tiny_model()
    config = TIERS.model_copy(update={"canary_queries": 1})
    with LocalEngine(model, eviction=config) as engine:
        node = compressed(engine, "snapkv")
        manifest, cache = engine.manifest(node), read(engine, node)
    seen: list[Tensor] = []
    for index, layer in enumerate(Untouched(model, IDS).attention):
        for q_head in range(model.spec.num_q_heads):
            kv = q_head * model.spec.num_kv_heads // model.spec.num_q_heads
            kept = cache.layers[index].head(kv)[2].long()
            seen.append(layer[q_head, -1, kept].sum())
    assert manifest.quality is not None
    mass = manifest.quality.tiers[-1].retained_mass
    assert mass == pytest.approx(float(torch.stack(seen).mean()), rel=1e-4)
