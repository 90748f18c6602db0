"""Shape: the sizes of one attention layer and where its tensors are. Random tensors of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """One layer of a model, and how much of it checks and measurements use.

    Attributes:
        num_q_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: D.
        model_dim: D_model.
        mlp_dim: width of the MLP.
        context: tokens that are measured.
        sample: tokens that are checked, best a prime.
        device: of all tensors.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    model_dim: int
    mlp_dim: int
    context: int
    sample: int
    device: str

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def scaling(self) -> float:
        """Factor of the logits."""
        return float(self.head_dim**-0.5)

    def queries(self, count: int, dtype: torch.dtype) -> Tensor:
        """Random [num_q_heads, count, D]."""
        return self.random(self.num_q_heads, count, self.head_dim, dtype=dtype)

    def entries(self, count: int, dtype: torch.dtype) -> Tensor:
        """Random [num_kv_heads, count, D], heads within rows as a model makes them."""
        rows = self.random(count, self.num_kv_heads, self.head_dim, dtype=dtype)
        return rows.transpose(0, 1)

    def w_o(self, dtype: torch.dtype) -> Tensor:
        """Random [D_model, num_q_heads · D], of a trained matrix' size."""
        width = self.num_q_heads * self.head_dim
        return self.random(self.model_dim, width, dtype=dtype) * width**-0.5

    def random(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Normal with mean 0 and variance 1."""
        return torch.randn(size, dtype=dtype, device=self.device)


LLAMA = Shape(32, 8, 128, 4096, 14336, context=32768, sample=1009, device="cuda")
"""Llama-3.1-8B."""
