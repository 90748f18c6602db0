"""DefensiveKV's two presets: what the authors' code does, and what the paper says."""

from __future__ import annotations

import pytest
import torch
from naive_layer import GROUP, HEADS, Layer, close
from torch import Tensor

from criticalkv.shared.eviction.plan import Plan
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers.defensive import defensive

torch.set_num_threads(1)

WINDOW = 4


def policy_of(preset: str) -> Policy:
    return Policy.parse(f"defensivekv:window={WINDOW},preset={preset}")


def seen(layer: Layer) -> Tensor:
    """A of all window queries, [heads, group, queries, n]."""
    rows = [
        torch.stack([layer.causal(h, back) for back in reversed(range(WINDOW))])
        for h in range(HEADS * GROUP)
    ]
    return torch.stack(rows).unflatten(0, (HEADS, GROUP))


def stages(layer: Layer) -> list[list[int]]:
    """Each head's first stage as the authors' code takes it, best first, no budget."""
    before = layer.n - WINDOW
    mean = seen(layer)[..., :before].mean((1, 2))
    # Defect 1: not the window's own columns but the last ones before it.
    bias = float(mean[:, -WINDOW:].sum(-1).mean())
    out = []
    for head in mean:
        share = (head / head.sum()).tolist()
        order = sorted(range(before), key=lambda j: (-share[j], j))
        total, taken = 0.0, 0
        for j in order:
            total += share[j]
            if total >= 0.9 - bias:
                break
            # Defect 2: the one that crosses is not counted.
            taken += 1
        out.append(order[:taken])
    return out


@pytest.mark.parametrize("n", [5, 8, 9, 23, 40])
@pytest.mark.parametrize("seed", range(3))
def test_official_first_stage(n: int, seed: int) -> None:
    layer = Layer(n, WINDOW)
    layer.keys *= 1 + seed
    paper = defensive(policy_of("paper"), layer.context()).attention
    official = defensive(policy_of("official"), layer.context()).attention
    before = n - WINDOW
    for kv, stage in enumerate(stages(layer)):
        rest = sorted(set(range(before)) - set(stage))
        assert torch.equal(official[kv, rest], paper[kv, rest])
        assert (
            official[kv, :before].argsort(descending=True, stable=True).tolist()[: len(stage)]
            == stage
        )
        assert all(float(official[kv, j]) > float(paper.max()) for j in stage)


def authors_choice(layer: Layer, scores: Tensor, budget: int) -> set[tuple[int, int]]:
    """The code's own selection at a budget per head that exceeds the window."""
    before = layer.n - WINDOW
    kept = {(kv, j) for kv, stage in enumerate(stages(layer)) for j in stage[: budget - WINDOW]}
    rest = [(kv, j) for kv in range(HEADS) for j in range(before) if (kv, j) not in kept]
    rest.sort(key=lambda e: (-float(scores[e]), e))
    kept |= set(rest[: HEADS * (budget - WINDOW) - len(kept)])
    return kept | {(kv, j) for kv in range(HEADS) for j in range(before, layer.n)}


def test_official_choice() -> None:
    """Equal to the code's wherever all stages reach the budget, or all fit into it."""
    layer = Layer(40, WINDOW)
    paper = defensive(policy_of("paper"), layer.context()).attention
    plan = Plan([defensive(policy_of("official"), layer.context())], policy_of("official"))
    lengths = [len(stage) for stage in stages(layer)]
    assert min(lengths) > 2
    compared = 0
    for budget in range(WINDOW + 1, 41):
        if min(lengths) < budget - WINDOW < max(lengths):
            continue
        kept = plan.select(str(budget / 40))[0].nonzero().tolist()
        assert {(kv, j) for kv, j in kept} == authors_choice(layer, paper, budget)
        compared += 1
    assert compared > 20


def test_defects_live_only_under_official() -> None:
    """The paper's preset has no first stage: scores are what the formula says."""
    layer = Layer(23, WINDOW)
    assert float(defensive(policy_of("paper"), layer.context()).attention.max()) <= 1


@pytest.mark.parametrize("preset", ["paper", "official"])
def test_attention_that_underflows_before_the_window(preset: str) -> None:
    """All mass on the window: rows of zeros are not rescaled by 0/0."""
    layer = Layer(12, WINDOW, parent=None)
    layer.queries.fill_(1)
    layer.keys.fill_(-300)
    layer.keys[:, -WINDOW:] = 300
    scores = defensive(policy_of(preset), layer.context())
    assert scores.attention.isfinite().all()


def test_heads_share_the_value_norm() -> None:
    layer = Layer(12, WINDOW)
    layer.values[0] *= 1000
    before = 12 - WINDOW
    scores = defensive(policy_of("paper"), layer.context()).attention[:, :before]
    pure = defensive(
        Policy.parse(f"defensive+adakv+critical:window={WINDOW}"), layer.context()
    ).attention[:, :before]
    close(scores[0], pure[0].double(), rtol=0.01)
    assert bool((scores[1] < 0.01 * pure[1]).all())
