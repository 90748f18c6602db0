"""Linear layers whose weights are packed once for the few rows of a decode step.

The CPU's matrix product lays out a weight anew in every call, which dominates where only
some rows share it. Here each weight is kept in MKL's own layout instead. The operators
are private to torch: where they are missing, or do not agree with `F.linear`, layers stay
as they are. Knows nothing of attention or caches.
"""

from __future__ import annotations

import logging
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from criticalkv.shared.model.loader import LoadedModel

log = logging.getLogger(__name__)

ROWS = 256
"""Row count that MKL lays weights out for. Small hints (16) are slow for long questions and
win nothing for short ones; this one loses nowhere."""
CHECKED_ROWS = (1, 5)
CLOSE = 1e-4
"""Largest error that a self-check lets pass, of the largest output."""
UNPACKED = frozenset({"o_proj"})
"""Names of layers whose plain weight others read: `LoadedModel.w_o`."""


class PackedLinear(nn.Module):
    """An `nn.Linear` (fp32, CPU) without its plain weight. Inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach()
        self._packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS)
        # Of the plain weight the operator needs the shape. Were it to read an entry after
        # all, the result would show it.
        self._plain = weight.new_full((1, 1), math.nan).expand(weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """Map fp32 [..., in_features] to [..., out_features]."""
        # Told another row count than x has, the operator would take the plain weight.
        rows = x.numel() // self.in_features
        out: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, self._plain, self.bias, rows)
        return out

    def extra_repr(self) -> str:
        """Return the shape, as `nn.Linear` does."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def prepack(model: LoadedModel) -> int:
    """Swap a model's linear layers for packed ones, in place, and free their weights.

    Output projections keep theirs. A head that is tied to the embedding is packed too,
    at the price of a second copy of that matrix.

    Returns:
        How many layers were swapped: none on a GPU, in another dtype than float32, or
        where torch has no such operators.
    """
    if (model.spec.device, model.spec.dtype) != ("cpu", "float32"):
        return 0
    linears = [
        (parent, name, child)
        for parent in model.model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and name not in UNPACKED
    ]
    swapped = 0
    while linears:  # a layer's plain weight goes before the next one is packed
        parent, name, linear = linears.pop()
        packed = _checked(linear)
        if packed is None:
            log.warning("decode weights are not packed: torch's operators are missing or wrong")
            break
        setattr(parent, name, packed)
        swapped += 1
    return swapped


def _checked(linear: nn.Linear) -> PackedLinear | None:
    """Pack a layer; None if that is impossible or the results differ."""
    try:
        packed = PackedLinear(linear)
        return packed if all(_agree(packed, linear, rows) for rows in CHECKED_ROWS) else None
    except (AttributeError, RuntimeError):  # no such operator in this build, or not with these
        return None


@torch.inference_mode()
def _agree(packed: PackedLinear, linear: nn.Linear, rows: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, linear.in_features, generator=generator)
    want = F.linear(x, linear.weight, linear.bias)
    # False for NaN too.
    return bool((packed(x) - want).abs().max() <= CLOSE * want.abs().max())
