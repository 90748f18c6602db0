"""ExpectedAttention undoes the model's own RoPE, whatever its variant."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from naive_layer import SCALING
from tiny_models import make_model
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers.expected import Future, _before_rotation, expected

torch.set_num_threads(1)

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 256,
    },
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


def rotated(rope: str, first: int) -> tuple[torch.Tensor, ContextLayer]:
    """Queries before RoPE, and the layer after it."""
    family = "phi3" if rope == "partial" else "llama"
    model = make_model(family, rope_parameters=ROPES[rope])
    torch.manual_seed(3)
    queries, keys = torch.randn(4, 9, 16), torch.randn(2, 9, 16)
    cos, sin = model.rotation(0, torch.arange(first, first + 9))
    turned = apply_rotary_pos_emb(queries[None], keys[None], cos[None], sin[None])
    values, w_o = torch.randn(2, 9, 16), torch.randn(48, 64)
    layer = ContextLayer(
        queries=turned[0][0],
        out=torch.randn(4, 9, 16),
        keys=turned[1][0],
        values=values,
        w_o=w_o,
        scaling=SCALING,
        first_position=first,
        rotation=partial(model.rotation, 0),
    )
    return queries, layer


@pytest.mark.parametrize("first", [0, 300])
@pytest.mark.parametrize("rope", ROPES)
def test_queries_before_rope(rope: str, first: int) -> None:
    queries, layer = rotated(rope, first)
    assert layer.rotation is not None
    cos, sin = layer.rotation(torch.tensor([5]))
    assert (float(cos.square().mean() + sin.square().mean()) > 1.01) == (rope == "yarn")
    policy = Policy.parse("expectedattention:sinks=2")
    back = torch.cat(list(_before_rotation(policy, layer, layer.rotation)), dim=1)
    torch.testing.assert_close(back, queries[:, 2:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rope", ROPES)
def test_mean_query_at_one_coming_position(rope: str) -> None:
    """future=1: the mean is the mean query as the model would rotate it there."""
    queries, layer = rotated(rope, 300)
    assert layer.rotation is not None
    policy = Policy.parse("expectedattention:sinks=2,future=1")
    mean = queries[:, 2:].mean(1, keepdim=True)
    cos, sin = layer.rotation(torch.tensor([309]))
    turned, _ = apply_rotary_pos_emb(mean[None], mean[None], cos[None], sin[None])
    future = Future.of(policy, layer, layer.rotation)
    torch.testing.assert_close(future.mean.flatten(0, 1), turned[0, :, 0], rtol=1e-4, atol=1e-5)


def test_logits_are_the_mean_of_exp_over_normal_queries() -> None:
    """log E[exp(s·q·k)] by sampling: what the paper's closed form stands for."""
    _, layer = rotated("yarn", 0)
    assert layer.rotation is not None
    future = Future.of(Policy.parse("expectedattention"), layer, layer.rotation)
    assert future.covariance is not None
    got = future.logits(layer.keys[:1, :3], 0.1)[0, 0]
    size, axes = torch.linalg.eigh(future.covariance[0, 0].double())
    spread = axes * size.clamp_min(0).sqrt()
    torch.manual_seed(0)
    samples = future.mean[0, 0] + torch.randn(200_000, 16).double() @ spread.T
    sampled = (0.1 * samples @ layer.keys[0, :3].double().T).exp().mean(0).log()
    torch.testing.assert_close(got.double(), sampled, rtol=0, atol=0.01)


def test_without_a_rotation() -> None:
    _, layer = rotated("default", 0)
    bare = ContextLayer(layer.queries, layer.out, layer.keys, layer.values, layer.w_o, SCALING)
    with pytest.raises(ValueError, match="rotation"):
        expected(Policy.parse("expectedattention"), bare)
