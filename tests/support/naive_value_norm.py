"""Value norms by a loop over heads, rows and columns, in fp64.

On the tests' path: what the tests of `value_norm` on several devices share.
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_norm(values: Tensor, w_o: Tensor, group: int, norm: str) -> Tensor:
    """Return ‖v·W_O‖ of each value, fp64 [num_kv_heads, group, n]."""
    heads, n, dim = values.shape
    p = 1 if norm == "l1" else 2
    out = torch.zeros(heads, group, n, dtype=torch.float64)
    for kv in range(heads):
        for g in range(group):
            q = kv * group + g
            w = w_o[:, q * dim : (q + 1) * dim].double()
            for i in range(n):
                out[kv, g, i] = (w @ values[kv, i].double()).abs().pow(p).sum() ** (1 / p)
    return out
