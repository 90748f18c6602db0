"""How much attention each token gets, and how far its value reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.services.analysis.attention_blocks import attention_blocks
from criticalkv.services.analysis.masking import masked_forward
from criticalkv.shared.model.attention import LayerCall
from criticalkv.shared.model.loader import LoadedModel


@dataclass(frozen=True)
class Attended:
    """Sums over the queries of a sequence's tokens `first` … n − 1, per token.

    Attributes:
        first: the first of these tokens.
        mass: Σ_q A_{q,i}, unpooled, fp64 [num_layers, num_q_heads, n].
        norms: ‖𝓥_i‖, 𝓥 = V·W_O, like mass.
        seen: queries that see each token, int64 [num_layers, n].
    """

    first: int
    mass: Tensor
    norms: Tensor
    seen: Tensor


class Watched:
    """Collects `Attended` from a forward pass: the `look` of `masked_forward`.

    Args:
        model: that runs.
        first: the first token whose query counts.
        norm: of 𝓥.
    """

    def __init__(self, model: LoadedModel, first: int = 0, norm: ops.Norm = "l1") -> None:
        self._model = model
        self._first = first
        self._norm = norm
        self._layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, call: LayerCall) -> None:
        """Take a layer."""
        group = call.query.shape[0] // call.key.shape[0]
        norms = ops.value_norm(call.value, self._model.w_o(call.layer), group, self._norm)
        mass, seen = _mass(call, self._first), _seen(call, self._first)
        self._layers.append((mass.cpu(), norms.flatten(0, 1).double().cpu(), seen.cpu()))

    def attended(self) -> Attended:
        """Return what the layers so far have summed."""
        mass, norms, seen = (torch.stack(parts) for parts in zip(*self._layers, strict=True))
        return Attended(self._first, mass, norms, seen)


def attended(
    model: LoadedModel, token_ids: Sequence[int], first: int = 0, norm: ops.Norm = "l1"
) -> Attended:
    """Run a sequence and sum what its queries attend to.

    Args:
        model: to run.
        token_ids: of one sequence.
        first: the first token whose query counts.
        norm: of 𝓥.
    """
    watched = Watched(model, first, norm)
    masked_forward(model, token_ids, look=watched)
    return watched.attended()


def _mass(call: LayerCall, first: int) -> Tensor:
    heads, n = call.query.shape[0], call.key.shape[1]
    mass = torch.zeros(heads, n, dtype=torch.float64, device=call.key.device)
    for block in attention_blocks(call, first):
        mass[block.heads] += block.probs.sum(1, dtype=torch.float64)
    return mass


def _seen(call: LayerCall, first: int) -> Tensor:
    """Token i is seen from itself on, until the sliding window has passed it."""
    n = call.key.shape[1]
    tokens = torch.arange(n, device=call.key.device)
    until = tokens + (n if call.window is None else call.window)
    return (until.clamp_max(n) - tokens.clamp_min(first)).clamp_min(0)
