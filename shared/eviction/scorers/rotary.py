"""Turning queries and keys by RoPE, forwards and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from criticalkv.shared.eviction.context_layer import Rotation


class Turn(NamedTuple):
    """A change of position: cos and sin fp32 [rotary_dim], or [count, rotary_dim] of many."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def by(cls, steps: Tensor, rotation: Rotation) -> Turn:
        """Return the turns to `steps` positions later.

        Args:
            steps: int64 [count], ≥ 0.
            rotation: the layer's RoPE. What is turned carries its factor (yarn) already.
        """
        cos, sin = rotation(steps)
        factor = (cos.square() + sin.square()).sqrt()
        return cls(cos / factor, sin / factor)

    def __call__(self, x: Tensor) -> Tensor:
        """Turn [heads, count, head_dim] after RoPE; fp32, shaped as x."""
        return turned(x.float(), self.cos, self.sin)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first rotary_dim dimensions of x as RoPE does; the others stay.

    Args:
        x: [..., head_dim].
        cos: broadcastable to [..., rotary_dim], rotary_dim ≤ head_dim.
        sin: like cos.
    """
    width = cos.shape[-1]
    rotary = x[..., :width]
    rotary = rotary * cos + turn_half(rotary) * sin
    return rotary if width == x.shape[-1] else torch.cat([rotary, x[..., width:]], dim=-1)


def turn_half(x: Tensor) -> Tensor:
    """(x₁, x₂) → (−x₂, x₁), the halves of the last dimension, as RoPE pairs them."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
