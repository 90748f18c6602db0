"""Attention after masking, with the renormalisation undone.

With N ∈ {0, 1} what survives, whatever removed the rest, a softmax over the survivors is
A' = N ⊙ A / Σ_j N_j A_j (CriticalKV, arXiv 2502.03805, Theorem 3.2): each survivor grows by
1 / Σ_j N_j A_j, the more the more the removed entries weighed. Undone,

    Ã = A' · Σ_j N_j A_j,

which equals N ⊙ A to rounding if A and A' come from the same q and k: within one layer. Of
two runs, one with the mask and one without, that holds for the first masked layer only, and
there only for queries whose hidden state no mask has reached: behind it q and k differ, and
Ã then shows what the mask changed besides its renormalisation.
"""

from __future__ import annotations

from torch import Tensor


def surviving_mass(plain: Tensor, kept: Tensor) -> Tensor:
    """Return Σ_j N_j A_j, [..., queries, 1].

    Args:
        plain: A, [..., queries, n].
        kept: N, bool, like plain.
    """
    return plain.where(kept, 0).sum(-1, keepdim=True)


def undo(masked: Tensor, mass: Tensor) -> Tensor:
    """Return Ã = A' · Σ_j N_j A_j.

    Args:
        masked: A', [..., queries, n].
        mass: see `surviving_mass`.
    """
    return masked * mass


def residual(plain: Tensor, masked: Tensor, kept: Tensor) -> float:
    """Return max |Ã − N ⊙ A|: rounding, where A and A' come from the same q and k."""
    undone = undo(masked, surviving_mass(plain, kept))
    return float((undone - plain.where(kept, 0)).abs().max())
