"""How far an eviction moves an attention output, and what theory says it may at most.

One query of one query head: A its attention, 𝓥 = V·W_O, o = Σ A_i 𝓥_i. With N ∈ {0, 1}
what is kept and σ = Σ N_i A_i, the survivors are renormalised (CriticalKV, arXiv
2502.03805, Theorem 3.2): ô = Σ N_i A_i 𝓥_i / σ. In any norm,

    ‖o − ô‖ ≤ Σ_evicted A_i‖𝓥_i‖ + (1/σ − 1)·Σ_kept A_i‖𝓥_i‖ = C − (2 − 1/σ)·S = θ,

C = Σ A_i‖𝓥_i‖, S = Σ N_i A_i‖𝓥_i‖ (Theorem 3.3). Who selects by attention alone knows
of S only that it lies between σ·min‖𝓥‖ and σ·max‖𝓥‖. Put into θ, with min‖𝓥‖ where
2 − 1/σ > 0 and max‖𝓥‖ where not:

    θ ≤ C − (2σ − 1)·min‖𝓥‖ if σ > ½, else C + (1 − 2σ)·max‖𝓥‖,

the bound of Theorem C.1 (which assumes σ > ½, Assumption 3.4): it falls with σ, so the
entries with most attention minimise it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.services.analysis.query_rows import NORMS, QueryRows

ROUNDING = 1e-5
"""Of C: how far value norms in fp32 may push a bound below what it bounds."""
ORDER: dict[ops.Norm, int] = {"l1": 1, "l2": 2}


class Bounds(NamedTuple):
    """θ of Theorem 3.3 and the looser bound of Theorem C.1."""

    theta: Tensor
    attention_only: Tensor


def bounds(sigma: Tensor, share: Tensor, total: Tensor, least: Tensor, most: Tensor) -> Bounds:
    """Bound the change of an output.

    Where nothing is kept the output is 0, and C bounds its change.

    Args:
        sigma: σ.
        share: S.
        total: C.
        least: the least ‖𝓥_i‖ of all entries, kept or not.
        most: the greatest.
    """
    theta = total - share * (2 - 1 / sigma.where(sigma > 0, 1))
    known = torch.where(sigma > 0.5, least, most)
    return Bounds(theta, total - (2 * sigma - 1) * known)


@dataclass(frozen=True)
class Perturbation:
    """What keeping some entries does to the queries of a layer.

    All fp64 [num_q_heads, m] but `layer`.

    Attributes:
        sigma: σ, the share of unpooled attention that is kept.
        actual: of each norm ‖o − ô‖ of one head's output after W_O.
        bounds: of each norm what it cannot exceed.
        total: of each norm C.
        layer: of each norm [m], ‖Σ_heads (o − ô)‖ of the layer's whole output.
    """

    sigma: Tensor
    actual: dict[ops.Norm, Tensor]
    bounds: dict[ops.Norm, Bounds]
    total: dict[ops.Norm, Tensor]
    layer: dict[ops.Norm, Tensor]

    def violations(self) -> int:
        """Count the queries whose change exceeds θ, or whose θ exceeds the looser bound."""
        return sum(
            int((self.actual[kind] > theta + slack).sum()) + int((theta > loose + slack).sum())
            for kind, (theta, loose) in self.bounds.items()
            for slack in (ROUNDING * self.total[kind],)
        )


class _KeptSums(NamedTuple):
    """Σ over the kept entries of one KV head: of A·v, and of A‖𝓥‖ by norm."""

    weighed: Tensor
    share: dict[ops.Norm, Tensor]


def perturbation(rows: QueryRows, kept: Tensor) -> Perturbation:
    """Measure what queries lose.

    Args:
        rows: what they see.
        kept: bool [num_kv_heads, columns].
    """
    sigma = kept_share(rows, kept)
    sums = [_kept_sums(rows, h, mask) for h, mask in enumerate(kept)]
    weighed = torch.stack([part.weighed for part in sums]).flatten(0, 1)
    left = weighed / sigma.where(sigma > 0, 1)[..., None]
    change = (rows.out.flatten(0, 1) - left) @ rows.w_o.flatten(0, 1)
    share = {k: torch.stack([part.share[k] for part in sums]).flatten(0, 1) for k in NORMS}
    total = {k: rows.total[k].flatten(0, 1) for k in NORMS}
    extremes = {k: [x.flatten(0, 1) for x in rows.range[k]] for k in NORMS}
    return Perturbation(
        sigma,
        {k: torch.linalg.vector_norm(change, ORDER[k], -1) for k in NORMS},
        {k: bounds(sigma, share[k], total[k], *extremes[k]) for k in NORMS},
        total,
        {k: torch.linalg.vector_norm(change.sum(0), ORDER[k], -1) for k in NORMS},
    )


def kept_share(rows: QueryRows, kept: Tensor) -> Tensor:
    """Return σ, fp64 [num_q_heads, m], of kept entries bool [num_kv_heads, columns]."""
    return (rows.probs @ kept[:, None, :, None].to(rows.probs.dtype))[..., 0].flatten(0, 1)


def _kept_sums(rows: QueryRows, head: int, kept: Tensor) -> _KeptSums:
    """Of one KV head, [group_size, m, head_dim] and [group_size, m]."""
    attention = rows.probs[head][..., kept]
    share = {k: (attention @ rows.norms[k][head][:, kept, None])[..., 0] for k in NORMS}
    return _KeptSums(attention @ rows.values[head, kept], share)
