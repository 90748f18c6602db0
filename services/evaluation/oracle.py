"""The truth about an evicted cache: the untouched model under an additive −inf mask.

transformers' own eager attention runs over the whole token sequence. A mask per layer,
per head and per query token hides what was evicted: a block's tokens see everything
before them in their own block, and of earlier blocks what the block's view kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from criticalkv.shared.model.spec import ModelSpec

Kept = Callable[[str, int], Tensor]
"""(tier, layer) → bool [num_kv_heads, tokens of the block], what each head kept."""


@dataclass(frozen=True)
class Block:
    """Consecutive tokens of the sequence: a node, or a turn that is running.

    Attributes:
        start: index of its first token.
        end: index after its last.
        view: the tier at which its tokens see each earlier block.
        kept: how later blocks see it; None = whole.
    """

    start: int
    end: int
    view: tuple[str, ...] = ()
    kept: Kept | None = None


@dataclass(frozen=True)
class Greedy:
    """What the model says, and how clearly.

    Attributes:
        tokens: the most likely ones, without an end-of-turn token.
        margins: per token the distance to the second, in logits; one more if it ended.
        ended: whether the model ended its turn.
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    ended: bool

    def clear(self, tolerance: float) -> int:
        """Count the tokens before the first near-tie."""
        ties = [i for i, margin in enumerate(self.margins) if margin <= tolerance]
        return min(ties, default=len(self.margins))


def mask(spec: ModelSpec, blocks: Sequence[Block], layer: int, first: int = 0) -> Tensor:
    """Return one layer's additive mask [1, num_q_heads, n - first, n].

    Args:
        spec: of the model.
        blocks: all of the sequence, in order.
        layer: decoder layer.
        first: query tokens before this one are left out.
    """
    n = blocks[-1].end
    rows, columns = torch.arange(first, n)[:, None], torch.arange(n)[None, :]
    visible = (columns <= rows).expand(spec.num_kv_heads, n - first, n).clone()
    window = spec.sliding_windows[layer]
    if window:
        visible &= columns > rows - window
    for row in blocks:
        begin, end = max(row.start, first) - first, row.end - first
        for column, tier in zip(blocks, row.view, strict=False):
            if end > begin and column.kept is not None:
                kept = column.kept(tier, layer)[:, None, :]
                visible[:, begin:end, column.start : column.end] &= kept
    out = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    return out.repeat_interleave(spec.group_size, 0)[None]


def logits(
    model: PreTrainedModel, spec: ModelSpec, ids: Sequence[int], blocks: Sequence[Block]
) -> Tensor:
    """Return the masked model's logits [n, vocabulary]."""
    with _masked(model, spec, blocks, 0), torch.inference_mode():
        out: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return out


def greedy(
    model: PreTrainedModel,
    spec: ModelSpec,
    ids: Sequence[int],
    blocks: Sequence[Block],
    max_tokens: int,
) -> Greedy:
    """Continue a sequence; new tokens belong to its last block."""
    tokens, margins = list(ids), []
    *before, last = blocks
    cache, done = DynamicCache(), 0
    with torch.inference_mode():
        while True:
            grown = Block(last.start, len(tokens), last.view)
            with _masked(model, spec, [*before, grown], done):
                out = model(torch.tensor([tokens[done:]]), cache=cache).logits[0, -1]
            top, done = out.topk(2), len(tokens)
            margins.append(float(top.values[0] - top.values[1]))
            token = int(top.indices[0])
            if token in spec.eos_token_ids:
                return Greedy(tuple(tokens[len(ids) :]), tuple(margins), ended=True)
            tokens.append(token)
            if len(tokens) - len(ids) == max_tokens:
                return Greedy(tuple(tokens[len(ids) :]), tuple(margins), ended=False)


@contextmanager
def _masked(
    model: PreTrainedModel, spec: ModelSpec, blocks: Sequence[Block], first: int
) -> Iterator[None]:
    """Let each attention layer see its own mask, under transformers' eager attention."""
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            _with_mask(mask(spec, blocks, index, first)), with_kwargs=True
        )
        for index, layer in enumerate(model.model.layers)
    ]
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)
        for hook in hooks:
            hook.remove()


def _with_mask(values: Tensor) -> Callable[..., tuple[Any, dict[str, Any]]]:
    return lambda _module, args, kwargs: (args, {**kwargs, "attention_mask": values})
