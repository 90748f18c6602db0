"""The full KV of spooled layers, where the model runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from criticalkv.services.prefill.spooled_layer import SpooledLayer

MOST = 0.5
"""Share of a GPU's free memory that may hold KV; passes need the rest."""


class Resident:
    """Brings layers to the device: once if it has room for all of them, else each time.

    On a CPU they are there already.
    """

    def __init__(self, layers: Sequence[SpooledLayer], device: torch.device) -> None:
        self._layers = layers
        self._device = device
        self._stays = sum(map(_bytes_of, layers)) <= MOST * free_bytes(device)
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values on the device, [num_kv_heads, n, head_dim] each."""
        if index in self._held:
            return self._held[index]
        spooled = self._layers[index]
        moved = spooled.keys.to(self._device), spooled.values.to(self._device)
        if self._stays:
            self._held[index] = moved
        return moved


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU; 0 elsewhere, where nothing needs to be held."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _bytes_of(spooled: SpooledLayer) -> int:
    return spooled.keys.nbytes + spooled.values.nbytes
