"""CriticalKV's perturbation bound on real selections (arXiv 2502.03805, Theorem 3.3)."""

import pytest
import torch

from criticalkv.kernels import ops
from criticalkv.shared.eviction.plan import Plan
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scores import LayerScores, critical_score

torch.set_num_threads(1)


@pytest.mark.parametrize("policy", ["snapkv", "criticalkv"])
@pytest.mark.parametrize("seed", range(8))
def test_output_changes_by_at_most_theta(policy: str, seed: int) -> None:
    """L ≤ θ = C − (2 − 1/σ)·S for one query's unpooled attention over one query head."""
    torch.manual_seed(seed)
    n, dim, width = 40, 16, 24
    query, keys = torch.randn(1, 1, dim), torch.randn(1, n, dim)
    values, w_o = torch.randn(1, n, dim), torch.randn(width, dim)
    attention = ops.attention_scores(query, keys, scaling=0.7)["mean"][0]
    parsed = Policy.parse(policy)
    layer = LayerScores(
        attention,
        torch.zeros(n, dtype=torch.bool),
        critical_score(attention, values, w_o, parsed),
    )
    norms = ops.value_norm(values, w_o, 1)[0, 0]
    for tier in ("0.1", "0.3", "0.6", "0.9"):
        kept = Plan([layer], parsed).select(tier)[0, 0]
        sigma = attention[0, kept].sum()
        before = w_o @ (attention[0] @ values[0])
        after = w_o @ ((attention[0, kept] / sigma) @ values[0, kept])
        c, s = (attention[0] * norms).sum(), (attention[0, kept] * norms[kept]).sum()
        assert (before - after).abs().sum() <= (c - (2 - 1 / sigma) * s) * 1.0001
