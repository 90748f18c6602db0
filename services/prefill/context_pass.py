"""The forward pass over a context: attend, then hand each layer to a sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from criticalkv.shared.cache.ragged import RaggedLayer
from criticalkv.shared.chain import Chain
from criticalkv.shared.failpoints import hit
from criticalkv.shared.model.attention import LayerCall, attend_ragged, forward
from criticalkv.shared.model.loader import LoadedModel


@dataclass(frozen=True)
class LayerPass:
    """What one layer of the context pass computed.

    Attributes:
        call: the layer's queries, keys and values.
        out: [num_q_heads, n, head_dim], before W_O.
        prefix: the ancestors' entries that every query saw.
    """

    call: LayerCall
    out: Tensor
    prefix: RaggedLayer


@dataclass(frozen=True)
class ComputedContext:
    """A root context whose forward has run, with all that every scorer may need.

    Attributes:
        token_ids: that ran, from position 0 on.
        layers: of all decoder layers, in order.
        forward_s: seconds of the forward.
    """

    token_ids: tuple[int, ...]
    layers: tuple[LayerPass, ...]
    forward_s: float

    @classmethod
    def of(
        cls, model: LoadedModel, token_ids: Sequence[int], check: Callable[[], None] = lambda: None
    ) -> ComputedContext:
        """Run a context's forward; raise what `check` raises, between layers."""
        layers = _Layers()
        forward_s = ContextPass(model, Chain(), layers, check).run(token_ids)
        return cls(tuple(token_ids), tuple(layers), forward_s)


class LayerSink(Protocol):
    """Takes layers as they are done; may block to send."""

    def take(self, layer: LayerPass) -> None:
        """Use a layer. What the sink does not keep is freed."""
        ...


class _Layers(list[LayerPass]):
    """LayerSink that keeps all."""

    take = list.append


class ContextPass:
    """AttentionPlan of a context over its ancestors' chain."""

    def __init__(
        self, model: LoadedModel, chain: Chain, sink: LayerSink, check: Callable[[], None]
    ) -> None:
        self._model = model
        self._chain = chain
        self._sink = sink
        self._check = check
        self.sink_s = 0.0

    @property
    def first_position(self) -> int:
        """Original position of the context's first token."""
        return self._chain.next_position

    def run(self, token_ids: Sequence[int]) -> float:
        """Run the context; return the forward's seconds, those of the sink left out."""
        started = time.perf_counter()
        device = self._model.device
        tokens = torch.tensor(token_ids, device=device)
        begin = self.first_position
        positions = torch.arange(begin, begin + tokens.numel(), device=device)
        none = torch.empty(0, dtype=torch.int64, device=device)
        forward(self._model.model, tokens, positions, self, none)
        return time.perf_counter() - started - self.sink_s

    def attend(self, call: LayerCall) -> Tensor:
        """See AttentionPlan. Raises what `check` raises, between layers."""
        self._check()
        prefix = self._chain.layer(call.layer, self._model.spec, self._model.device)
        out = attend_ragged(call, prefix, call.key, call.value, self._chain.next_position)
        self._done(LayerPass(call, out, prefix))
        return out

    def repeat(self, context: ComputedContext) -> None:
        """Hand over what a forward has computed before, instead of running it again."""
        for layer in context.layers:
            self._check()
            self._done(layer)

    def _done(self, layer: LayerPass) -> None:
        started = time.perf_counter()
        self._sink.take(layer)
        self.sink_s += time.perf_counter() - started
        hit("prefill.layer")
