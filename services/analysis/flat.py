"""A screen for heads that look at everything alike.

Of a query that sees v keys, H = −Σ A_i ln A_i is its attention's entropy and exp(H) its
effective number of entries, 1 … v. Where exp(H) ÷ v is near 1 a head averages; it picks
nothing, so its scores say little about what to keep, and masking few keys does little to it.
Typically heads of layer 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.services.analysis.attention_blocks import attention_blocks
from criticalkv.services.analysis.masking import masked_forward
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.attention import LayerCall
from criticalkv.shared.model.loader import LoadedModel

FLAT_SHARE = 0.5
FEWEST = 16
"""Keys a query sees at least, to be counted: of few keys all are effective."""


@dataclass(frozen=True)
class Flatness:
    """Means over queries, fp64 [num_layers, num_q_heads].

    Attributes:
        effective_share: exp(H) ÷ v.
        relative_entropy: H ÷ ln v.
        queries: how many were counted, in each layer.
    """

    effective_share: Tensor
    relative_entropy: Tensor
    queries: int

    def flagged(self, share: float = FLAT_SHARE, entropy: float = 0.0) -> Tensor:
        """Return the heads of which both figures reach their threshold, bool."""
        return (self.effective_share >= share) & (self.relative_entropy >= entropy)


def flatness(
    model: LoadedModel, token_ids: Sequence[int], first: int = 0, fewest: int = FEWEST
) -> Flatness:
    """Run a sequence and measure the attention of its tokens from `first` on.

    Args:
        model: to run.
        token_ids: of one sequence.
        first: the first token whose query counts.
        fewest: keys that a query must see to count, at least 2.

    Raises:
        ConfigError: if no query sees that many.
    """
    begin = max(first, fewest - 1)
    windows = [w for w in model.spec.sliding_windows if w is not None]
    if fewest < 2 or begin >= len(token_ids) or min(windows, default=fewest) < fewest:
        raise ConfigError(f"no query sees {fewest} ≥ 2 keys in every layer", param="fewest")
    layers: list[Tensor] = []
    masked_forward(model, token_ids, look=lambda call: layers.append(_measure(call, begin)))
    share, entropy = torch.stack(layers).div(len(token_ids) - begin).cpu().unbind(1)
    return Flatness(share, entropy, len(token_ids) - begin)


def _measure(call: LayerCall, first: int) -> Tensor:
    """Sum exp(H) ÷ v and H ÷ ln v over queries, fp64 [2, num_q_heads]."""
    sums = torch.zeros(2, call.query.shape[0], dtype=torch.float64, device=call.query.device)
    for block in attention_blocks(call, first):
        entropy, seen = torch.special.entr(block.probs.double()).sum(-1), block.visible.double()
        sums[0, block.heads] += (entropy.exp() / seen).sum(-1)
        sums[1, block.heads] += (entropy / seen.log()).sum(-1)
    return sums
