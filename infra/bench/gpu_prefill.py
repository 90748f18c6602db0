"""What scoring costs a prefill: a model of random weights, with and without CriticalKV.

Each layer of the scored passes takes window scores, value norms, the two-stage selection
of every tier, ranks and the packed copy, through `ops`. All layers are alike, so a few
stand for all: a share of a layer is a share of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from gpu_clock import alternate
from gpu_shape import Shape
from gpu_speed import DTYPE, KEPT, POOLING, WINDOW, kept_lens
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel, LlamaConfig

from criticalkv.kernels import ops

LAYERS = 4
"""Of the model's, which has 32."""
VOCABULARY = 32000
"""Only embeddings are looked up; no logits are made."""
EPSILON = 1e-4
NORMS: tuple[ops.Norm, ...] = ("l1", "l2")


def scoring_share(shape: Shape, layers: int = LAYERS) -> dict[str, Any]:
    """Time prefills of a context, and the parts of one layer's scoring.

    Returns:
        seconds of the plain pass and of those scored with either norm; shares: what a
        scored pass takes longer, in plain passes; microseconds of each part.
    """
    model = _model(shape, layers)
    tokens = torch.randint(VOCABULARY, (1, shape.context), device=shape.device)
    calls: dict[str, Callable[[], Any]] = {"plain": lambda: _run(model, tokens, None)}
    for norm in NORMS:
        calls[norm] = lambda norm=norm: _run(model, tokens, norm)
    samples = alternate(calls, shape.device)
    took = {name: median(values) for name, values in samples.items()}
    return {
        "layers": layers,
        "tokens": shape.context,
        "seconds": took,
        "share": {norm: took[norm] / took["plain"] - 1 for norm in NORMS},
        "parts_us": parts(shape),
        "samples_s": samples,
    }


def parts(shape: Shape) -> dict[str, float]:
    """Median microseconds of each part of one layer's scoring, on random tensors."""
    n = shape.context
    queries, w_o = shape.queries(n, DTYPE), shape.w_o(DTYPE)
    layer = Layer(queries, shape.entries(n, DTYPE), shape.entries(n, DTYPE), w_o, shape.scaling)
    attention = layer.attention()
    critical = layer.critical(attention, "l2")
    lens, cu = kept_lens(shape.num_kv_heads, n)
    order, admitted = layer.admit(attention, critical, lens)
    kept = ops.tier_ranks(order, admitted, len(KEPT))[:, : int(lens[-1, 0])].flatten()
    calls: dict[str, Callable[[], Any]] = {
        "window": layer.attention,
        "norm_l1": lambda: layer.critical(attention, "l1"),
        "norm_l2": lambda: layer.critical(attention, "l2"),
        "selection": lambda: layer.admit(attention, critical, lens),
        "ranks": lambda: ops.tier_ranks(order, admitted, len(KEPT)),
        "pack": lambda: ops.pack(layer.keys, layer.values, kept, cu, 0, lens),
    }
    return {name: 1e6 * median(s) for name, s in alternate(calls, shape.device).items()}


@dataclass(frozen=True)
class Layer:
    """One layer of a context, and CriticalKV with a window and uniform budgets on it.

    Attributes:
        queries: [num_q_heads, n, D], after RoPE.
        keys: [num_kv_heads, n, D], after RoPE.
        values: like keys.
        w_o: [D_model, num_q_heads · D].
        scaling: factor of the logits.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    w_o: Tensor
    scaling: float

    def compress(self, norm: ops.Norm) -> tuple[Tensor, ...]:
        """Score, select, rank and pack."""
        attention = self.attention()
        lens, cu = kept_lens(*self.keys.shape[:2])
        order, admitted = self.admit(attention, self.critical(attention, norm), lens)
        ranked = ops.tier_ranks(order, admitted, len(KEPT))
        kept = ranked[:, : int(lens[-1, 0])].flatten()
        return ops.pack(self.keys, self.values, kept, cu, 0, lens)

    def attention(self) -> Tensor:
        """Mean attention of the window and the group, max-pooled before the window: [H, n]."""
        return ops.window_scores(
            self.queries[:, -WINDOW:],
            self.keys,
            scaling=self.scaling,
            kernel=POOLING,
            pooling="max",
        )

    def critical(self, attention: Tensor, norm: ops.Norm) -> Tensor:
        """(A + ε) ⊙ the group's mean of ‖v·W_O‖: [H, n]."""
        group = self.queries.shape[0] // self.keys.shape[0]
        return (attention + EPSILON) * ops.value_norm(self.values, self.w_o, group, norm).mean(1)

    def admit(self, attention: Tensor, critical: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the order by critical score, int64 [H, n], and the tier that admits each
        entry, uint8 [H, n]: half of a budget by attention, the rest by critical score."""
        by_attention, by_critical = (
            score.sort(dim=-1, descending=True, stable=True).indices
            for score in (attention, critical)
        )
        window = torch.zeros_like(attention, dtype=torch.bool)
        window[:, -WINDOW:] = True
        admitted = torch.full_like(window, len(KEPT), dtype=torch.uint8)
        for tier in reversed(range(len(KEPT))):
            spare = max(0, int(lens[tier, 0]) - WINDOW)
            first = window | _take(by_attention, ~window, spare // 2)
            kept = first | _take(by_critical, ~first, spare - spare // 2)
            admitted.masked_fill_(kept, tier)
        return by_critical, admitted


def _take(order: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Return the mask of the first `count` candidates in an order."""
    waiting = candidates.gather(-1, order)
    taken = waiting & (waiting.cumsum(-1) <= count)
    return torch.zeros_like(candidates).scatter_(-1, order, taken)


def _model(shape: Shape, layers: int) -> nn.Module:
    config = LlamaConfig(
        hidden_size=shape.model_dim,
        intermediate_size=shape.mlp_dim,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_q_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=VOCABULARY,
        max_position_embeddings=shape.context,
    )
    with torch.device(shape.device):
        return AutoModel.from_config(config, dtype=DTYPE, attn_implementation=NAME).eval()


def _run(model: nn.Module, tokens: Tensor, scoring: ops.Norm | None) -> None:
    with torch.inference_mode():
        model(input_ids=tokens, use_cache=False, scoring=scoring)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float,
    scoring: ops.Norm | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Torch's own attention, then the layer's scoring."""
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    if scoring is not None:
        layer = Layer(query[0], key[0], value[0], module.o_proj.weight, scaling)
        layer.compress(scoring)
    return out.transpose(1, 2).contiguous(), None


NAME = "scored"
AttentionInterface.register(NAME, _attention)
