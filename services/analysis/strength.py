"""The strength of an intervention on a span S: Δθ(S) = Σ_{i∈S} A_i‖𝓥_i‖₁.

What the span adds to the bound θ = C − (2 − 1/σ)·S of an output's change (CriticalKV,
arXiv 2502.03805, Theorem 3.3) before the survivors' renormalisation. For order and for
matching only: the bound is four to five times what really changes.
"""

from __future__ import annotations

from torch import Tensor

from criticalkv.services.analysis.attended import Attended
from criticalkv.services.analysis.span import Span


def token_strength(found: Attended, heads: Tensor | None = None) -> Tensor:
    """Return every token's Δθ, summed over queries and heads, fp64 [n].

    Args:
        found: by L1 norms.
        heads: bool [num_layers, num_q_heads]; None: all.
    """
    strength = found.mass * found.norms
    return (strength if heads is None else strength[heads][None]).sum((0, 1))


def strength(found: Attended, span: Span) -> Tensor:
    """Return Δθ(S) of every head, summed over queries, fp64 [num_layers, num_q_heads].

    Raises:
        ConfigError: if the span ends after the last token.
    """
    span.check_within(found.mass.shape[-1])
    inside = slice(span.begin, span.end)
    return (found.mass[..., inside] * found.norms[..., inside]).sum(-1)
