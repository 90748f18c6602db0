"""The entries at both ends of a context, which several scorers force."""

from __future__ import annotations

import torch
from torch import Tensor

from criticalkv.shared.eviction.policy import Policy


def ends(policy: Policy, n: int, device: torch.device) -> Tensor:
    """Mask of the first `sinks` and the last `recent` of n entries, bool [n]."""
    index = torch.arange(n, device=device)
    return (index < policy.sinks) | (index >= n - policy.recent)
