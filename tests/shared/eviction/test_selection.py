"""Allocators × selectors against a slow oracle: plain Python, sets and sorted lists."""

from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import IDS, MATRIX, make_policy, make_profile, whole_model
from torch import Tensor

from criticalkv.shared.errors import NumericsError
from criticalkv.shared.eviction.orders import floor_of, floors_of, order_of, take
from criticalkv.shared.eviction.plan import Place, Plan
from criticalkv.shared.eviction.policy import Allocator, Policy, Selector
from criticalkv.shared.eviction.profile import Profile
from criticalkv.shared.eviction.scores import LayerScores

torch.set_num_threads(1)

Entry = tuple[int, int, int]
Head = tuple[int, int]
CASES = [
    (allocator, selector, second)
    for allocator, selector in MATRIX
    for second in (("critical", "relative") if selector == "twostage" else ("",))
]
CASE_IDS = ["+".join(filter(None, case)) for case in CASES]
TIERS = ("0.05", "0.1", "0.2", "0.3", "0.4", "0.6", "0.8", "1")


def best(entries: set[Entry], score: Tensor, count: int) -> set[Entry]:
    """The `count` best entries by (−score, layer, head, index)."""
    return set(sorted(entries, key=lambda e: (-float(score[e]), e))[: max(0, count)])


def by_averages(
    total: int, weights: dict[Head, Fraction], least: dict[Head, int], n: int
) -> dict[Head, int]:
    """Webster's method, an entry at a time; weightless heads take what others cannot."""
    out = dict(least)
    for _ in range(total - sum(out.values())):
        free = [h for h in sorted(out) if out[h] < n]
        ask = [h for h in free if weights[h]] or free
        gain = {h: (weights[h] or 1) / Fraction(2 * (out[h] - least[h]) + 1) for h in ask}
        out[max(ask, key=lambda h: gain[h])] += 1
    return out


class Oracle:
    """What a policy keeps, written from its description."""

    def __init__(
        self, layers: list[LayerScores], policy: Policy, profile: Profile | None = None
    ) -> None:
        self.policy = policy
        self.profile = profile
        self.scores = {
            name: torch.stack([getattr(layer, name) for layer in layers])
            for name in ("attention", "critical", "relative")
        }
        self.shape = self.scores["attention"].shape
        self.every = set(product(*(range(k) for k in self.shape)))
        self.heads = list(product(range(self.shape[0]), range(self.shape[1])))
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
        if (self.policy.allocator, self.policy.selector) == ("model", "twostage"):
            count = sum(budgets.values()) - len(self.forced)
            return self.forced | self.two_stages(self.every - self.forced, count)
        kept = set(self.forced)
        for (layer, h), budget in budgets.items():
            free = self.head(self.every - self.forced, layer, h)
            count = budget - self.forced_of(layer, h)
            if self.policy.selector == "twostage":
                kept |= self.two_stages(free, count)
            else:
                kept |= best(free, self.scores[by], count)
        return kept

    def two_stages(self, free: set[Entry], count: int) -> set[Entry]:
        first = best(free, self.scores["attention"], int(self.policy.alpha * count))
        return first | best(free - first, self.scores[self.policy.second], count - len(first))

    def forced_of(self, layer: int, h: int) -> int:
        return len(self.head(self.forced, layer, h))

    def budgets(self, tier: str, score: Tensor) -> dict[Head, int]:
        layers, heads, n = self.shape
        forced = {head: self.forced_of(*head) for head in self.heads}
        uniform = {head: max(forced[head], 1, int(Decimal(tier) * n)) for head in self.heads}
        if self.policy.allocator == "uniform":
            return uniform
        if self.policy.allocator == "model":
            total = int(Decimal(tier) * layers * heads * n)
            free = self.every - self.forced
            kept = self.forced | best(free, score, total - len(self.forced))
            return {head: len(self.head(kept, *head)) for head in self.heads}
        if self.policy.allocator == "adakv":
            return self.adakv(score, forced, uniform)
        if self.policy.allocator == "duo":
            return self.duo(tier, forced)
        return getattr(self, self.policy.allocator)(forced, uniform)

    def adakv(
        self, score: Tensor, forced: dict[Head, int], uniform: dict[Head, int]
    ) -> dict[Head, int]:
        out = {}
        for layer in range(self.shape[0]):
            heads = [head for head in self.heads if head[0] == layer]
            kept = {e for e in self.forced if e[0] == layer}
            for head in heads:
                floor = int(self.policy.safeguard * (uniform[head] - forced[head]))
                if forced[head] == 0:
                    floor = max(floor, 1)
                kept |= best(self.head(self.every - self.forced, *head), score, floor)
            free = {e for e in self.every - kept if e[0] == layer}
            kept |= best(free, score, sum(uniform[head] for head in heads) - len(kept))
            out.update({head: len(self.head(kept, *head)) for head in heads})
        return out

    def pyramidkv(self, forced: dict[Head, int], uniform: dict[Head, int]) -> dict[Head, int]:
        layers, _, n = self.shape
        low = 1 / Fraction(self.policy.beta)
        line = [2 - low - layer * (2 - 2 * low) / max(1, layers - 1) for layer in range(layers)]
        # Marks count from the forced entries on; an entry that must be comes before all.
        out = dict(forced)
        for _ in range(sum(uniform.values()) - sum(forced.values())):
            free = [head for head in self.heads if out[head] < n]
            gain = {
                head: line[head[0]] / Fraction(2 * (out[head] - forced[head]) + 1) for head in free
            }
            out[max(free, key=lambda head: (out[head] == 0, gain[head]))] += 1
        return out

    def headkv(self, forced: dict[Head, int], uniform: dict[Head, int]) -> dict[Head, int]:
        base = {head: uniform[head] - forced[head] for head in self.heads}
        pooled = {head: int(Fraction(base[head]) / Fraction(self.policy.beta)) for head in base}
        kept = {head: uniform[head] - pooled[head] for head in base}
        weights = {(la, h): Fraction(str(self.importance(la, h))) for la, h in self.heads}
        return by_averages(sum(uniform.values()), weights, kept, self.shape[2])

    def duo(self, tier: str, forced: dict[Head, int]) -> dict[Head, int]:
        n = self.shape[2]
        few = min(n, self.policy.sinks + self.policy.recent)
        out = {head: max(1, few, forced[head]) for head in self.heads}
        total = int(Decimal(tier) * len(out) * n)
        for head in sorted(out, key=lambda head: (-self.importance(*head), head)):
            if sum(out.values()) - out[head] + n > total:
                break
            out[head] = n
        return out

    def importance(self, layer: int, h: int) -> float:
        assert self.profile is not None
        return self.profile.importance[layer][h]


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
@pytest.mark.parametrize(("allocator", "selector", "second"), CASES, ids=CASE_IDS)
def test_equals_oracle(allocator: Allocator, selector: Selector, second: str, ties: str) -> None:
    policy = make_policy(
        "window", allocator, selector, alpha="0.3", safeguard="0.35", second=second
    )
    place = whole_model(2, 3)
    for n, sinks, recent in [(1, 0, 0), (7, 1, 2), (23, 0, 0), (29, 0, 5), (37, 4, 8), (5, 3, 9)]:
        layers = make_layers(n, 2, 3, n, ties, window_mask(n, sinks, recent))
        plan, oracle = Plan(layers, policy, place), Oracle(layers, policy, place.profile)
        for tier in TIERS:
            assert entries_of(plan.select(tier)) == oracle.select(tier), (n, tier)


@pytest.mark.parametrize(("allocator", "selector", "second"), CASES, ids=CASE_IDS)
def test_forced_entries_may_differ_by_head(
    allocator: Allocator, selector: Selector, second: str
) -> None:
    policy = make_policy("replay", allocator, selector, second=second)
    place = whole_model(2, 3, 1)
    torch.manual_seed(3)
    forced = torch.rand(3, 19) < torch.tensor([[0.0], [0.2], [0.7]])
    layers = make_layers(5, 2, 3, 19, "heavy", forced)
    plan, oracle = Plan(layers, policy, place), Oracle(layers, policy, place.profile)
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
    beta=st.decimals("1.001", 30, places=3),
    tiers=st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True),
)
@pytest.mark.parametrize(("allocator", "selector", "second"), CASES, ids=CASE_IDS)
def test_tiers_are_nested(
    allocator: Allocator,
    selector: Selector,
    second: str,
    seed: int,
    shape: tuple[int, int, int],
    ties: str,
    sinks: int,
    recent: int,
    alpha: Decimal,
    safeguard: Decimal,
    beta: Decimal,
    tiers: list[int],
) -> None:
    policy = make_policy(
        "replay",
        allocator,
        selector,
        alpha=alpha,
        safeguard=safeguard,
        beta=beta,
        second=second,
    )
    layers = make_layers(seed, *shape, ties, window_mask(shape[2], sinks, recent))
    plan = Plan(layers, policy, whole_model(*shape[:2], seed))
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


@pytest.mark.parametrize("allocator", [name for name in get_args(Allocator) if name != "model"])
def test_only_model_wide_budgets_may_empty_a_head(allocator: str) -> None:
    scores = torch.cat([torch.full((1, 10), 0.1), torch.full((1, 10), 0.9)])
    policy = make_policy("replay", allocator, "plain", sinks=0, recent=0, safeguard=0, beta="1.001")
    layers = [LayerScores(scores, torch.zeros(10, dtype=torch.bool))] * 2
    plan = Plan(layers, policy, Place.whole(2, make_profile(2, 2, 5)))
    assert plan.budgets("0.05").tolist() == [[1, 1], [1, 1]]
    for tier in TIERS:
        assert plan.budgets(tier).min() >= 1
    if allocator == "adakv":
        assert plan.budgets("0.5").tolist() == [[1, 9]] * 2


@pytest.mark.parametrize("allocator", [name for name in get_args(Allocator) if name != "duo"])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 20])
def test_window_wins_over_the_budget(allocator: str, n: int) -> None:
    """n ≤ w keeps all, b ≤ w keeps the window."""
    scores = torch.linspace(1, 0, n).expand(2, n)
    policy = make_policy("window", allocator, "twostage", window=8)
    plan = Plan([LayerScores(scores, window_mask(n, 0, 8), scores)], policy, whole_model(1, 2))
    window = {(0, h, i) for h in (0, 1) for i in range(max(0, n - 8), n)}
    assert entries_of(plan.select("0.1")) == window
    assert entries_of(plan.select("0.4")) == window


@pytest.mark.parametrize(("allocator", "selector"), MATRIX, ids=IDS)
@pytest.mark.parametrize("n", [1, 2, 8, 9, 33])
def test_tier_one_keeps_everything(allocator: str, selector: str, n: int) -> None:
    for sinks, recent in ((0, 0), (1, 3), (4, 8)):
        layers = make_layers(n, 3, 2, n, "heavy", window_mask(n, sinks, recent))
        policy = make_policy("window", allocator, selector)
        assert Plan(layers, policy, whole_model(3, 2, n)).select("1").all()


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


@settings(max_examples=200, deadline=None)
@given(
    share=st.decimals(0, 1, places=30) | st.decimals(0, 1, places=4),
    counts=st.lists(st.integers(0, 1 << 41), min_size=1, max_size=4),
)
def test_floors_of_any_size_are_exact(share: Decimal, counts: list[int]) -> None:
    expected = [int(Fraction(share) * count) for count in counts]
    assert floors_of(share, torch.tensor(counts)).tolist() == expected


@pytest.mark.parametrize("share", ["0.2", "0.3333", "0.5"])
def test_usual_floors_stay_on_the_device(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, expected = torch.arange(50), [int(Fraction(share) * c) for c in range(50)]
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "tolist", lambda _: pytest.fail("a copy to the host"))
        floors = floors_of(Decimal(share), counts)
    assert floors.tolist() == expected


@pytest.mark.parametrize("allocator", ["headkv", "pyramidkv"])
def test_forced_entries_are_counted_once(allocator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy("window", allocator, "plain", window=4)
    layers = make_layers(1, 2, 3, 20, "none", window_mask(20, 0, 4))
    plan, copies, tolist = Plan(layers, policy, whole_model(2, 3)), 0, Tensor.tolist

    def counting(tensor: Tensor) -> object:
        nonlocal copies
        copies += 1
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", counting)
    for tier in TIERS:
        plan.budgets(tier)
    assert copies == 1


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


@pytest.mark.parametrize(("allocator", "selector"), [pair for pair in MATRIX if pair[0] != "model"])
def test_streamed_layers_select_as_all_together(allocator: Allocator, selector: Selector) -> None:
    policy = make_policy("window", allocator, selector, window=4)
    layers = make_layers(11, 5, 2, 33, "bf16", window_mask(33, 0, 4))
    evictable, profile = (0, 1, 3, 5, 6), make_profile(7, 2)
    together = Plan(layers, policy, Place(evictable, evictable, profile))
    places = [Place((layer,), evictable, profile) for layer in evictable]
    for tier in TIERS:
        alone = [
            Plan([layer], policy, place).select(tier)[0]
            for layer, place in zip(layers, places, strict=True)
        ]
        assert torch.equal(together.select(tier), torch.stack(alone))


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
