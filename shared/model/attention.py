"""The seam between transformers and us: attention by plan.

The unmodified transformers forward runs with `attn_implementation="criticalkv"` and
two extra arguments: a cache shell that stores nothing, and a plan that computes
attention. `plan` travels through the model's keyword arguments into this function, so
one model serves any number of concurrent plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from criticalkv.kernels import ops
from criticalkv.shared.cache.ragged import RaggedLayer

IMPLEMENTATION = "criticalkv"


@dataclass(frozen=True)
class LayerCall:
    """One layer's attention, as the model's forward asks for it.

    Attributes:
        layer: decoder layer.
        query: [num_q_heads, T, head_dim], after norm and RoPE.
        key: [num_kv_heads, T, head_dim], after norm and RoPE.
        value: [num_kv_heads, T, head_dim].
        scaling: factor of the logits.
        window: sliding window in tokens, or None.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window: int | None

    def split(self, counts: Sequence[int]) -> Iterator[LayerCall]:
        """Cut a flattened batch into its sequences, `counts` tokens each."""
        parts = (t.split(list(counts), dim=1) for t in (self.query, self.key, self.value))
        for query, key, value in zip(*parts, strict=True):
            yield replace(self, query=query, key=key, value=value)


class AttentionPlan(Protocol):
    """Decides what the tokens of one forward pass attend to."""

    def attend(self, call: LayerCall) -> Tensor:
        """Return the attention output, [num_q_heads, T, head_dim], in the query's dtype."""
        ...


def attend_ragged(
    call: LayerCall, prefix: RaggedLayer, keys: Tensor, values: Tensor, first_position: int
) -> Tensor:
    """Attend to a chain's kept entries and to a dense tail that starts after it.

    Args:
        call: whose queries are the last of the tail.
        prefix: entries that every query may see.
        keys: [num_kv_heads, S, head_dim], the tail.
        values: like keys.
        first_position: original position of the tail's first token.

    Returns:
        [num_q_heads, T, head_dim].
    """
    positions = None
    if call.window is not None:
        end = first_position + keys.shape[1]
        positions = torch.arange(first_position, end, device=keys.device)
    out, _ = ops.ragged_attention(
        call.query,
        prefix.keys,
        prefix.values,
        prefix.cu_seqlens,
        keys,
        values,
        scaling=call.scaling,
        window=call.window,
        prefix_positions=prefix.positions,
        query_positions=None if positions is None else positions[-call.query.shape[1] :],
        tail_positions=positions,
    )
    return out


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
    out = plan.attend(LayerCall(layer, query[0], key[0], value[0], scaling, sliding_window))
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
