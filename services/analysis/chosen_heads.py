"""Which heads an intervention reaches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.spec import ModelSpec


def chosen_heads(
    spec: ModelSpec,
    layers: Sequence[int] | None = None,
    q_heads: Sequence[int] | None = None,
    kv_heads: Sequence[int] | None = None,
) -> Tensor:
    """Choose query heads of layers. What is None leaves out nothing.

    Args:
        spec: of the model.
        layers: decoder layers.
        q_heads: query heads, the same in each layer.
        kv_heads: KV heads: all query heads of their groups. With `q_heads`: what is in both.

    Returns:
        bool [num_layers, num_q_heads]; any other such mask serves as well.

    Raises:
        ConfigError: if the model has no such layer or head, or nothing is chosen.
    """
    of_kv = _chosen("kv_heads", kv_heads, spec.num_kv_heads).repeat_interleave(spec.group_size)
    heads = _chosen("heads", q_heads, spec.num_q_heads) & of_kv
    chosen = _chosen("layers", layers, spec.num_layers)[:, None] & heads
    if not chosen.any():
        raise ConfigError("no head is in all that was chosen", param="heads")
    return chosen


def _chosen(name: str, numbers: Sequence[int] | None, count: int) -> Tensor:
    if numbers is None:
        return torch.ones(count, dtype=torch.bool)
    beyond = [x for x in numbers if not 0 <= x < count]
    if beyond:
        raise ConfigError(f"{name} {beyond} are not among the model's {count}", param=name)
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[list(numbers)] = True
    return chosen
