"""Strengths, sinks and flat heads, against loops over transformers' eager attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from criticalkv.services.analysis.attended import Attended, attended
from criticalkv.services.analysis.attention_blocks import attention_blocks
from criticalkv.services.analysis.chosen_heads import chosen_heads
from criticalkv.services.analysis.flat import flatness
from criticalkv.services.analysis.masking import masked_forward
from criticalkv.services.analysis.sink_scores import shares, sink_scores
from criticalkv.services.analysis.span import Span
from criticalkv.services.analysis.strength import strength, token_strength
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.attention import IMPLEMENTATION, LayerCall
from criticalkv.shared.model.loader import LoadedModel

Factory = Callable[..., LoadedModel]
N, FIRST, HEADS, DIM = 47, 30, 6, 16
IDS = [int(t) for t in torch.randint(0, 256, (N,), generator=torch.Generator().manual_seed(4))]
FAMILIES = ["llama", "gemma3_text"]


def make(factory: Factory, family: str) -> LoadedModel:
    return factory(family, num_q_heads=HEADS, num_kv_heads=2)


def truth(model: LoadedModel) -> tuple[Tensor, list[LayerCall]]:
    """Attention [layers, num_q_heads, n, n] of transformers itself, and our layers' values."""
    calls: list[LayerCall] = []
    masked_forward(model, IDS, look=calls.append)
    model.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            out = model.model(torch.tensor([IDS]), use_cache=False, output_attentions=True)
    finally:
        model.model.set_attn_implementation(IMPLEMENTATION)
    return torch.stack([a[0] for a in out.attentions]).double(), calls


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_strength_and_sinks_equal_a_loop(tiny_model: Factory, family: str, norm: str) -> None:
    model = make(tiny_model, family)
    attention, calls = truth(model)
    found = attended(model, IDS, FIRST, norm)  # type: ignore[arg-type]
    sinks, span = sink_scores(found), Span(9, 21)
    of_span = strength(found, span)
    for layer, call in enumerate(calls):
        window = call.window or N
        for h in range(HEADS):
            w_o = model.w_o(layer)[:, h * DIM : (h + 1) * DIM].double()
            total = 0.0
            for i in range(N):
                reach = w_o @ call.value[h // 3, i].double()
                size = float(reach.abs().sum() if norm == "l1" else reach.square().sum().sqrt())
                seen = [q for q in range(FIRST, N) if i <= q < i + window]
                mass = sum(float(attention[layer, h, q, i]) for q in seen)
                mean = mass / len(seen) if seen else 0.0
                assert float(found.mass[layer, h, i]) == pytest.approx(mass, rel=1e-4, abs=1e-5)
                assert float(sinks.mass[layer, h, i]) == pytest.approx(mean, rel=1e-4, abs=1e-5)
                assert float(sinks.value_aware[layer, h, i]) == pytest.approx(
                    mean * size, rel=1e-4, abs=1e-4
                )
                assert int(found.seen[layer, i]) == len(seen)
                total += mass * size if 9 <= i < 21 else 0
            assert float(of_span[layer, h]) == pytest.approx(total, rel=1e-4)
    # A sliding window has passed some tokens before the first query.
    assert int(found.seen.min()) == (0 if family == "gemma3_text" else 1)
    torch.testing.assert_close(shares(sinks.mass).sum(-1), torch.ones(3, HEADS).double())


def test_strengths_add_up_over_chosen_heads(tiny_model: Factory) -> None:
    model = make(tiny_model, "llama")
    found = attended(model, IDS, FIRST)
    heads = chosen_heads(model.spec, [0, 2], [1, 4])
    tokens = token_strength(found, heads)
    for span in (Span(0, 3), Span(9, 21), Span(46, 47)):
        by_head = strength(found, span)
        assert float(tokens[span.begin : span.end].sum()) == pytest.approx(
            sum(float(by_head[layer, h]) for layer in (0, 2) for h in (1, 4))
        )
    torch.testing.assert_close(
        token_strength(found), token_strength(found, heads) + token_strength(found, ~heads)
    )
    with pytest.raises(ConfigError, match="after the last"):
        strength(found, Span(40, 48))


def test_a_sink_with_a_small_value_is_none(tiny_model: Factory) -> None:
    """Most mass and least value: first by mass, last of all by what is read."""
    found = attended(make(tiny_model, "llama"), IDS)
    mass, norms = found.mass.clone(), found.norms.clone()
    mass[..., 0], norms[..., 0] = 1e3, 1e-9
    sinks = sink_scores(replace(found, mass=mass, norms=norms))
    assert (sinks.mass.argmax(-1) == 0).all()
    assert (shares(sinks.value_aware)[..., 0] < 1e-6).all()
    nothing = Attended(0, 0 * mass, norms, found.seen)
    assert not shares(sink_scores(nothing).mass).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_flatness_equals_a_loop(tiny_model: Factory, family: str) -> None:
    model = make(tiny_model, family)
    attention, calls = truth(model)
    found = flatness(model, IDS, first=3, fewest=9)
    assert found.queries == N - 8
    for layer, call in enumerate(calls):
        for h in range(HEADS):
            share, relative = [], []
            for q in range(8, N):
                visible = min(q + 1, call.window or N)
                row = [float(a) for a in attention[layer, h, q] if a > 0]
                entropy = -sum(a * math.log(a) for a in row)
                share.append(math.exp(entropy) / visible)
                relative.append(entropy / math.log(visible))
            expected = pytest.approx(sum(share) / len(share), rel=1e-4)
            assert float(found.effective_share[layer, h]) == expected
            expected = pytest.approx(sum(relative) / len(relative), rel=1e-4)
            assert float(found.relative_entropy[layer, h]) == expected


def test_a_head_made_flat_is_flagged_alone(tiny_model: Factory) -> None:
    """Queries of one head near 0 attend to all keys alike."""
    model = tiny_model(seed=2, num_q_heads=HEADS, num_kv_heads=2)
    with torch.no_grad():
        model.model.model.layers[0].self_attn.q_proj.weight[5 * DIM :] *= 1e-3
    found = flatness(model, IDS)
    assert found.flagged(0.9).nonzero().tolist() == [[0, 5]]
    assert found.flagged(0.9, entropy=0.99).nonzero().tolist() == [[0, 5]]
    assert float(found.effective_share[0, 5]) > 0.999
    assert not found.flagged(1.01).any()
    assert not found.flagged(0.0, entropy=1.01).any()
    assert found.flagged(0.0).all()


def test_blocks_of_queries_join(tiny_model: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few queries a block holds."""
    model = make(tiny_model, "gemma3_text")
    whole = attended(model, IDS, FIRST)
    monkeypatch.setattr("criticalkv.kernels.reference._block_elements", lambda _: 3 * N * 4)
    calls: list[LayerCall] = []
    masked_forward(model, IDS, look=calls.append)
    assert len(list(attention_blocks(calls[0], FIRST))) == 2 * math.ceil((N - FIRST) / 4)
    torch.testing.assert_close(attended(model, IDS, FIRST).mass, whole.mass, atol=1e-5, rtol=1e-5)


def test_flatness_needs_queries_that_see_enough(tiny_model: Factory) -> None:
    for family, fewest in (("llama", 48), ("llama", 1), ("gemma3_text", 25)):
        with pytest.raises(ConfigError, match="no query sees"):
            flatness(make(tiny_model, family), IDS, fewest=fewest)
