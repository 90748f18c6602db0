"""Whether a tensor holds NaN or infinity, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element of a floating tensor is finite."""
    # A sum is finite only if every term is (opposite infinities give NaN): no temporary,
    # and an fp32 accumulator for fp16. Where it is not, the terms are asked: they may
    # have been large.
    if bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        return True
    return bool(torch.isfinite(tensor).all())
