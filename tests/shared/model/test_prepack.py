"""Packed linear layers: the same results, less memory than twice, and a way back."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import make_model
from torch import Tensor, nn

from criticalkv.services.decode import deployment
from criticalkv.services.local import LocalEngine
from criticalkv.shared.cache.ragged import dense_layer
from criticalkv.shared.config import Config, DecodeConfig
from criticalkv.shared.model import prepack as module
from criticalkv.shared.model.attention import LayerCall, attend_ragged, forward
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.model.prepack import PackedLinear, prepack

FLOOR = 1e-6  # of the largest output, where plain itself happens to be exact
ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 64, 255, 256, 257, 512)
SHAPES = [(576, 192), (576, 576), (1536, 576), (48, 64), (17, 5), (1, 1), (576, 4999)]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3"]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def linear_of(shape: tuple[int, int], bias: bool = False) -> nn.Linear:
    torch.manual_seed(shape[0])
    return nn.Linear(*shape, bias=bias)


def error(got: Tensor, x: Tensor, linear: nn.Linear) -> float:
    """Largest difference from fp64."""
    bias = None if linear.bias is None else linear.bias.double()
    return float((got.double() - F.linear(x.double(), linear.weight.double(), bias)).abs().max())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_as_exact_as_torch(shape: tuple[int, int], bias: bool, threads: int) -> None:
    """err ≤ 2 · err(F.linear) against fp64, also with other threads than packed it."""
    linear = linear_of(shape, bias)
    packed = PackedLinear(linear)
    torch.set_num_threads(threads)
    for rows in ROWS:
        x = torch.randn(1, rows, shape[0])
        plain, ours = linear(x), packed(x)
        assert ours.shape == plain.shape
        floor = FLOOR * float(plain.abs().max())
        assert error(ours, x, linear) <= 2 * error(plain, x, linear) + floor


@pytest.mark.parametrize("rows", ROWS)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    linear = linear_of((576, 192))
    packed, x = PackedLinear(linear), torch.randn(rows, 576)
    together = packed(x)
    for row in {0, rows // 2, rows - 1}:
        alone = packed(x[row : row + 1])
        floor = FLOOR * float(alone.abs().max())
        limit = 2 * error(linear(x[row]), x[row], linear) + floor
        assert error(alone[0], x[row], linear) <= limit
        assert error(together[row], x[row], linear) <= limit
        poisoned = torch.full_like(x, torch.nan)
        poisoned[row] = x[row]
        assert error(packed(poisoned)[row], x[row], linear) <= limit


@torch.inference_mode()
def test_no_rows_and_other_strides() -> None:
    linear = linear_of((576, 192))
    packed = PackedLinear(linear)
    assert packed(torch.empty(1, 0, 576)).shape == (1, 0, 192)
    assert packed(torch.ones(576)).shape == (192,)
    x = torch.randn(576, 8).T
    torch.testing.assert_close(packed(x), linear(x))
    torch.testing.assert_close(packed(x[:, None]), linear(x[:, None]))


class Dense:
    """AttentionPlan of one sequence without a past."""

    def attend(self, call: LayerCall) -> Tensor:
        nothing = dense_layer(call.key[:, :0], call.value[:, :0], 0)
        return attend_ragged(call, nothing, call.key, call.value, 0)


def logits(model: LoadedModel, n: int) -> Tensor:
    ids = torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n))
    every = torch.arange(n)
    return forward(model.model, ids, every, Dense(), every)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_computes_the_same(family: str) -> None:
    """Every linear layer but the output projections is packed, a tied head too."""
    model = make_model(family)
    linears = [m for m in model.model.modules() if isinstance(m, nn.Linear)]
    plain = [logits(model, n) for n in (1, 5, 70)]
    w_o = [model.w_o(i).clone() for i in range(model.spec.num_layers)]
    assert prepack(model) == len(linears) - model.spec.num_layers
    left = [m for m in model.model.modules() if isinstance(m, nn.Linear)]
    assert left == [layer.self_attn.o_proj for layer in model.model.model.layers]
    for i, weight in enumerate(w_o):
        assert torch.equal(model.w_o(i), weight)
    for n, want in zip((1, 5, 70), plain, strict=True):
        torch.testing.assert_close(logits(model, n), want, rtol=0, atol=1e-3)
    assert prepack(model) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_plain_weights_are_not_kept_beside_the_packed_ones(tied: bool) -> None:
    model = make_model(tie_word_embeddings=tied)
    layers = model.model.model.layers
    weights = [weakref.ref(layers[1].mlp.up_proj.weight), weakref.ref(model.model.lm_head.weight)]
    prepack(model)
    gc.collect()
    assert [weight() is None for weight in weights] == [True, not tied]


@pytest.mark.parametrize("policy", ["dense", "window+adakv+twostage:window=4,interval=7,keep=0.4"])
def test_the_engines_run_on_a_packed_model(policy: str) -> None:
    """Eviction and stepwise turns read W_O of the same model."""
    turns = []
    for model in (make_model(), make_model()):
        if turns:
            assert prepack(model)
        with LocalEngine(model) as engine:
            context = engine.compress_tokens(list(range(100)), policy="default")
            turns.append(
                engine.generate(
                    context,
                    list(range(30)),
                    tier="0.3",
                    max_tokens=20,
                    policy=policy,
                    ignore_eos=True,
                    logprobs=0,
                )
            )
    assert turns[0].token_ids == turns[1].token_ids
    plain, packed = ([p.logprob for d in t.deltas for p in d.logprobs] for t in turns)
    assert packed == pytest.approx(plain, abs=1e-3)


# ------------------------------------------------------------------------- fallback


def missing(*_: Any) -> Tensor:
    raise AttributeError("_mkl_linear")


def refusing(*_: Any) -> Tensor:
    raise RuntimeError("not with these arguments")


def wrong(self: PackedLinear, x: Tensor) -> Tensor:
    return x.new_ones(*x.shape[:-1], self.out_features)


def nan(self: PackedLinear, x: Tensor) -> Tensor:
    return wrong(self, x) * torch.nan


@pytest.mark.parametrize("fault", [missing, refusing, wrong, nan])
def test_layers_stay_where_operators_are_missing_or_wrong(
    fault: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    before = dict(model.model.named_modules())
    want = logits(model, 9)
    monkeypatch.setattr(PackedLinear, "forward", fault)
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        assert prepack(model) == 0
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "decode weights are not packed"
    ]
    assert dict(model.model.named_modules()) == before
    assert torch.equal(logits(model, 9), want)


def test_an_operator_that_reads_the_plain_weight_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch could take it for some row counts; it is not there any more."""

    def reading(self: PackedLinear, x: Tensor) -> Tensor:
        return F.linear(x, self._plain, self.bias)

    monkeypatch.setattr(PackedLinear, "forward", reading)
    assert prepack(make_model()) == 0


def test_only_fp32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_checked", lambda _: pytest.fail("packed"))
    model = make_model()
    for other in ({"dtype": "bfloat16"}, {"device": "cuda"}):
        assert prepack(replace(model, spec=replace(model.spec, **other))) == 0


@pytest.mark.parametrize("wanted", [True, False])
def test_the_decode_deployment_packs_if_it_is_told_to(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    engines: list[Any] = []

    class Engine:
        def __init__(self, *args: Any) -> None:
            engines.append(args)

        def warm_up(self, *, codecs: bool) -> None:
            pass

    monkeypatch.setattr(deployment, "load_model", lambda *_: model)
    monkeypatch.setattr(deployment, "DecodeEngine", Engine)
    deployment.Decode(Config(decode=DecodeConfig(prepack=wanted)))
    assert engines[0][0] is model
    assert isinstance(model.model.lm_head, PackedLinear) == wanted
