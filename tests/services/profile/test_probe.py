"""The probe: haystacks, attention on the needle, and a model whose retrieving head is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from criticalkv.services.profile.haystack import FACT, Sample, make_samples
from criticalkv.services.profile.probe import ProbePass, probe
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.attention import LayerCall, forward
from criticalkv.shared.model.loader import LoadedModel

Factory = Callable[..., LoadedModel]


@pytest.fixture
def model(tiny_model: Factory) -> LoadedModel:
    return tiny_model()


def test_the_answer_copies_the_needle(model: LoadedModel) -> None:
    chat = model.chat
    samples = list(make_samples(chat, 4, 600, seed=3))
    for sample in samples:
        ids = sample.token_ids
        assert len(ids) == 600 == sample.answer.stop
        value = [ids[i] for i in sample.needle]
        assert value == [ids[i] for i in sample.answer]
        before = chat.decode(ids[: sample.needle.start])
        city = before.rsplit(" is", 1)[0].split()[-1]
        text = chat.decode(ids)
        assert text.endswith(FACT.format(city) + chat.decode(value))
        assert f"What is the secret number of {city}?" in text
        assert text.count(FACT.format(city)) == 2
        assert text.count("The secret number of ") == 4
    depths = [sample.needle.start for sample in samples]
    assert depths == sorted(depths)
    assert depths[0] < 250 < 350 < depths[-1]


def test_samples_are_drawn_by_the_seed(model: LoadedModel) -> None:
    first, again, other = (list(make_samples(model.chat, 2, 600, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_lengths_that_do_not_fit_are_refused(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"length is 2049; the model's limit is 2048"):
        probe(model, samples=1, length=2049, seed=0)
    with pytest.raises(ConfigError, match="haystacks need at least") as refused:
        probe(model, samples=1, length=100, seed=0)
    needed = int(refused.value.message.split()[-2])
    probe(model, samples=1, length=needed + 8, seed=0)


class WholeMatrix(ProbePass):
    """The same numbers from the whole attention matrix, in fp64."""

    def _on_needle(self, call: LayerCall) -> Tensor:
        group = call.query.shape[0] // call.key.shape[0]
        keys = call.key.double().repeat_interleave(group, 0)
        logits = call.query.double() @ keys.transpose(1, 2) * call.scaling
        n = logits.shape[1]
        attention = logits.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1)
        needle = attention[..., list(self._sample.needle)].sum(-1)
        steps = torch.stack([needle[:, token - 1] for token in self._sample.answer])
        return steps.mean(0).view(-1, group).mean(1)


def run_pass(model: LoadedModel, plan: ProbePass, sample: Sample) -> Tensor:
    n = len(sample.token_ids)
    none = torch.empty(0, dtype=torch.int64)
    forward(model.model, torch.tensor(sample.token_ids), torch.arange(n), plan, none)
    return plan.mass


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_mass_equals_the_whole_matrix(tiny_model: Factory, family: str) -> None:
    model = tiny_model(family, num_q_heads=6, num_kv_heads=2)
    (sample,) = make_samples(model.chat, 1, 500, seed=1)
    expected = run_pass(model, WholeMatrix(3, 2, sample), sample)
    assert expected.std() > 1e-4
    actual = run_pass(model, ProbePass(3, 2, sample), sample)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


def test_sliding_window_layers_have_no_importance(tiny_model: Factory) -> None:
    model = tiny_model("mistral", sliding_window=64)
    profile = probe(model, samples=1, length=500, seed=0)
    assert profile.importance == ((0.0, 0.0),) * 3


def looks_for_digits(model: LoadedModel, layer: int, kv_head: int) -> None:
    """Make one KV head look for digits, and all others look everywhere alike.

    Embedding: channel 0 marks digits, channel 1 is on for all tokens; nothing else is
    added to the stream. The head's queries and keys use RoPE's slowest pair only.
    """
    inner, dim = model.model.model, model.spec.head_dim
    group = model.spec.group_size
    slow = dim // 2 - 1
    with torch.no_grad():
        inner.embed_tokens.weight.zero_()
        inner.embed_tokens.weight[:, 1] = 1
        for digit in "0123456789":
            inner.embed_tokens.weight[model.chat.encode_content(digit)[0], 0] = 1
        for block in inner.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
            block.self_attn.q_proj.weight.zero_()
            block.self_attn.k_proj.weight.zero_()
        attention = inner.layers[layer].self_attn
        for g in range(group):
            attention.q_proj.weight[(kv_head * group + g) * dim + slow, 1] = 3
        attention.k_proj.weight[kv_head * dim + slow, 0] = 3


@pytest.mark.parametrize(("layer", "kv_head"), [(0, 1), (2, 0), (1, 1)])
def test_the_head_that_retrieves_ranks_first(tiny_model: Factory, layer: int, kv_head: int) -> None:
    model = tiny_model()
    looks_for_digits(model, layer, kv_head)
    profile = probe(model, samples=3, length=500, seed=0)
    ranked = sorted(
        ((x, i, h) for i, row in enumerate(profile.importance) for h, x in enumerate(row)),
        reverse=True,
    )
    assert ranked[0][1:] == (layer, kv_head)
    assert ranked[0][0] > 3 * ranked[1][0]
    # The others look everywhere alike: at the needle's 8 of about 490 tokens.
    assert all(abs(x - 8 / 495) < 1e-3 for x, _, _ in ranked[1:])


def test_profiles_are_reproducible(model: LoadedModel) -> None:
    ticks: list[int] = []
    made = probe(model, samples=2, length=500, seed=5, tick=lambda: ticks.append(1))
    assert made == probe(model, samples=2, length=500, seed=5)
    assert made.digest != probe(model, samples=2, length=500, seed=6).digest
    assert ticks == [1, 1]
    assert made.model_digest == model.spec.model_digest
    assert "2 samples of 500 tokens" in made.method
