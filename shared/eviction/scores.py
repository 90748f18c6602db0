"""LayerScores: what a scorer says about one layer's entries; allocators and selectors read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.errors import NumericsError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.finite import is_finite


@dataclass(frozen=True)
class LayerScores:
    """Scores of one layer's own n entries; higher means keep.

    Attributes:
        attention: fp32 [num_kv_heads, n], ≥ 0 except under preset kvpress.
        forced: bool [num_kv_heads, n] or [n], entries that are kept at every tier.
        critical: fp32 [num_kv_heads, n], (A + ε)·value norm, or None if not needed.
        relative: fp32 [num_kv_heads, n], share of the layer's output, or None.
        keep_all: whether every tier keeps everything (dense nodes, sliding-window
            layers); such a layer is outside every budget.
    """

    attention: Tensor
    forced: Tensor
    critical: Tensor | None = None
    relative: Tensor | None = None
    keep_all: bool = False

    @classmethod
    def everything(
        cls, num_kv_heads: int, n: int, device: torch.device | str | None = None
    ) -> LayerScores:
        """Return the scores of a layer whose n entries are kept at every tier."""
        attention = torch.zeros(num_kv_heads, n, device=device)
        return cls(attention, torch.ones(n, dtype=torch.bool, device=device), keep_all=True)

    @classmethod
    def of(
        cls,
        policy: Policy,
        attention: Tensor,
        forced: Tensor,
        *,
        values: Tensor,
        w_o: Tensor,
        sumsq: Tensor | None = None,
        real: Tensor | None = None,
    ) -> LayerScores:
        """Complete a scorer's result with what the policy's selector reads.

        Args:
            policy: which scores are needed.
            attention: fp32 [num_kv_heads, n].
            forced: bool [num_kv_heads, n] or [n].
            values: [num_kv_heads, n, head_dim].
            w_o: [D_model, num_q_heads · head_dim].
            sumsq: fp32 [num_kv_heads, group_size, n], Σ_q A²/‖o_q‖², for relative scores.
            real: bool [num_kv_heads, n] or None: what is not real (padding) scores 0 and
                is never forced.

        Raises:
            NumericsError: if a score or a value holds NaN or infinity.
        """
        finite(attention, "attention scores")
        finite(values, "values")
        critical = relative = None
        if policy.reads_critical:
            critical = critical_score(attention, values, w_o, policy, real)
        if policy.reads_relative:
            if sumsq is None:
                raise ValueError("relative scores need the sum of squares")
            relative = relative_score(sumsq, values, w_o)
        scores = cls(attention, forced, critical, relative)
        return scores if real is None else scores._only(real)

    def _only(self, real: Tensor) -> LayerScores:
        """Take padding out."""
        critical = None if self.critical is None else self.critical.where(real, 0)
        relative = None if self.relative is None else self.relative.where(real, 0)
        return LayerScores(self.attention.where(real, 0), self.forced & real, critical, relative)

    def needed(self, name: str) -> Tensor:
        """Return a score that the policy uses; its absence is a caller's mistake."""
        score = getattr(self, name)
        if not isinstance(score, Tensor):
            raise ValueError(f"the policy needs {name} scores")
        return score


def critical_score(
    attention: Tensor, values: Tensor, w_o: Tensor, policy: Policy, real: Tensor | None = None
) -> Tensor:
    """Return 𝓐 = (A + ε) ⊙ mean over the group of ‖v·W_O‖.

    CriticalKV, arXiv 2502.03805, Algorithm 1, line of stage 2, with ε of footnote 3.

    Args:
        attention: fp32 [num_kv_heads, n].
        values: [num_kv_heads, n, head_dim].
        w_o: [D_model, num_q_heads · head_dim].
        policy: gives ε and the norm.
        real: bool [num_kv_heads, n], False for padding, which is no entry; None: no padding.
    """
    norms = ops.value_norm(values, w_o, _group_size(values, w_o), policy.norm)
    eps: Tensor | float = float(policy.eps)
    if policy.eps_per_token:
        eps = eps / (values.shape[1] if real is None else real.sum(-1, keepdim=True).clamp_min(1))
    return finite((attention + eps) * norms.mean(1), "critical scores")


def relative_score(sumsq: Tensor, values: Tensor, w_o: Tensor) -> Tensor:
    """Return r_i = Σ_q (A_qi · ‖v_i W_O‖₂ / ‖o_q‖₂)², q over queries and the group.

    The share of the layer's output that an entry carries; comparable across layers.

    Args:
        sumsq: fp32 [num_kv_heads, group_size, n], Σ_q A² / ‖o_q‖².
        values: [num_kv_heads, n, head_dim].
        w_o: [D_model, num_q_heads · head_dim].
    """
    norms = ops.value_norm(values, w_o, _group_size(values, w_o), "l2")
    return finite((sumsq * norms.square()).sum(1), "relative scores")


def finite(score: Tensor, what: str) -> Tensor:
    """Return the score, or refuse it.

    Raises:
        NumericsError: if it holds NaN or infinity.
    """
    if not is_finite(score):
        raise NumericsError(f"{what} hold NaN or infinity")
    return score


def _group_size(values: Tensor, w_o: Tensor) -> int:
    return w_o.shape[1] // (values.shape[0] * values.shape[2])
