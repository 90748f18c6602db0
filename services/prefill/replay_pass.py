"""Replay: the model repeats the context, and its attention says what it needed for that.

For each chunk of the context's own tokens: a short instruction and the chunk run at
positions that continue after the context; softmax over everything visible, scores for
the context's columns only; the replay's own KV is dropped. Source: KVzip, in the
variant of replaying fixed chunks after a short instruction, or only their beginnings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.services.prefill.resident import Resident
from criticalkv.services.prefill.spooled_layer import SpooledLayer
from criticalkv.shared.cache.ragged import RaggedLayer, dense_layer
from criticalkv.shared.chain import Chain, merge_layers
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers.replay import ReplayScorer
from criticalkv.shared.model.attention import LayerCall, attend_ragged, forward
from criticalkv.shared.model.loader import LoadedModel

INSTRUCTION = "\n\nRepeat the previous context exactly:\n\n"


class ReplayPass:
    """AttentionPlan of one replayed chunk; scores add up over chunks."""

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        chain: Chain,
        layers: list[SpooledLayer],
        check: Callable[[], None],
    ) -> None:
        self._model = model
        self._policy = policy
        self._chain = chain
        self._layers = layers
        self._check = check
        self._resident = Resident(layers, model.device)
        self._scorer = ReplayScorer(policy, len(layers))
        self._instruction = model.chat.encode_content(INSTRUCTION)

    def run(self, token_ids: Sequence[int]) -> None:
        """Replay and give every full-attention layer its scores.

        Args:
            token_ids: the node's own tokens.
        """
        end = self._chain.next_position + len(token_ids)
        device = self._model.device
        passes = replayed(token_ids, self._policy)
        for part in passes:
            tokens = torch.tensor([*self._instruction, *part], device=device)
            positions = torch.arange(end, end + tokens.numel(), device=device)
            none = torch.empty(0, dtype=torch.int64, device=device)
            forward(self._model.model, tokens, positions, self, none)
        share = Fraction(sum(map(len, passes)), len(token_ids))
        for index, spooled in enumerate(self._layers):
            if spooled.first_pass is not None:
                self._scorer.add_first_pass(index, spooled.first_pass.to(device), share)
                spooled.first_pass = None
            if spooled.window is None:
                spooled.scores = self._scorer.layer_scores(
                    index, values=self._resident.layer(index)[1], w_o=self._model.w_o(index)
                )

    def attend(self, call: LayerCall) -> Tensor:
        """See AttentionPlan. Scores full-attention layers on the way."""
        self._check()
        if call.window is not None:
            end = self._chain.next_position + self._layers[call.layer].keys.shape[1]
            return attend_ragged(call, self._context(call.layer), call.key, call.value, end)
        keys, values = self._resident.layer(call.layer)
        parent = self._chain.layer(call.layer, self._model.spec, call.query.device)
        has_parent = parent.keys.shape[0] > 0
        out, peak, sumsq = ops.scored_attention(
            call.query,
            keys,
            values,
            call.key,
            call.value,
            scaling=call.scaling,
            prefix_k=parent.keys if has_parent else None,
            prefix_v=parent.values if has_parent else None,
            prefix_cu=parent.cu_seqlens if has_parent else None,
            # Only the repeated tokens ask; the instruction's own queries do not count.
            unscored=len(self._instruction),
            w_o=self._model.w_o(call.layer) if self._policy.reads_relative else None,
        )
        self._scorer.add_chunk(call.layer, peak, sumsq)
        return out

    def _context(self, layer: int) -> RaggedLayer:
        own = dense_layer(*self._resident.layer(layer), self._chain.next_position)
        if not self._chain.nodes:
            return own
        return merge_layers([self._chain.layer(layer, self._model.spec, self._model.device), own])


def replayed(token_ids: Sequence[int], policy: Policy) -> list[list[int]]:
    """Return the tokens of each replay pass, at most `chunk`.

    Of each chunk its first `share` is replayed, rounded up; what fits goes into one pass.
    """
    passes: list[list[int]] = []
    for start in range(0, len(token_ids), policy.chunk):
        chunk = token_ids[start : start + policy.chunk]
        part = list(chunk[: math.ceil(policy.share * len(chunk))])
        if passes and len(passes[-1]) + len(part) <= policy.chunk:
            passes[-1] += part
        else:
            passes.append(part)
    return passes
