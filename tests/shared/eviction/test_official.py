"""Preset `official`: what the authors' code of SnapKV and AdaKV does differently."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import get_args

import pytest
import torch
from naive_layer import GROUP, HEADS, Layer, close
from torch import Tensor

from criticalkv.shared.errors import PolicyError
from criticalkv.shared.eviction.plan import Plan
from criticalkv.shared.eviction.policy import Allocator, Policy, Scorer, Selector
from criticalkv.shared.eviction.scorers.window import window
from criticalkv.shared.eviction.scores import LayerScores

torch.set_num_threads(1)

WINDOW = 4


def policy_of(text: str, preset: str = "official", **options: object) -> Policy:
    given = {"window": WINDOW, "kernel": 3, "preset": preset, **options}
    return Policy.parse(text + ":" + ",".join(f"{k}={v}" for k, v in given.items()))


def summed(layer: Layer) -> Tensor:
    """Sum over the window's queries, group mean, max of three neighbours before the window."""
    out = torch.zeros(HEADS, layer.n, dtype=torch.float64)
    for h in range(HEADS * GROUP):
        for back in range(WINDOW):
            out[h // GROUP] += layer.causal(h, back) / GROUP
    before = layer.n - WINDOW
    pooled = out.clone()
    for i in range(before):
        pooled[:, i] = out[:, max(0, i - 1) : min(before, i + 2)].amax(1)
    return pooled


@pytest.mark.parametrize("selector", ["plain", "critical", "twostage"])
@pytest.mark.parametrize("n", [5, 13])
def test_snapkv_sums_over_its_window(selector: str, n: int) -> None:
    layer = Layer(n, WINDOW)
    scores = window(policy_of(f"window+uniform+{selector}"), layer.context())
    close(scores.attention, summed(layer))
    if selector != "plain":
        close(scores.critical, layer.critical(summed(layer), 1e-4, 1))


def test_next_to_an_epsilon_a_sum_is_not_a_mean() -> None:
    layer = Layer(40, WINDOW)
    kept = []
    for preset in ("paper", "official"):
        policy = policy_of("window+uniform+critical", preset, eps="0.1")
        scores = window(policy, layer.context())
        kept.append(Plan([scores], policy).select("0.3"))
    assert not torch.equal(*kept)


@pytest.mark.parametrize(
    "safeguard", ["0", "0.2", "0.25", "0.5", "0.333333333333333333333333", "1"]
)
@pytest.mark.parametrize("n", [1, 4, 5, 17, 40])
def test_adakv_rounds_each_head_by_itself(n: int, safeguard: str) -> None:
    """c_h·(1 − α) + ⌊bα⌋, half to even; b is the budget before the window."""
    policy, alpha = policy_of("window+adakv+plain", safeguard=safeguard), Fraction(safeguard)
    score = torch.rand(3, n, generator=torch.Generator().manual_seed(n)) ** 4
    score[1] *= 0.1
    forced = torch.arange(n) >= n - WINDOW
    plan = Plan([LayerScores(score, forced)], policy)
    before, last = n - int(forced.sum()), torch.zeros(3)
    for step in range(1, 41):
        tier = str(Fraction(step, 40))
        base = min(max(0, int(Fraction(step, 40) * n) - WINDOW), before)
        free = [(-float(score[h, i]), h, i) for h, i in product(range(3), range(before))]
        winners = [h for _, h, _ in sorted(free)[: 3 * base]]
        expected = [
            round(winners.count(h) * (1 - alpha) + int(base * alpha)) + n - before for h in range(3)
        ]
        got = plan.budgets(tier)[0]
        # A budget of everything evicts nothing, whatever rounding would.
        assert got.tolist() == (expected if step < 40 else [n] * 3)
        assert (got >= last).all()
        last = got


def test_totals_drift() -> None:
    policy = policy_of("window+adakv+plain", safeguard="0.5")
    score = torch.rand(3, 40, generator=torch.Generator().manual_seed(1))
    plan = Plan([LayerScores(score, torch.arange(40) >= 36)], policy)
    totals = {int(plan.budgets(str(t / 40)).sum()) - 3 * t for t in range(5, 40)}
    assert len(totals) > 1


def test_every_other_combination_is_refused() -> None:
    known = {
        ("window", a, s) for a in ("uniform", "adakv") for s in ("plain", "twostage", "critical")
    }
    known |= {("defensive", a, "plain") for a in ("uniform", "adakv", "model")}
    for parts in product(get_args(Scorer), get_args(Allocator), get_args(Selector)):
        text = "+".join(parts) + ":preset=official"
        if parts[1] in ("headkv", "duo"):
            text += ",profile=" + "0" * 64
        if parts in known:
            assert Policy.parse(text).preset == "official"
            continue
        with pytest.raises(PolicyError):
            Policy.parse(text)
    with pytest.raises(PolicyError, match=r"has no tova\+uniform\+plain; it has"):
        Policy.parse("tova:preset=official")
    with pytest.raises(PolicyError, match="with relative scores"):
        Policy.parse("criticalkv:preset=official,second=relative")
