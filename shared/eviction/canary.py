"""A quality canary: how much of what a context's last queries see each tier keeps.

Theorem 3.3 of CriticalKV (arXiv 2502.03805): with A a query's unpooled attention,
N ∈ {0, 1} what is kept, σ = Σ N A, C = Σ A_i‖𝓥_i‖ and S = Σ N_i A_i‖𝓥_i‖, eviction
changes a head's output after W_O by at most θ = C − (2 − 1/σ)·S. Here over everything that
a query sees, in L2 norms: the node's own entries, and the ancestors', which are all kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.cache.quality import MAX_ERROR, TierQuality
from criticalkv.shared.cache.ragged import RaggedLayer
from criticalkv.shared.eviction.scores import finite

LOW_MASS = 0.5
"""σ up to which θ promises nothing: the factor of S is not positive."""


@dataclass(frozen=True)
class Asked:
    """A few queries of one layer, and what they see of the ancestors.

    r = group_size · count queries per KV head, all of a query head together.

    Attributes:
        queries: fp32 [num_kv_heads, r, head_dim], times the factor of the logits.
        places: int64 [r], index of a query's own entry: it sees none after it.
        above: fp32 [num_kv_heads, r], log Σ exp of the ancestors' logits; −∞: none.
        above_size: like above, Σ A_i‖𝓥_i‖₂ of a softmax over the ancestors alone.
    """

    queries: Tensor
    places: Tensor
    above: Tensor
    above_size: Tensor


class Canary:
    """Gathers, layer by layer, how the last queries see what each tier keeps.

    Args:
        count: queries per query head, spread evenly over the window.
        window: last entries of the context among which they are.
    """

    def __init__(self, count: int, window: int) -> None:
        self._count = count
        self._window = window
        self._masses: list[Tensor] = []
        self._thetas: list[Tensor] = []

    def ask(self, queries: Tensor, scaling: float, above: RaggedLayer, w_o: Tensor) -> Asked:
        """Take the queries out of a layer; the rest of the layer may go.

        Args:
            queries: [num_q_heads, n, head_dim], after RoPE, of the node's own n tokens.
            scaling: factor of the logits.
            above: the ancestors' entries, all visible.
            w_o: [D_model, num_q_heads · head_dim].
        """
        q_heads, n, dim = queries.shape
        heads = above.cu_seqlens.numel() - 1
        places = self._places(n).to(queries.device)
        chosen = (queries[:, places].float() * scaling).reshape(heads, -1, dim)
        seen = [
            _seen_above(chosen[h], above.head(h), _columns(w_o, h, heads)) for h in range(heads)
        ]
        mass, size = (torch.stack(part) for part in zip(*seen, strict=True))
        return Asked(chosen, places.repeat(q_heads // heads), mass, size)

    def add(
        self, asked: Asked, keys: Tensor, values: Tensor, w_o: Tensor, kept: Tensor, lens: Tensor
    ) -> None:
        """Add a layer.

        Args:
            asked: of this layer.
            keys: [num_kv_heads, n, head_dim], after RoPE.
            values: like keys.
            w_o: [D_model, num_q_heads · head_dim].
            kept: int64 [Σ len_h], indices of the kept entries, head after head, in rank order.
            lens: int64 [tiers, num_kv_heads], how many of them each tier keeps.
        """
        heads, n, _ = keys.shape
        group = w_o.shape[1] // (heads * keys.shape[2])
        member = _members(kept.to(keys.device), lens.to(keys.device), n)
        own, above = _attention(asked, keys)
        norms = ops.value_norm(values, w_o, group, "l2")
        sizes = own * norms.repeat_interleave(own.shape[1] // group, 1)
        sums = torch.cat([own, sizes], 1) @ member
        mass, size = (sums + torch.cat([above, above * asked.above_size], 1)[..., None]).chunk(2, 1)
        share = mass[..., :-1] / mass[..., -1:]
        self._masses.append(share.view(heads * group, -1, lens.shape[0]).mean(1))
        self._thetas.append(_theta(share, size).mean((0, 1)))

    def tiers(self) -> tuple[TierQuality, ...]:
        """Return the figures of each tier over all layers that were added; empty: none was.

        Raises:
            NumericsError: if a key or value that the queries saw was not finite.
        """
        if not self._masses:
            return ()
        masses = torch.stack(self._masses).flatten(0, 1)
        figures = {
            "retained_mass": masses.mean(0).clamp_max(1),  # rounding alone would exceed it
            "lowest_mass": masses.amin(0).clamp_max(1),
            "low_mass_share": (masses <= LOW_MASS).float().mean(0),
            "theta": torch.stack(self._thetas).mean(0).clamp_max(MAX_ERROR),
        }
        rows = finite(torch.stack(list(figures.values()), 1), "what the last queries see").tolist()
        return tuple(TierQuality(**dict(zip(figures, row, strict=True))) for row in rows)

    def _places(self, n: int) -> Tensor:
        """The queries' entries, int64 [count]: the ends of equal parts of the window."""
        window = min(self._window, n)
        count = min(self._count, window)
        return n - window + torch.arange(1, count + 1) * window // count - 1


def _columns(w_o: Tensor, head: int, heads: int) -> Tensor:
    """The columns of W_O that a KV head's query heads own."""
    return w_o.chunk(heads, 1)[head]


def _seen_above(
    queries: Tensor, entries: tuple[Tensor, Tensor, Tensor], w_o: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (above, above_size), fp32 [r] each, of one KV head; see Asked."""
    keys, values, _ = entries
    if not keys.shape[0]:
        none = queries.new_zeros(queries.shape[0])
        return none - torch.inf, none
    group = w_o.shape[1] // keys.shape[1]
    norms = ops.value_norm(values[None], w_o, group, "l2")[0]
    logits = queries @ keys.float().T
    sizes = (logits.softmax(-1).view(group, -1, keys.shape[0]) * norms[:, None]).sum(-1)
    return logits.logsumexp(-1), sizes.flatten()


def _attention(asked: Asked, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return A of the node's own entries, fp32 [num_kv_heads, r, n], and Σ A of the ancestors'.

    A head at a time, so that no fp32 copy of all keys is made.
    """
    pairs = zip(asked.queries, keys, strict=True)
    logits = torch.stack([queries @ head.float().T for queries, head in pairs])
    hidden = torch.arange(keys.shape[1], device=keys.device) > asked.places[:, None]
    logits.masked_fill_(hidden, -torch.inf)
    total = torch.logaddexp(logits.logsumexp(-1), asked.above)
    return logits.sub_(total[..., None]).exp_(), (asked.above - total).exp()


def _members(kept: Tensor, lens: Tensor, n: int) -> Tensor:
    """What each tier keeps and, last, everything: 0 or 1, fp32 [heads, n, tiers + 1]."""
    heads = lens.shape[1]
    owner = torch.arange(heads, device=kept.device).repeat_interleave(lens[-1])
    begin = lens[-1].cumsum(0) - lens[-1]
    rank = torch.arange(kept.shape[0], device=kept.device) - begin[owner]
    member = torch.zeros(heads, n, lens.shape[0] + 1, device=kept.device)
    member[..., -1] = 1
    member[owner, kept, :-1] = (rank[:, None] < lens.T[owner]).float()
    return member


def _theta(share: Tensor, size: Tensor) -> Tensor:
    """θ ÷ C, fp32 [num_kv_heads, r, tiers].

    Args:
        share: σ, [num_kv_heads, r, tiers].
        size: Σ N_i A_i‖𝓥_i‖ of each tier and, last, of everything, C.
    """
    kept, whole = size[..., :-1], size[..., -1:]
    spread = torch.where(share == 0, 0, kept / share) - kept
    theta = (whole - kept).clamp_min(0) + spread.clamp_min(0)
    return torch.where(whole == 0, 0, theta / whole)
