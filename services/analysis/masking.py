"""Masking as an intervention: some heads no longer see a span of keys.

Additive −∞ on the span's logits, N_i = 0 there and 1 elsewhere: the survivors' attention is
A'_i = N_i A_i / Σ_j N_j A_j (CriticalKV, arXiv 2502.03805, Theorem 3.2), as if the cache did
not hold the span. What the masked layers change reaches later layers and later tokens as in
any forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.services.analysis.attention_blocks import AttentionBlock, attention_blocks
from criticalkv.services.analysis.renormalisation import surviving_mass, undo
from criticalkv.services.analysis.span import Span
from criticalkv.shared.cache.ragged import dense_layer
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.attention import LayerCall, attend_ragged, forward
from criticalkv.shared.model.loader import LoadedModel


@dataclass(frozen=True)
class Mask:
    """A span that some heads do not see.

    Attributes:
        span: keys, by position.
        heads: bool [num_layers, num_q_heads] that do not see them, see `chosen_heads`.
        since: the first token whose queries do not; None: the first after the span. A later
            one masks the span in a cache that was computed with it.
        renormalised: as a softmax does. If not, the head's output is Σ_i N_i A_i v_i: the
            span's share goes, and no survivor grows (see `renormalisation`).

    Raises:
        ConfigError: if queries of the span itself are to be masked.
    """

    span: Span
    heads: Tensor
    since: int | None = None
    renormalised: bool = True

    def __post_init__(self) -> None:
        if self.begins < self.span.end:
            raise ConfigError(f"queries since {self.since} are not after {self.span}", param="span")

    @property
    def begins(self) -> int:
        """The first token that does not see the span."""
        return self.span.end if self.since is None else self.since

    def kept(self, layer: int, queries: slice, columns: int, heads: slice = slice(None)) -> Tensor:
        """Return N, bool [num_q_heads, queries, columns], False where a key is hidden.

        What a query cannot see in any case, such as the future, counts as kept.
        """
        late = torch.arange(queries.start, queries.stop) >= self.begins
        keys = torch.arange(columns)
        inside = (keys >= self.span.begin) & (keys < self.span.end)
        return ~(self.heads[layer, heads, None, None] & late[:, None] & inside)


@dataclass(frozen=True)
class LayerRows:
    """What queries of one layer see without a mask and with it, by the same q and k.

    Attributes:
        layer: of the model.
        queries: their tokens.
        plain: A, fp32 [num_q_heads, queries, n].
        masked: A', like plain; renormalised.
        kept: N, bool, like plain.
    """

    layer: int
    queries: slice
    plain: Tensor
    masked: Tensor
    kept: Tensor


def masked_forward(
    model: LoadedModel,
    token_ids: Sequence[int],
    mask: Mask | None = None,
    *,
    logits_from: int | None = None,
    look: Callable[[LayerCall], object] | None = None,
) -> Tensor:
    """Run a sequence of tokens under a mask.

    Args:
        model: to run.
        token_ids: at least one.
        mask: None: nothing is hidden.
        logits_from: the first token whose logits are wanted; None: none are.
        look: called with each layer's queries, keys and values, for example with
            `lambda call: layer_rows(call, mask, first)`.

    Returns:
        fp32 [tokens from `logits_from` on, vocab].

    Raises:
        ConfigError: if the span ends after the last token.
    """
    n = len(token_ids)
    if mask is not None:
        mask.span.check_within(n)
    positions = torch.arange(n, device=model.device)
    wanted = positions[n if logits_from is None else logits_from :]
    tokens = torch.tensor(token_ids, device=model.device)
    return forward(model.model, tokens, positions, _Masked(mask, look), wanted).float()


def layer_rows(call: LayerCall, mask: Mask, first: int) -> LayerRows:
    """Return what a layer's tokens from `first` on see: num_q_heads · tokens · n, three times."""
    n = call.key.shape[1]
    queries = slice(first, n)
    plain = call.query.new_empty((call.query.shape[0], n - first, n), dtype=torch.float32)
    masked = torch.empty_like(plain)
    for block in attention_blocks(call, first):
        rows = slice(block.queries.start - first, block.queries.stop - first)
        plain[block.heads, rows] = block.probs
        masked[block.heads, rows] = _attention(block, _kept(block, mask, call))
    kept = mask.kept(call.layer, queries, n).to(plain.device)
    return LayerRows(call.layer, queries, plain, masked, kept)


class _Masked:
    """AttentionPlan of a whole sequence under a mask."""

    def __init__(self, mask: Mask | None, look: Callable[[LayerCall], object] | None) -> None:
        self._mask = mask
        self._look = look

    def attend(self, call: LayerCall) -> Tensor:
        """See AttentionPlan. Heads that are not masked attend as they always do."""
        if self._look is not None:
            self._look(call)
        nothing = dense_layer(call.key[:, :0], call.value[:, :0], 0)
        out = attend_ragged(call, nothing, call.key, call.value, 0)
        if self._mask is not None and self._mask.begins < call.query.shape[1]:
            self._hide(call, self._mask, out)
        return out

    def _hide(self, call: LayerCall, mask: Mask, out: Tensor) -> None:
        chosen = mask.heads[call.layer].to(out.device)
        if not chosen.any():
            return
        for block in attention_blocks(call, mask.begins):
            mine = chosen[block.heads]
            kept = _kept(block, mask, call)
            attention = _attention(block, kept)
            if not mask.renormalised:
                attention = undo(attention, surviving_mass(block.probs, kept))
            changed = (attention @ call.value[block.kv_head].float()).to(out.dtype)
            rows = out[block.heads, block.queries]
            out[block.heads, block.queries] = changed.where(mine[:, None, None], rows)


def _kept(block: AttentionBlock, mask: Mask, call: LayerCall) -> Tensor:
    columns = call.key.shape[1]
    return mask.kept(call.layer, block.queries, columns, block.heads).to(call.key.device)


def _attention(block: AttentionBlock, kept: Tensor) -> Tensor:
    """Return A', fp32 [group_size, queries, n]."""
    return block.logits.masked_fill(~kept, -torch.inf).softmax(-1)
