"""ExpectedAttention scorer: attention of queries yet to come (arXiv 2510.00636)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.shared.eviction.context_layer import ContextLayer, Rotation
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers.rotary import turned
from criticalkv.shared.eviction.scores import LayerScores, finite

COLUMNS = 4096
"""Keys per block of the quadratic form."""
QUERIES = 4096
"""Queries per block of their mean and covariance."""


def expected(policy: Policy, layer: ContextLayer) -> LayerScores:
    """Score a layer's entries by the attention that a normally distributed query gives.

    softmax over the visible keys of scaling·k·μ̄ + scaling²/2·kᵀΣ̄k, mean over the group,
    then × ‖v‖₂ if `vnorm`. Under a critical selector that factor is left out: the selector
    multiplies by ‖v·W_O‖ itself. The first `sinks` entries are forced and outside the
    softmax; a context not longer than that keeps all.
    """
    attention = torch.zeros(layer.keys.shape[:2], device=layer.keys.device)
    if layer.n > policy.sinks:
        attention[:, policy.sinks :] = future_attention(policy, layer)
    if policy.vnorm and policy.selector not in ("critical", "twostage"):
        attention *= torch.linalg.vector_norm(layer.values, dim=-1, dtype=torch.float32)
    return LayerScores.of(
        policy, attention, layer.first(policy.sinks), values=layer.values, w_o=layer.w_o
    )


def future_attention(policy: Policy, layer: ContextLayer) -> Tensor:
    """Attention to the entries after the sinks, group mean: fp32 [num_kv_heads, n - sinks]."""
    if layer.rotation is None:
        raise ValueError("expected attention needs the model's rotation")
    finite(layer.keys, "keys")
    future = Future.of(policy, layer, layer.rotation)
    logits = future.logits(layer.keys[:, policy.sinks :], layer.scaling)
    own = logits.shape[-1]
    if layer.prefix_keys is not None and layer.prefix_cu is not None:
        keys, visible = _dense(layer.prefix_keys, layer.prefix_cu.to(layer.keys.device))
        seen = future.logits(keys, layer.scaling)
        logits = torch.cat([logits, seen.masked_fill(~visible[:, None], -torch.inf)], dim=-1)
    return logits.softmax(-1)[..., :own].mean(1)


@dataclass(frozen=True)
class Future:
    """The normal distribution of a layer's coming queries, after their mean rotation.

    Attributes:
        mean: fp32 [num_kv_heads, group_size, head_dim].
        covariance: fp32 [num_kv_heads, group_size, head_dim, head_dim], or None.
    """

    mean: Tensor
    covariance: Tensor | None

    @classmethod
    def of(cls, policy: Policy, layer: ContextLayer, rotation: Rotation) -> Future:
        """Take mean and covariance of the queries before RoPE, without the first `sinks`
        tokens, and rotate both by the mean rotation of the next `future` positions."""
        end = layer.first_position + layer.n
        coming = torch.arange(end, end + policy.future)
        turn = _mean_rotation(rotation, coming, layer.queries.shape[2])
        mean = _mean(_before_rotation(policy, layer, rotation))
        grouped = (layer.keys.shape[0], layer.group_size)
        covariance = None
        if policy.covariance:
            spread = _spread(_before_rotation(policy, layer, rotation), mean)
            covariance = (turn @ spread @ turn.T).unflatten(0, grouped)
        return cls((mean @ turn.T).unflatten(0, grouped), covariance)

    def logits(self, keys: Tensor, scaling: float) -> Tensor:
        """Return log E[exp(scaling · q·k)] of [num_kv_heads, p, head_dim] keys.

        Returns:
            fp32 [num_kv_heads, group_size, p].

        Raises:
            NumericsError: if one is NaN or infinite.
        """
        keys = keys.float()
        logits = scaling * (self.mean @ keys.transpose(1, 2))
        if self.covariance is not None:
            blocks = [
                ((block[:, None] @ self.covariance) * block[:, None]).sum(-1)
                for block in keys.split(COLUMNS, dim=1)
            ]
            logits += scaling**2 / 2 * torch.cat(blocks, dim=-1)
        return finite(logits, "expected logits")


def _before_rotation(policy: Policy, layer: ContextLayer, rotation: Rotation) -> Iterator[Tensor]:
    """Yield the queries after the first `sinks` tokens before RoPE, block by block.

    fp32 [num_q_heads, ≤ QUERIES, head_dim]: all of them at once would be several times
    the layer's queries.
    """
    skipped = layer.n - layer.queries.shape[1]
    queries = layer.queries[:, max(0, policy.sinks - skipped) :]
    begin = layer.first_position + layer.n - queries.shape[1]
    for block in queries.split(QUERIES, dim=1):
        end = begin + block.shape[1]
        cos, sin = rotation(torch.arange(begin, end, device=block.device))
        begin = end
        # cos and sin may carry a factor of the RoPE variant (yarn): divide by its square.
        square = cos.square() + sin.square()
        yield turned(block.float(), cos / square, -sin / square)


def _mean(blocks: Iterator[Tensor]) -> Tensor:
    """Mean of [heads, block, head_dim] over all blocks: [heads, head_dim]."""
    parts = [(block.sum(1), block.shape[1]) for block in blocks]
    return torch.stack([total for total, _ in parts]).sum(0) / sum(count for _, count in parts)


def _spread(blocks: Iterator[Tensor], mean: Tensor) -> Tensor:
    """Mean of (q − mean)(q − mean)ᵀ over all blocks: [heads, head_dim, head_dim]."""
    total, count = torch.zeros_like(mean[..., None] * mean[:, None]), 0
    for block in blocks:
        centred = block - mean[:, None]
        total += centred.transpose(1, 2) @ centred
        count += block.shape[1]
    return total / count


def _mean_rotation(rotation: Rotation, positions: Tensor, head_dim: int) -> Tensor:
    """Mean over positions of RoPE's matrix, its factor included, fp32 [head_dim, head_dim]."""
    cos, sin = (part.mean(0) for part in rotation(positions))
    return turned(torch.eye(head_dim, device=cos.device), cos, sin).T


def _dense(ragged: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
    """Return [Σ len_h, head_dim] as [num_kv_heads, max len_h, head_dim], and what is real."""
    lens = cu.to(torch.int64).diff()
    column = torch.arange(int(lens.max()), device=ragged.device)
    real = column < lens[:, None]
    dense = ragged.new_zeros(*real.shape, ragged.shape[1])
    dense[real] = ragged
    return dense, real
