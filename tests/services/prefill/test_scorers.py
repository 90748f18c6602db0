"""Every scorer through the prefill engine, on models with and without sliding windows.

What is kept is compared with selections made here, from queries, keys and values that were
caught on their way through the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch

from criticalkv.services.local import LocalEngine
from criticalkv.services.prefill import context_pass
from criticalkv.services.prefill.context_pass import LayerPass
from criticalkv.services.prefill.own_scores import context_layer
from criticalkv.shared.cache.ragged import RaggedCache, dense_layer
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.errors import NumericsError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers import SCORERS
from criticalkv.shared.eviction.scorers.rotary import Turn
from criticalkv.shared.model.attention import LayerCall, forward
from criticalkv.shared.model.loader import LoadedModel

Factory = Callable[..., LoadedModel]
IDS = [int(t) for t in torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(3))]
LENGTHS = (1, 2, 5, 8, 9, 31, 70)
TIERS = ("0.05", "0.1", "0.2", "0.3", "0.4", "0.6", "0.8", "1")

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "num_q_heads": 6},
    "yarn": {
        "family": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 256,
        },
    },
    "mistral": {"family": "mistral", "sliding_window": 8},
    "qwen2": {
        "family": "qwen2",
        "num_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
    "qwen3": {"family": "qwen3", "num_q_heads": 2},
    "gemma3": {"family": "gemma3_text", "sliding_window": 8},
    "phi3": {
        "family": "phi3",
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}
POLICIES = (
    "window+uniform+plain:window=6",
    "h2o+adakv+twostage:window=4,span=20",
    "h2o+model+relative:window=4,span=20",
    "tova+uniform+plain",
    "tova+adakv+critical:recent=3",
    "streaming+uniform+plain",
    "knorm+uniform+twostage",
    "keydiff+adakv+plain",
    "expected+uniform+plain:future=16",
    "expected+adakv+twostage:future=16",
    "obcache+uniform+critical:window=6",
    "obcache+model+plain:window=6",
    "defensivekv:window=6",
    "defensivekv:window=6,preset=official",
    "layerdefensivekv:window=6",
    "self+model+relative:distance=8",
    "self+adakv+twostage:distance=8",
    "replay+model+relative:chunk=32,self_weight=0.5",
    "replay+model+relative:chunk=32,share=0.25,echo_weight=0.5,echo_chunk=16",
    "echo+model+relative:echo_chunk=16,self_weight=0.5",
    "echo+adakv+twostage:echo_chunk=16,echo_reach=8",
)


@pytest.fixture(scope="module")
def engines(tiny_model: Factory) -> Iterator[dict[str, LocalEngine]]:
    made = {name: LocalEngine(tiny_model(**options)) for name, options in MODELS.items()}
    yield made
    for engine in made.values():
        engine.close()


def read(engine: LocalEngine, node_id: str, tier: str) -> RaggedCache:
    with engine.store.open_get(node_id, tier=tier) as reader:
        return assemble(reader.manifest, reader.tier, reader)


def test_every_scorer_is_in_the_matrix() -> None:
    assert {Policy.parse(text).scorer for text in POLICIES} == {*SCORERS, "replay"}


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", POLICIES)
def test_runs(text: str, model: str, n: int, engines: dict[str, LocalEngine]) -> None:
    """Bytes as the tier table says, budgets kept, everything at tier 1, sliding windows whole."""
    engine, policy = engines[model], Policy.parse(text)
    spec = engine.model.spec
    node = engine.compress_tokens(IDS[:n], policy=text, store_tier="1")
    manifest = engine.manifest(node)
    assert manifest.tiers == TIERS
    entry = 2 * spec.head_dim * 4 + 4
    sliding = [min(n, w) for w in spec.sliding_windows if w is not None]
    evicting = spec.num_layers - len(sliding)
    for tier, entries, nbytes in zip(
        TIERS, manifest.tier_entries(), manifest.tier_bytes(), strict=True
    ):
        assert nbytes == entries * entry
        cache = read(engine, node.node_id, tier)
        assert sum(layer.positions.numel() for layer in cache.layers) == entries
        kept = entries - spec.num_kv_heads * sum(sliding)
        budget = math.floor(Fraction(tier) * n)
        if policy.allocator != "model":
            budget = max(1, budget)
        else:
            budget = math.floor(Fraction(tier) * n * evicting * spec.num_kv_heads)
        heads = evicting * spec.num_kv_heads
        forced = min(n, forced_count(policy, n))
        if policy.allocator == "model":
            assert kept == max(budget, forced * heads)
        else:
            assert kept == max(budget, forced) * heads


def forced_count(policy: Policy, n: int) -> int:
    if policy.scorer in ("window", "h2o", "obcache", "defensive"):
        return policy.window
    if policy.scorer in ("streaming", "expected"):
        return policy.sinks
    if policy.scorer in ("self", "echo", "replay"):
        return min(n, policy.sinks + policy.recent)
    return policy.recent if policy.scorer == "tova" else 0


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> list[LayerPass]:
    """What each layer of the context pass computed."""
    layers: list[LayerPass] = []
    attend = context_pass.ContextPass.attend

    def noting(self: Any, call: Any) -> Any:
        out = attend(self, call)
        prefix = self._chain.layer(call.layer, self._model.spec, self._model.device)
        layers.append(LayerPass(call, out, prefix))
        return out

    monkeypatch.setattr(context_pass.ContextPass, "attend", noting)
    return layers


Score = Callable[[LayerPass], torch.Tensor]


def attention(layer: LayerPass) -> torch.Tensor:
    """A fp64 [num_kv_heads, group, n, n] of a root node."""
    q, k = layer.call.query.double(), layer.call.key.double()
    group, n = q.shape[0] // k.shape[0], q.shape[1]
    logits = layer.call.scaling * q @ k.repeat_interleave(group, 0).transpose(1, 2)
    logits.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1).view(k.shape[0], group, n, n)


def tova(layer: LayerPass) -> torch.Tensor:
    a = attention(layer)[:, :, -1]
    return a.mean((0, 1)).expand(a.shape[0], -1)


def h2o(layer: LayerPass) -> torch.Tensor:
    return attention(layer)[:, :, -20:].sum(2).mean(1)


def own(layer: LayerPass) -> torch.Tensor:
    a = attention(layer)
    n = a.shape[-1]
    return (a * torch.ones(n, n).tril(-8)).amax((1, 2))


def knorm(layer: LayerPass) -> torch.Tensor:
    return -layer.call.key.double().norm(dim=-1)


def obcache(layer: LayerPass) -> torch.Tensor:
    q, k, v = (x.double() for x in (layer.call.query, layer.call.key, layer.call.value))
    a = attention(layer)[:, :, -6:]
    heads, group, _, n = a.shape
    z = layer.call.scaling * q[:, -6:].view(heads, group, 6, -1) @ k[:, None].transpose(2, 3)
    o = layer.out[:, -6:].double().view(heads, group, 6, 1, -1)
    x = v[:, None, None]
    term = a**2 * (x**2).sum(-1) + (a * z) ** 2 * ((x - o) ** 2).sum(-1)
    term += 2 * a**2 * z * ((x**2).sum(-1) - (x * o).sum(-1))
    score = term.sum(2).mean(1)
    padded = torch.nn.functional.pad(score[:, : n - 6], (3, 3), value=-1.0)
    return torch.cat([padded.unfold(1, 7, 1).amax(-1), score[:, n - 6 :]], dim=1)


INDEPENDENT: dict[str, tuple[Score, set[int]]] = {
    "tova+uniform+plain": (tova, {69}),
    "h2o+uniform+plain:span=20,window=4": (h2o, {66, 67, 68, 69}),
    "self+uniform+plain:distance=8,sinks=2,recent=1": (own, {0, 1, 69}),
    "knorm+uniform+plain": (knorm, set()),
    "obcache+uniform+plain:window=6": (obcache, set(range(64, 70))),
}


@pytest.mark.parametrize("model", ["llama", "yarn", "qwen2", "qwen3", "gemma3", "phi3"])
@pytest.mark.parametrize("text", INDEPENDENT)
def test_keeps_what_an_independent_selection_keeps(
    text: str, model: str, engines: dict[str, LocalEngine], caught: list[LayerPass]
) -> None:
    engine, n = engines[model], 70
    score_of, forced = INDEPENDENT[text]
    node = engine.compress_tokens(IDS[3 : 3 + n], policy=text, store_tier="1")
    assert len(caught) == engine.model.spec.num_layers
    for tier in ("0.1", "0.3", "0.6"):
        cache = read(engine, node.node_id, tier)
        for layer, kept in zip(caught, cache.layers, strict=True):
            if layer.call.window is not None:
                assert kept.head(0)[2].tolist() == list(range(n - layer.call.window, n))
                continue
            scores = score_of(layer)
            for h in range(scores.shape[0]):
                budget = max(len(forced), int(Fraction(tier) * n))
                check_best(set(kept.head(h)[2].tolist()), scores[h], forced, budget)


class Caught:
    """AttentionPlan that notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def attend(self, call: LayerCall) -> torch.Tensor:
        self.calls.append(call)
        return torch.zeros_like(call.query)


FULL, SLIDING = "full_attention", "sliding_attention"
FIRST_LAYERS = {
    **{name: MODELS[name] for name in ("llama", "yarn", "qwen3", "phi3")},
    "gemma3, full": {"family": "gemma3_text", "layer_types": [FULL, SLIDING, FULL]},
    "gemma3, sliding": {"family": "gemma3_text", "layer_types": [SLIDING, FULL, FULL]},
}


@pytest.mark.parametrize("name", FIRST_LAYERS)
def test_a_scorer_turns_as_the_layer_does(name: str, tiny_model: Factory) -> None:
    """The first layer's queries and keys at other positions, from the model itself."""
    model = tiny_model(**FIRST_LAYERS[name])
    here, there = Caught(), Caught()
    nothing = torch.empty(0, dtype=torch.int64)
    for plan, first in ((here, 0), (there, 700)):
        positions = torch.arange(first, first + 70)
        forward(model.model, torch.tensor(IDS[:70]), positions, plan, nothing)
    call, later = here.calls[0], there.calls[0]
    nobody = dense_layer(call.key[:, :0], call.value[:, :0], 0)
    layer = context_layer(model, LayerPass(call, torch.zeros_like(call.query), nobody), 0)
    assert layer.rotation is not None
    turn = Turn.by(torch.tensor([700]), layer.rotation)
    torch.testing.assert_close(turn(call.query), later.query, rtol=0, atol=1e-3)
    torch.testing.assert_close(turn(call.key), later.key, rtol=0, atol=1e-3)


def check_best(kept: set[int], scores: torch.Tensor, forced: set[int], budget: int) -> None:
    """The best by score, forced ones first; scores that fp32 cannot tell apart may swap."""
    assert len(kept) == budget
    assert forced <= kept
    chosen = [float(scores[i]) for i in kept - forced]
    left = [float(scores[i]) for i in set(range(len(scores))) - kept]
    assert not chosen or not left or min(chosen) >= max(left) - 1e-6 * (1 + abs(max(left)))


def test_a_child_is_scored_after_its_parent(
    engines: dict[str, LocalEngine], caught: list[LayerPass]
) -> None:
    """TOVA of a child: the softmax covers the parent's kept entries too."""
    engine = engines["llama"]
    parent = engine.compress_tokens(IDS[:40], policy="adakv:window=4", store_tier="1")
    caught.clear()
    child = engine.compress_tokens(
        IDS[40:70], policy="tova+uniform+plain", parent=parent, tier="0.6", store_tier="1"
    )
    blind = 0
    for tier, count in (("0.1", 2), ("0.2", 5), ("0.3", 8), ("0.6", 17)):
        cache = read(engine, child.node_id, tier)
        for layer, kept in zip(caught, cache.layers, strict=True):
            best = best_by_tova(layer, count, parent=True)
            blind += best != best_by_tova(layer, count, parent=False)
            for h in range(kept.cu_seqlens.numel() - 1):
                assert {int(p) - 40 for p in kept.head(h)[2]} == {*best, 29}
    assert blind, "a softmax over the child alone would keep the same"


def best_by_tova(layer: LayerPass, count: int, *, parent: bool) -> set[int]:
    """The best of a child's 29 entries before its last."""
    total = torch.zeros(30, dtype=torch.float64)
    heads = layer.call.key.shape[0]
    group = layer.call.query.shape[0] // heads
    for h in range(heads):
        seen = layer.prefix.head(h)[0] if parent else layer.call.key[h, :0]
        keys = torch.cat([layer.call.key[h], seen]).double()
        for g in range(group):
            q = layer.call.query[h * group + g, -1].double()
            total += (layer.call.scaling * keys @ q).softmax(0)[:30]
    return set(sorted(range(29), key=lambda i: (-float(total[i]), i))[:count])


def test_self_weight_changes_what_is_kept(engines: dict[str, LocalEngine]) -> None:
    """And so the node's identity; a weight that drowns the replay ranks as scorer self."""
    engine = engines["llama"]
    nodes = {
        weight: engine.compress_tokens(
            IDS, policy=f"replay+model+relative:sinks=2,recent=2,self_weight={weight}"
        )
        for weight in ("0", "0.5", "16")
    }
    assert len({node.node_id for node in nodes.values()}) == 3
    kept = {
        weight: [layer.positions.tolist() for layer in read(engine, node.node_id, "0.2").layers]
        for weight, node in nodes.items()
    }
    assert kept["0"] != kept["0.5"] != kept["16"]


def test_self_weight_adds_the_relative_scores_of_self(
    engines: dict[str, LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from criticalkv.services.prefill.sinks import SpoolingSink

    seen: list[torch.Tensor] = []
    finish = SpoolingSink.finish

    def noting(self: Any) -> Any:
        chosen = [layer.scores.relative for layer in self.layers if layer.window is None]
        seen.append(torch.stack(chosen))
        return finish(self)

    monkeypatch.setattr(SpoolingSink, "finish", noting)
    engine = engines["qwen2"]
    for text in (
        "replay+model+relative",
        "self+model+relative",
        "replay+model+relative:self_weight=0.5,stride=1",
    ):
        engine.compress_tokens(IDS, policy=text)
    replayed, own_queries, both = seen
    assert bool(own_queries.any())
    torch.testing.assert_close(both, replayed + 0.5 * own_queries, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("text", POLICIES)
def test_non_finite_kv_is_refused(text: str, tiny_model: Factory) -> None:
    model = tiny_model(seed=9)
    with torch.no_grad():
        model.model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with LocalEngine(model) as engine, pytest.raises(NumericsError):
        engine.compress_tokens(IDS[:30], policy=text)
