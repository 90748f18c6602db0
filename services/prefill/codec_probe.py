"""What quantizing a node changes: errors of its entries, and of the next tokens' logits.

The context's last tokens run once more, over what is kept of the tokens before them: over
the entries as they were, and over the entries as they are stored. This is a pass of its own
beside the context's: in one batch with it the context's KV could differ in its last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from criticalkv.services.prefill.codec_errors import CodecErrors
from criticalkv.services.prefill.side_forward import SideForward
from criticalkv.shared.cache.quality import MAX_ERROR, CodecQuality
from criticalkv.shared.cache.quantized import QuantizedLayer
from criticalkv.shared.cache.ragged import RaggedLayer, cu_seqlens_of
from criticalkv.shared.chain import Chain, merge_layers
from criticalkv.shared.eviction.scores import finite
from criticalkv.shared.model.attention import AttentionPlan, LayerCall, attend_ragged, forward
from criticalkv.shared.model.loader import LoadedModel

PROBES = 32
"""Tokens at the context's end that ask, at most; a context's first token never does."""


@dataclass(frozen=True)
class _Kept:
    """One layer of what the probes see, ancestors included: as it was, and as it is stored."""

    exact: RaggedLayer
    stored: RaggedLayer


class CodecProbe:
    """Follows a node's layers as they are published; a context manager around that.

    Args:
        model: that computes the node.
        chain: the node's ancestors.
        token_ids: the node's own tokens.
        timeout_s: longest wait for one layer.
    """

    def __init__(
        self, model: LoadedModel, chain: Chain, token_ids: Sequence[int], timeout_s: float
    ) -> None:
        self._model = model
        self._chain = chain
        self._count = min(PROBES, len(token_ids) - 1)
        self._tokens = list(token_ids[len(token_ids) - self._count :])
        self._start = chain.next_position + len(token_ids) - self._count
        self._errors = CodecErrors()
        self._layers = 0
        self._side: SideForward[_Kept] = SideForward(self._run, self._attend, timeout_s)

    def __enter__(self) -> CodecProbe:
        if self._count:
            self._side.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._count:
            self._side.__exit__(kind, error, trace)

    def see(self, exact: RaggedLayer, groups: QuantizedLayer) -> None:
        """Take the next layer: its kept entries, and what they are stored as."""
        stored = groups.ragged(exact.keys.dtype)
        self._errors.add(exact, stored)
        if self._count:
            above = self._above()
            self._side.show(_Kept(self._visible(above, exact), self._visible(above, stored)))
        self._layers += 1

    def quality(self) -> CodecQuality:
        """Return the errors of all layers, and the mean KL where there was a token to ask.

        Raises:
            NumericsError: if a logit is not finite.
        """
        return self._errors.quality(self._kl() if self._count else None)

    def _above(self) -> list[RaggedLayer]:
        """The ancestors' entries of this layer, if there are ancestors."""
        if not self._chain.nodes:
            return []
        return [self._chain.layer(self._layers, self._model.spec, self._model.device)]

    def _visible(self, above: list[RaggedLayer], kept: RaggedLayer) -> RaggedLayer:
        """The ancestors' entries and those before the first probe, where the model runs."""
        device, before = self._model.device, _before(kept, self._start)
        keys, values = before.keys.to(device), before.values.to(device)
        own = RaggedLayer(keys, values, before.positions.to(device), before.cu_seqlens)
        return merge_layers([*above, own])

    def _run(self, plan: AttentionPlan) -> Tensor:
        device = self._model.device
        tokens = torch.tensor(2 * self._tokens, device=device)
        positions = torch.arange(self._start, self._start + self._count, device=device).repeat(2)
        every = torch.arange(tokens.numel(), device=device)
        return forward(self._model.model, tokens, positions, plan, every)

    def _attend(self, call: LayerCall, kept: _Kept) -> Tensor:
        halves = call.split([self._count, self._count])
        outs = [
            attend_ragged(half, seen, half.key, half.value, self._start)
            for half, seen in zip(halves, (kept.exact, kept.stored), strict=True)
        ]
        return torch.cat(outs, 1)

    def _kl(self) -> float:
        """Mean over the probes of KL(exact ‖ stored), nats."""
        exact, stored = self._side.result().float().log_softmax(-1).chunk(2)
        kl = (exact.exp() * (exact - stored)).sum(-1).mean()
        return float(finite(kl, "logits").clamp(0, MAX_ERROR))


def _before(layer: RaggedLayer, position: int) -> RaggedLayer:
    """The entries at positions less than `position`."""
    earlier = layer.positions < position
    counts = [int(part.sum()) for part in earlier.cpu().split(layer.lens.tolist())]
    return RaggedLayer(
        layer.keys[earlier], layer.values[earlier], layer.positions[earlier], cu_seqlens_of(counts)
    )
