"""Whether a tensor holds NaN or infinity, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor


def all_finite(x: Tensor) -> Tensor:
    """Return whether every element of a floating tensor is finite, bool []."""
    # A sum is finite only if every term is (opposite infinities give NaN): no temporary,
    # and an fp32 accumulator for fp16. Where it is not, the terms are asked: they may
    # have been large.
    total = x.sum(dtype=torch.float32).isfinite()
    return total if bool(total) else x.isfinite().all()
