"""The retrieval-head probe: how much each KV head attends to what the model copies.

Source: HeadKV (arXiv 2410.19258) finds heads by a needle in a haystack and counts, while
the answer is written, their attention to the needle's answer. Here the answer is teacher-
forced, and a KV head's importance is the mean over its group, the answer's tokens and all
samples. Plain engine code: knows no allocator and no files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.services.profile.haystack import FACTS, Sample, make_samples
from criticalkv.shared.cache.ragged import dense_layer
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.eviction.profile import Profile
from criticalkv.shared.model.attention import LayerCall, attend_ragged, forward
from criticalkv.shared.model.loader import LoadedModel

DIGITS = 8
"""Decimals of importance that are kept: above the noise of fp32."""


class ProbePass:
    """AttentionPlan of one sample: causal attention that notes who looks at the needle.

    Attributes:
        mass: fp64 [num_layers, num_kv_heads], attention on the needle, mean over the
            queries that predict the answer and over the group. Sliding-window layers,
            which evict nothing, stay 0.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, sample: Sample) -> None:
        self._sample = sample
        self.mass = torch.zeros(num_layers, num_kv_heads, dtype=torch.float64)

    def attend(self, call: LayerCall) -> Tensor:
        """See AttentionPlan."""
        if call.window is None:
            self.mass[call.layer] = self._on_needle(call).cpu()
        nothing = dense_layer(call.key[:, :0], call.value[:, :0], 0)
        return attend_ragged(call, nothing, call.key, call.value, 0)

    def _on_needle(self, call: LayerCall) -> Tensor:
        """Return fp64 [num_kv_heads]."""
        needle, answer = self._sample.needle, self._sample.answer
        first = answer.start - 1  # the query of one token predicts the next
        scores = ops.attention_scores(
            call.query[:, first : answer.stop - 1],
            call.key,
            scaling=call.scaling,
            first_query=first,
        )["mean"]
        return scores[..., needle.start : needle.stop].double().sum(-1).mean(1)


def probe(
    model: LoadedModel,
    *,
    samples: int,
    length: int,
    seed: int,
    tick: Callable[[], object] = lambda: None,
) -> Profile:
    """Make a model's profile.

    Args:
        model: to look at.
        samples: haystacks, one forward pass each.
        length: tokens of each, the answer included.
        seed: draws texts, facts and the others' places.
        tick: called after each sample.

    Raises:
        ConfigError: if the length does not fit the model, or the needles it.
    """
    limit = model.spec.max_positions
    if length > limit:
        raise ConfigError(f"length is {length}; the model's limit is {limit}", param="length")
    total = torch.zeros(model.spec.num_layers, model.spec.num_kv_heads, dtype=torch.float64)
    for sample in make_samples(model.chat, samples, length, seed):
        total += _mass(model, sample)
        tick()
    return Profile(
        model_digest=model.spec.model_digest,
        method=f"needle probe, {samples} samples of {length} tokens, {FACTS} facts, seed {seed}",
        importance=tuple(
            tuple(round(x, DIGITS) for x in row) for row in (total / samples).tolist()
        ),
    )


def _mass(model: LoadedModel, sample: Sample) -> Tensor:
    plan = ProbePass(model.spec.num_layers, model.spec.num_kv_heads, sample)
    tokens = torch.tensor(sample.token_ids, device=model.device)
    positions = torch.arange(tokens.numel(), device=model.device)
    none = torch.empty(0, dtype=torch.int64, device=model.device)
    forward(model.model, tokens, positions, plan, none)
    return plan.mass
