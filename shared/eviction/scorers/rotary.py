"""Turning queries and keys by RoPE, forwards and back."""

from __future__ import annotations

import torch
from torch import Tensor

from criticalkv.shared.eviction.context_layer import Rotation


def rotate(x: Tensor, steps: int, rotation: Rotation) -> Tensor:
    """Move what was rotated at some position to `steps` positions later.

    Args:
        x: [heads, count, head_dim], after RoPE.
        steps: ≥ 0.
        rotation: the model's RoPE. Its factor (yarn) is in `x` already.

    Returns:
        fp32, shaped as x.
    """
    cos, sin = rotation(torch.tensor([steps], device=x.device))
    factor = (cos.square() + sin.square()).sqrt()
    x = x.float()
    return (x * cos + turn_half(x) * sin) / factor


def turn_half(x: Tensor) -> Tensor:
    """(x₁, x₂) → (−x₂, x₁), the halves of the last dimension, as RoPE pairs them."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
