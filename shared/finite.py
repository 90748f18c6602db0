"""Whether a tensor holds NaN or infinity."""

from __future__ import annotations

from torch import Tensor

from criticalkv.kernels.finite import all_finite


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element of a floating tensor is finite."""
    return bool(all_finite(tensor))
