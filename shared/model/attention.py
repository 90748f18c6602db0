"""The seam between transformers and us: attention by plan.

The unmodified transformers forward runs with `attn_implementation="criticalkv"` and
two extra arguments: a cache shell that stores nothing, and a plan that computes
attention. `plan` travels through the model's keyword arguments into this function, so
one model serves any number of concurrent plans.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

IMPLEMENTATION = "criticalkv"


class AttentionPlan(Protocol):
    """Decides what the tokens of one forward pass attend to."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Return the attention output of one layer.

        Args:
            layer: decoder layer.
            query: [num_q_heads, T, head_dim], after norm and RoPE.
            key: [num_kv_heads, T, head_dim], after norm and RoPE.
            value: [num_kv_heads, T, head_dim].
            scaling: factor of the logits.
            window: sliding window in tokens, or None.

        Returns:
            [num_q_heads, T, head_dim], in the query's dtype.
        """
        ...


class CacheShell:
    """Satisfies transformers' cache contract and keeps nothing: the plan has it all."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values unchanged."""
        return key_states, value_states


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    plan: AttentionPlan,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    # No mask is registered for this name, so transformers must have made none.
    assert attention_mask is None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = plan.attend(layer, query[0], key[0], value[0], scaling, sliding_window)
    return out.transpose(0, 1).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attention)


def forward(
    model: PreTrainedModel,
    token_ids: Tensor,
    positions: Tensor,
    plan: AttentionPlan,
    logits_at: Tensor,
) -> Tensor:
    """Run a flattened batch of tokens.

    Args:
        model: loaded with `attn_implementation="criticalkv"`.
        token_ids: int64 [T], of any number of sequences, one after another.
        positions: int64 [T], original positions.
        plan: what the tokens attend to.
        logits_at: int64 [n], flat indexes whose logits are wanted; may be empty.

    Returns:
        Logits [n, vocab].
    """
    with torch.inference_mode():
        out = model(
            input_ids=token_ids.unsqueeze(0),
            # Always given: without them transformers would ask the cache for a length.
            position_ids=positions.unsqueeze(0),
            cache=CacheShell(),
            use_cache=True,
            logits_to_keep=logits_at,
            plan=plan,
        )
    logits: Tensor = out.logits[0]
    return logits
