"""What some queries of one layer see: their unpooled attention and the values it weighs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from criticalkv.kernels import ops

NORMS: tuple[ops.Norm, ...] = ("l1", "l2")


@dataclass(frozen=True)
class QueryRows:
    """Attention rows of a layer, by KV head and query head of its group; fp64 throughout.

    Attributes:
        probs: [num_kv_heads, group_size, m, columns]; each row sums to 1, what a query does
            not see is 0.
        values: [num_kv_heads, columns, head_dim].
        norms: of each of `NORMS`, [num_kv_heads, group_size, columns]: ‖v·W_O‖ per query head.
        w_o: [num_kv_heads, group_size, head_dim, D_model], each head's part of W_O.
    """

    probs: Tensor
    values: Tensor
    norms: dict[ops.Norm, Tensor]
    w_o: Tensor

    @property
    def columns(self) -> int:
        """Entries per head."""
        return self.values.shape[1]

    @cached_property
    def out(self) -> Tensor:
        """Attention outputs before W_O, [num_kv_heads, group_size, m, head_dim]."""
        return self.probs @ self.values[:, None]

    @cached_property
    def total(self) -> dict[ops.Norm, Tensor]:
        """C = Σ A_i‖𝓥_i‖ of each norm, [num_kv_heads, group_size, m]."""
        return {k: (self.probs @ norms[..., None])[..., 0] for k, norms in self.norms.items()}

    @cached_property
    def range(self) -> dict[ops.Norm, tuple[Tensor, Tensor]]:
        """Least and greatest ‖𝓥_i‖ that a query sees, [num_kv_heads, group_size, m] each."""
        seen = self.probs > 0
        return {
            kind: (
                norms[:, :, None].where(seen, torch.inf).amin(-1),
                norms[:, :, None].where(seen, 0).amax(-1),
            )
            for kind, norms in self.norms.items()
        }


def value_norms(values: Tensor, w_o: Tensor) -> dict[ops.Norm, Tensor]:
    """Return ‖v·W_O‖ of each norm, as policies select by it: fp32 arithmetic, held in fp64.

    Args:
        values: [num_kv_heads, columns, head_dim].
        w_o: [D_model, num_q_heads · head_dim].

    Returns:
        [num_kv_heads, group_size, columns] each.
    """
    group = w_o.shape[1] // (values.shape[0] * values.shape[2])
    return {kind: ops.value_norm(values, w_o, group, kind).double() for kind in NORMS}


def query_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    w_o: Tensor,
    norms: dict[ops.Norm, Tensor],
    *,
    scaling: float,
) -> QueryRows:
    """Compute what the last columns' own queries see, causally.

    Args:
        queries: [num_q_heads, m, head_dim], after RoPE; of the last m columns.
        keys: [num_kv_heads, columns, head_dim], after RoPE.
        values: like keys.
        w_o: [D_model, num_q_heads · head_dim].
        norms: see `value_norms`.
        scaling: factor of the logits.
    """
    heads, columns, dim = keys.shape
    group = queries.shape[0] // heads
    grouped = queries.double().view(heads, group, -1, dim)
    logits = grouped @ keys.double()[:, None].transpose(-1, -2) * scaling
    column = torch.arange(columns, device=keys.device)
    future = column > column[-logits.shape[2] :, None]
    return QueryRows(
        logits.masked_fill_(future, -torch.inf).softmax(-1),
        values.double(),
        norms,
        w_o.double().view(-1, heads, group, dim).permute(1, 2, 3, 0),
    )
