"""How far quantized entries are from what they were, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

from criticalkv.shared.cache.quality import MAX_ERROR, CodecQuality
from criticalkv.shared.cache.ragged import RaggedLayer


class CodecErrors:
    """Gathers ‖x̂ − x‖₂ ÷ ‖x‖₂ of keys and of values, per layer."""

    def __init__(self) -> None:
        self._errors: list[Tensor] = []

    def add(self, exact: RaggedLayer, stored: RaggedLayer) -> None:
        """Compare the next layer's entries with what readers will get, row by row."""
        pairs = ((exact.keys, stored.keys), (exact.values, stored.values))
        self._errors.append(torch.stack([_relative(x, y) for x, y in pairs]))

    def quality(self, kl: float | None) -> CodecQuality:
        """Return the figures, with a KL that was measured elsewhere."""
        keys, values = torch.stack(self._errors).clamp_max(MAX_ERROR).T.tolist()
        return CodecQuality(key_error=tuple(keys), value_error=tuple(values), kl=kl)


def _relative(exact: Tensor, stored: Tensor) -> Tensor:
    """‖stored − exact‖₂ ÷ ‖exact‖₂, fp64, no dimensions; 0 where nothing is kept."""
    wide = exact.float()
    error, size = (
        torch.linalg.vector_norm(x, dtype=torch.float64) for x in (stored.float() - wide, wide)
    )
    return torch.where(error == 0, error, error / size)
