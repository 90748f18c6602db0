"""Allocators × selectors against a slow oracle: plain Python, sets and sorted lists."""

from decimal import Decimal
from itertools import product
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from criticalkv.shared.errors import NumericsError
from criticalkv.shared.eviction.orders import floor_of, floors_of, order_of, take
from criticalkv.shared.eviction.parameters import used_parameters
from criticalkv.shared.eviction.plan import Plan
from criticalkv.shared.eviction.policy import Allocator, Policy, Selector
from criticalkv.shared.eviction.scores import LayerScores

torch.set_num_threads(1)

Entry = tuple[int, int, int]
ALLOCATORS = ("uniform", "adakv", "model")
MATRIX = list(product(ALLOCATORS, get_args(Selector)))
IDS = ["+".join(parts) for parts in MATRIX]
TIERS = ("0.05", "0.1", "0.2", "0.3", "0.4", "0.6", "0.8", "1")


def make_policy(scorer: str, allocator: str, selector: str, **options: object) -> Policy:
    """Parse a policy with those of the options that its parts use."""
    parts = {"scorer": scorer, "allocator": allocator, "selector": selector}
    used = used_parameters(parts)
    text = ",".join(f"{key}={value}" for key, value in options.items() if key in used)
    return Policy.parse(f"{scorer}+{allocator}+{selector}:{text}")


def best(entries: set[Entry], score: Tensor, count: int) -> set[Entry]:
    """The `count` best entries by (−score, layer, head, index)."""
    return set(sorted(entries, key=lambda e: (-float(score[e]), e))[: max(0, count)])


class Oracle:
    """What a policy keeps, written from its description."""

    def __init__(self, layers: list[LayerScores], policy: Policy) -> None:
        self.policy = policy
        self.scores = {
            name: torch.stack([getattr(layer, name) for layer in layers])
            for name in ("attention", "critical", "relative")
        }
        self.shape = self.scores["attention"].shape
        self.every = set(product(*(range(k) for k in self.shape)))
        self.forced = {
            (la, h, i)
            for la, h, i in self.every
            if bool(layers[la].forced.expand(self.shape[1:])[h, i])
        }

    def head(self, entries: set[Entry], layer: int, h: int) -> set[Entry]:
        return {e for e in entries if e[:2] == (layer, h)}

    def select(self, tier: str) -> set[Entry]:
        by = {"plain": "attention", "twostage": "attention"}.get(
            self.policy.selector, self.policy.selector
        )
        budgets = self.budgets(tier, self.scores[by])
        kept = set(self.forced)
        if (self.policy.allocator, self.policy.selector) == ("model", "twostage"):
            count = sum(budgets.values()) - len(kept)
            first = best(
                self.every - kept, self.scores["attention"], int(self.policy.alpha * count)
            )
            kept |= first
            rest = best(self.every - kept, self.scores["critical"], count - len(first))
            return kept | rest
        for (layer, h), budget in budgets.items():
            forced = self.head(self.forced, layer, h)
            free = self.head(self.every, layer, h) - forced
            count = budget - len(forced)
            if self.policy.selector == "twostage":
                first = best(free, self.scores["attention"], int(self.policy.alpha * count))
                free -= first
                kept |= first | best(free, self.scores["critical"], count - len(first))
            else:
                kept |= best(free, self.scores[by], count)
        return kept

    def budgets(self, tier: str, score: Tensor) -> dict[tuple[int, int], int]:
        layers, heads, n = self.shape
        keys = list(product(range(layers), range(heads)))
        forced = {k: len(self.head(self.forced, *k)) for k in keys}
        if self.policy.allocator == "model":
            total = int(Decimal(tier) * layers * heads * n)
            free = self.every - self.forced
            kept = self.forced | best(free, score, total - len(self.forced))
            return {k: len(self.head(kept, *k)) for k in keys}
        uniform = {k: max(forced[k], 1, int(Decimal(tier) * n)) for k in keys}
        if self.policy.allocator == "uniform":
            return uniform
        out = {}
        for layer in range(layers):
            kept = {e for e in self.forced if e[0] == layer}
            total = sum(uniform[layer, h] for h in range(heads))
            for h in range(heads):
                count = uniform[layer, h] - forced[layer, h]
                floor = int(self.policy.safeguard * count)
                if forced[layer, h] == 0:
                    floor = max(floor, 1)
                kept |= best(self.head(self.every - self.forced, layer, h), score, floor)
            free = {e for e in self.every - kept if e[0] == layer}
            kept |= best(free, score, total - len(kept))
            out.update({(layer, h): len(self.head(kept, layer, h)) for h in range(heads)})
        return out


def entries_of(mask: Tensor) -> set[Entry]:
    return {(a, b, c) for a, b, c in mask.nonzero().tolist()}


def make_layers(
    seed: int, layers: int, heads: int, n: int, ties: str, forced: Tensor
) -> list[LayerScores]:
    generator = torch.Generator().manual_seed(seed)

    def score() -> Tensor:
        x = torch.rand(heads, n, generator=generator)
        if ties == "bf16":
            return (x * 1e-4 + 1).bfloat16().float()
        return {"none": x, "heavy": (x * 3).floor(), "all": torch.ones_like(x)}[ties]

    return [LayerScores(score(), forced, score(), score()) for _ in range(layers)]


def window_mask(n: int, sinks: int, recent: int) -> Tensor:
    index = torch.arange(n)
    return (index < sinks) | (index >= n - recent)


@pytest.mark.parametrize("ties", ["none", "heavy", "bf16", "all"])
@pytest.mark.parametrize(("allocator", "selector"), MATRIX, ids=IDS)
def test_equals_oracle(allocator: Allocator, selector: Selector, ties: str) -> None:
    policy = make_policy("window", allocator, selector, alpha="0.3", safeguard="0.35")
    for n, sinks, recent in [(1, 0, 0), (7, 1, 2), (23, 0, 0), (29, 0, 5), (37, 4, 8), (5, 3, 9)]:
        layers = make_layers(n, 2, 3, n, ties, window_mask(n, sinks, recent))
        plan, oracle = Plan(layers, policy), Oracle(layers, policy)
        for tier in TIERS:
            assert entries_of(plan.select(tier)) == oracle.select(tier), (n, tier)


@pytest.mark.parametrize(("allocator", "selector"), MATRIX, ids=IDS)
def test_forced_entries_may_differ_by_head(allocator: Allocator, selector: Selector) -> None:
    policy = Policy.parse(f"replay+{allocator}+{selector}")
    torch.manual_seed(3)
    forced = torch.rand(3, 19) < torch.tensor([[0.0], [0.2], [0.7]])
    layers = make_layers(5, 2, 3, 19, "heavy", forced)
    plan, oracle = Plan(layers, policy), Oracle(layers, policy)
    for tier in TIERS:
        assert entries_of(plan.select(tier)) == oracle.select(tier)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**30),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 24)),
    ties=st.sampled_from(["none", "heavy", "bf16", "all"]),
    sinks=st.integers(0, 5),
    recent=st.integers(0, 9),
    alpha=st.decimals(0, 1, places=3),
    safeguard=st.decimals(0, 1, places=3),
    tiers=st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True),
)
@pytest.mark.parametrize(("allocator", "selector"), MATRIX, ids=IDS)
def test_tiers_are_nested(
    allocator: Allocator,
    selector: Selector,
    seed: int,
    shape: tuple[int, int, int],
    ties: str,
    sinks: int,
    recent: int,
    alpha: Decimal,
    safeguard: Decimal,
    tiers: list[int],
) -> None:
    policy = make_policy("replay", allocator, selector, alpha=alpha, safeguard=safeguard)
    plan = Plan(make_layers(seed, *shape, ties, window_mask(shape[2], sinks, recent)), policy)
    before = plan.select(str(Decimal(min(tiers)) / 1000))
    for tier in sorted(tiers):
        after = plan.select(str(Decimal(tier) / 1000))
        assert not (before & ~after).any()
        before = after


@pytest.mark.parametrize("selector", get_args(Selector))
@pytest.mark.parametrize("n", [*range(1, 20), 31, 32, 33, 61, 70])
def test_per_layer_totals_are_exact(n: int, selector: Selector) -> None:
    forced = window_mask(n, 0, 8)
    layers = make_layers(n, 2, 3, n, "heavy", forced)
    for allocator, tier in product(("uniform", "adakv"), TIERS):
        plan = Plan(layers, Policy.parse(f"window+{allocator}+{selector}:window=8"))
        per_head = max(min(n, 8), int(Decimal(tier) * n), 1)
        kept = plan.select(tier).sum(-1)
        assert torch.equal(kept, plan.budgets(tier))
        assert kept.sum(-1).tolist() == [3 * per_head] * 2
        assert kept.min() >= min(n, 8)


@pytest.mark.parametrize("n", [1, 2, 10, 33, 70])
def test_model_total_is_exact(n: int) -> None:
    for sinks, recent, tier in product((0, 4), (0, 8), TIERS):
        layers = make_layers(n, 2, 3, n, "bf16", window_mask(n, sinks, recent))
        plan = Plan(layers, Policy.parse("replay+model+relative"))
        forced = 6 * min(n, sinks + recent)
        assert plan.select(tier).sum() == max(forced, int(Decimal(tier) * 6 * n))


def test_model_may_empty_a_head_only_without_forced_entries() -> None:
    weak, strong = torch.full((1, 10), 0.1), torch.full((1, 10), 0.9)
    none = torch.zeros(10, dtype=torch.bool)
    policy = Policy.parse("replay+model+plain:sinks=0,recent=0")
    plan = Plan([LayerScores(torch.cat([weak, strong]), none)], policy)
    assert plan.budgets("0.5").tolist() == [[0, 10]]
    plan = Plan([LayerScores(torch.cat([weak, strong]), window_mask(10, 1, 0))], policy)
    assert plan.budgets("0.5").tolist() == [[1, 9]]


@pytest.mark.parametrize("allocator", ["uniform", "adakv"])
def test_per_layer_budgets_never_empty_a_head(allocator: str) -> None:
    scores = torch.cat([torch.full((1, 10), 0.1), torch.full((1, 10), 0.9)])
    policy = make_policy("replay", allocator, "plain", sinks=0, recent=0, safeguard=0)
    plan = Plan([LayerScores(scores, torch.zeros(10, dtype=torch.bool))], policy)
    assert plan.budgets("0.05").tolist() == [[1, 1]]
    expected = [[5, 5]] if allocator == "uniform" else [[1, 9]]
    assert plan.budgets("0.5").tolist() == expected


def test_window_wins_over_the_budget() -> None:
    scores = torch.linspace(1, 0, 20).expand(2, 20)
    for allocator in ("uniform", "adakv"):
        plan = Plan(
            [LayerScores(scores, window_mask(20, 0, 8), scores)],
            Policy.parse(f"window+{allocator}+twostage:window=8"),
        )
        assert entries_of(plan.select("0.1")) == {(0, h, i) for h in (0, 1) for i in range(12, 20)}


def test_twostage_window_is_outside_both_stages() -> None:
    """With w > b/2 an attention-only stage must remain (where kvpress loses it)."""
    attention = torch.tensor([[5.0, 4, 3, 2, 1, 0, 9, 9, 9]])
    critical = torch.tensor([[0.0, 1, 2, 3, 4, 5, 9, 9, 9]])
    layer = LayerScores(attention, window_mask(9, 0, 3), critical)
    plan = Plan([layer], Policy.parse("window+uniform+twostage:window=3"))
    # b = ⌊9·0.8⌋ = 7, c = 4: two by attention (0, 1), two by critical score (5, 4).
    assert entries_of(plan.select("0.8")) == {(0, 0, i) for i in (0, 1, 4, 5, 6, 7, 8)}


@pytest.mark.parametrize(
    ("share", "count", "floor"),
    [
        ("0.3", 10, 3),
        ("0.1", 10, 1),
        ("0.7", 10, 7),
        ("0.29", 100, 29),
        ("0.57", 100, 57),
        ("1", 7, 7),
        ("0", 7, 0),
        ("0.3333333333333333333333333333333333", 3, 0),
        ("0.0001", 9999, 0),
        ("0.0001", 10000, 1),
    ],
)
def test_floors_are_exact(share: str, count: int, floor: int) -> None:
    assert floor_of(share, count) == floor
    assert floors_of(Decimal(share), torch.tensor([[count]])).tolist() == [[floor]]


def test_ties_go_to_the_lower_index() -> None:
    order = order_of(torch.tensor([[0.0, 1, -0.0, 1, 0]]))
    assert order.tolist() == [[1, 3, 0, 2, 4]]
    big = order_of(torch.ones(3, 5000))
    assert torch.equal(big, torch.arange(5000).expand(3, 5000))


def test_take_counts_only_candidates() -> None:
    order = torch.tensor([3, 1, 0, 2])
    candidates = torch.tensor([True, False, True, True])
    assert take(order, candidates, torch.tensor(2)).tolist() == [True, False, False, True]
    assert take(order, candidates, torch.tensor(0)).tolist() == [False] * 4


@pytest.mark.parametrize("allocator", ["uniform", "adakv"])
@pytest.mark.parametrize("selector", get_args(Selector))
def test_selection_does_not_depend_on_other_layers(
    allocator: Allocator, selector: Selector
) -> None:
    policy = Policy.parse(f"window+{allocator}+{selector}:window=4")
    layers = make_layers(11, 5, 2, 33, "bf16", window_mask(33, 0, 4))
    together = Plan(layers, policy)
    for tier in TIERS:
        alone = [Plan([layer], policy).select(tier)[0] for layer in layers]
        assert torch.equal(together.select(tier), torch.stack(alone))
        assert torch.equal(together.select(tier), Plan(layers, policy).select(tier))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["attention", "critical", "relative"])
def test_non_finite_scores_are_refused(name: str, bad: float) -> None:
    selector = {"attention": "plain"}.get(name, name)
    layers = make_layers(0, 2, 2, 9, "none", window_mask(9, 0, 2))
    getattr(layers[1], name)[1, 4] = bad
    with pytest.raises(NumericsError, match=name):
        Plan(layers, Policy.parse(f"window+uniform+{selector}"))


def test_missing_scores_are_named() -> None:
    layer = LayerScores(torch.rand(2, 5), torch.zeros(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="critical"):
        Plan([layer], Policy.parse("criticalkv"))
