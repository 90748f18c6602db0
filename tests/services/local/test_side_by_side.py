"""Comparing policies in one pass gives what each would give by itself."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from tiny_models import make_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from criticalkv.services.local import LocalEngine, side_by_side
from criticalkv.services.local.side_by_side import SideBySide, answer_logprobs, greedy
from criticalkv.shared.cache.ragged import RaggedCache, RaggedLayer
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.errors import PolicyError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.attention import LayerCall
from criticalkv.shared.model.loader import LoadedModel

TIERS = ("0.2", "0.5", "1")
IDS = [int(x) for x in torch.randint(0, 200, (61,), generator=torch.Generator().manual_seed(1))]
QUESTION, ANSWER = IDS[3:14], IDS[20:26]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.set_num_threads(1)
    return make_model("qwen3", num_layers=3)


def stored(model: LoadedModel, policy: str) -> RaggedCache:
    with LocalEngine(model, eviction=EvictionConfig(tiers=TIERS)) as engine:
        node = engine.compress_tokens(IDS, policy=policy)
        with engine.store.open_get(node.node_id) as reader:
            return assemble(reader.manifest, reader.tier, reader)


@pytest.mark.parametrize(
    "policy",
    ["snapkv", "criticaladakv:window=8", "replay+model+relative", "kvzip", "kvzip:codec=int4"],
)
def test_equals_the_published_node(model: LoadedModel, policy: str) -> None:
    ours = SideBySide(model, IDS).compress(Policy.parse(policy), TIERS).cache
    theirs = stored(model, policy)
    assert torch.equal(ours.tier_lens, theirs.tier_lens)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(a.positions, b.positions)
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


def test_stepwise_policies_are_refused(model: LoadedModel) -> None:
    """Their KV is another: later pieces see only what earlier ones left."""
    with pytest.raises(PolicyError, match="a forward of its own"):
        SideBySide(model, IDS).compress(Policy.parse("snapkv:interval=16,keep=0.5"), TIERS)


def test_policies_do_not_disturb_one_another(model: LoadedModel) -> None:
    context = SideBySide(model, IDS)
    first = context.compress(Policy.parse("kvzip"), TIERS).cache
    context.compress(Policy.parse("snapkv"), TIERS)
    again = context.compress(Policy.parse("kvzip"), TIERS).cache
    for a, b in zip(first.layers, again.layers, strict=True):
        assert torch.equal(a.positions, b.positions)


def test_full_cache_answers_as_transformers_does(model: LoadedModel) -> None:
    theirs = AutoModelForCausalLM.from_config(
        deepcopy(model.model.config), attn_implementation="eager"
    )
    theirs.load_state_dict(model.model.state_dict())
    with torch.inference_mode():
        logits = theirs.eval()(torch.tensor([[*IDS, *QUESTION, *ANSWER]])).logits[0]
    expected = logits[len(IDS) + len(QUESTION) - 1 : -1].log_softmax(-1)
    found = answer_logprobs(model, [SideBySide(model, IDS).full()], QUESTION, ANSWER)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


def test_caches_in_a_batch_do_not_mix(model: LoadedModel) -> None:
    context = SideBySide(model, IDS)
    cache = context.compress(Policy.parse("snapkv:window=4"), TIERS).cache
    caches = [cache.at_tier("0.2"), context.full(), cache.at_tier("0.5")]
    together = answer_logprobs(model, caches, QUESTION, ANSWER)
    for cache, found in zip(caches, together, strict=True):
        alone = answer_logprobs(model, [cache], QUESTION, ANSWER)[0]
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


def test_caches_go_where_the_query_is(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored ones are read on the CPU; lengths of heads stay there, for launch parameters."""
    seen: list[RaggedLayer] = []

    def attend(call: LayerCall, prefix: RaggedLayer, *_: object) -> Tensor:
        seen.append(prefix)
        return torch.empty_like(call.query)

    monkeypatch.setattr(side_by_side, "attend_ragged", attend)
    caches = [stored(model, "snapkv"), stored(model, "kvzip")]
    query, key = (torch.empty(heads, 6, 16, device="meta") for heads in (4, 2))
    out = side_by_side._Answers(caches, 3).attend(LayerCall(1, query, key, key, 1.0, None))
    assert out.shape == query.shape
    for layer, cache in zip(seen, caches, strict=True):
        moved = (layer.keys, layer.values, layer.positions)
        assert {tensor.device.type for tensor in moved} == {"meta"}
        assert layer.keys.shape == cache.layers[1].keys.shape
        assert torch.equal(layer.cu_seqlens, cache.layers[1].cu_seqlens)


def test_greedy_follows_its_own_answer(model: LoadedModel) -> None:
    full = SideBySide(model, IDS).full()
    answer = greedy(model, full, QUESTION, 5)
    found = answer_logprobs(model, [full], QUESTION, answer)[0]
    assert found.argmax(-1).tolist() == answer
