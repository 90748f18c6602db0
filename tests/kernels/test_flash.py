"""flash-attn is used where it applies; its call is checked against torch with a stand-in."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from criticalkv.kernels import flash, ops


def stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    """flash_attn_func's contract, [batch, T, heads, D], computed by torch."""
    assert options.keys() == {"softmax_scale", "causal"}
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        *heads_first, is_causal=True, scale=options["softmax_scale"], enable_gqa=True
    )
    return out.transpose(1, 2)


def test_the_call_has_the_right_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    module.flash_attn_func = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    q, k, v = torch.randn(4, 7, 16), torch.randn(2, 7, 16), torch.randn(2, 7, 16)
    none = torch.empty(0, 16)
    expected, _ = ops.ragged_attention(
        q, none, none, torch.zeros(3, dtype=torch.int32), k, v, scaling=0.3
    )
    monkeypatch.setattr(flash, "applies", lambda _: True)
    ours, lse = ops.ragged_attention(
        q, none, none, torch.zeros(3, dtype=torch.int32), k, v, scaling=0.3
    )
    assert lse is None
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


def test_it_applies_to_half_precision_on_cuda_only() -> None:
    assert not flash.applies(torch.zeros(1, 1, 64))
    assert not flash.applies(torch.zeros(1, 1, 64, dtype=torch.bfloat16))
