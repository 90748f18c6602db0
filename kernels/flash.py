"""Plain causal attention by flash-attn, where it is installed and applies.

flash-attn is an optional extra that only builds for CUDA; torch's own fused kernels
serve everywhere else.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

MAX_HEAD_DIM = 256


def applies(q: Tensor) -> bool:
    """Whether flash-attn can run these queries: CUDA, half precision, installed."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] <= MAX_HEAD_DIM
        and importlib.util.find_spec("flash_attn") is not None
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Return causal attention of a prefill without a parent.

    Args:
        q: [num_q_heads, T, D].
        k: [num_kv_heads, T, D].
        v: [num_kv_heads, T, D].
        scaling: factor of the logits.

    Returns:
        [num_q_heads, T, D].
    """
    from flash_attn import flash_attn_func

    batch = (t.transpose(0, 1)[None] for t in (q, k, v))
    out: Tensor = flash_attn_func(*batch, softmax_scale=scaling, causal=True)
    return out[0].transpose(0, 1)
