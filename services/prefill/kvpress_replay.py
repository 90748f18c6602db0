"""Replay as kvpress 0.5.5 runs KVzip: other prompts, other chunks, and a softmax of its own.

For each chunk of the context after the template's opening: an instruction, what the
template puts before an answer, and the chunk run at positions that continue after the
context. All of these tokens ask, and the softmax is over the context's first entries, the
chunk and the replay's own tokens only. Tokens of the template score 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.services.prefill.replay_pass import ReplayPass
from criticalkv.shared.eviction.kvpress.scorers import replayed
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.attention import LayerCall, attend_ragged, forward
from criticalkv.shared.model.chat import Message, Part

FIRST = "\n\nRepeat the previous context exactly."
NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
CUE = 8
"""Tokens of the chunk before that follow `NEXT`."""


def replay_pass_of(policy: Policy) -> type[ReplayPass]:
    """Return the replay that a policy's preset runs."""
    return KvpressReplayPass if policy.preset == "kvpress" else ReplayPass


@dataclass(frozen=True)
class Replay:
    """One chunk's forward: what it runs, and which of the node's own columns it scores."""

    begin: int
    end: int
    ids: tuple[int, ...]


class KvpressReplayPass(ReplayPass):
    """AttentionPlan of one replayed chunk."""

    _replay: Replay
    _peaks: list[Tensor]

    def run(self, token_ids: Sequence[int]) -> None:
        """Replay all tokens and give every full-attention layer its scores."""
        self.run_replays(list(self.replays(token_ids)))

    def replays(self, token_ids: Sequence[int]) -> Iterator[Replay]:
        """Cut a node's own tokens, without the template's opening, into replays."""
        chat, chunk = self._model.chat, self._policy.chunk
        begins = range(self._opening(token_ids), len(token_ids), chunk)
        prompt = chat.encode_content(FIRST)
        for begin, after in itertools.zip_longest(begins, begins[1:], fillvalue=len(token_ids)):
            piece = token_ids[begin:after]
            yield Replay(begin, after, (*prompt, *chat.generation_ids, *piece))
            prompt = [*chat.encode_content(NEXT), *piece[-CUE:]]

    def _opening(self, token_ids: Sequence[int]) -> int:
        """Tokens of the template before a user's text, if the node begins with them."""
        chat = self._model.chat
        pieces = chat.render([Message("user", (Part("x"),))], add_generation_prompt=True)
        opening = pieces[0].ids if pieces[0].kind == "template" else ()
        return len(opening) if tuple(token_ids[: len(opening)]) == opening else 0

    def run_replays(self, replays: Sequence[Replay]) -> None:
        """Run replays and give every full-attention layer its scores."""
        device = self._model.device
        end = self._chain.next_position + self._layers[0].keys.shape[1]
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._peaks = [torch.zeros(spooled.keys.shape[:2]) for spooled in self._layers]
        for replay in replays:
            self._replay = replay
            tokens = torch.tensor(replay.ids, device=device)
            positions = torch.arange(end, end + tokens.numel(), device=device)
            forward(self._model.model, tokens, positions, self, none)
        for index, spooled in enumerate(self._layers):
            if spooled.window is None:
                peak, values = self._peaks[index].to(device), spooled.values.to(device)
                spooled.scores = replayed(self._policy, peak, values, self._model.w_o(index))

    def attend(self, call: LayerCall) -> Tensor:
        """See AttentionPlan. Scores full-attention layers on the way."""
        self._check()
        if call.window is None:
            self._peaks[call.layer][:, self._replay.begin : self._replay.end] = self._peak(call)
        end = self._chain.next_position + self._layers[call.layer].keys.shape[1]
        return attend_ragged(call, self._context(call.layer), call.key, call.value, end)

    def _peak(self, call: LayerCall) -> Tensor:
        """Highest attention to each of the chunk's entries, fp32 [num_kv_heads, chunk]."""
        keys, replay = self._layers[call.layer].keys, self._replay
        sinks = min(self._policy.sinks, replay.begin)
        seen = torch.cat([keys[:, :sinks], keys[:, replay.begin : replay.end]], dim=1)
        peak = ops.attention_scores(
            call.query,
            seen.to(call.query.device),
            scaling=call.scaling,
            reductions=("max",),
            tail_keys=call.key,
        )["max"]
        return peak[..., sinks:].amax(1).cpu()
