"""Allocators that know no scores: the divisor method, and budgets by depth and profile."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policies import STATIC, make_policy, make_profile
from torch import Tensor

from criticalkv.shared.errors import PolicyError
from criticalkv.shared.eviction.allocators.divisor import spread, whole
from criticalkv.shared.eviction.plan import Place, Plan
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profile
from criticalkv.shared.eviction.scores import LayerScores

torch.set_num_threads(1)

TIERS = tuple(str(Decimal(t) / 40) for t in range(1, 41))


def by_seats(
    total: int, weights: list[Fraction], floors: list[int], caps: list[int]
) -> tuple[int, ...]:
    """Highest averages, one seat after another: the method as it is written down."""
    seats = list(floors)
    for _ in range(max(0, min(total, sum(caps)) - sum(floors))):
        free = [i for i in range(len(seats)) if seats[i] < caps[i]]
        ask = [i for i in free if weights[i]] or free
        flat = not any(weights[i] for i in free)
        winner = min(
            ask, key=lambda i: (-(1 if flat else weights[i]) / Fraction(2 * seats[i] + 1), i)
        )
        seats[winner] += 1
    return tuple(seats)


heads = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 9), st.integers(0, 10**12), st.just(0)),
        st.integers(0, 5),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(heads=heads, total=st.integers(0, 120))
@example(heads=[(1, 0, 5)] * 3, total=4)
@example(heads=[(0, 0, 9), (3, 2, 4)], total=9)
@example(heads=[(1, 0, 1), (10**12, 0, 20)], total=20)
def test_spread_equals_seat_by_seat(heads: list[tuple[int, int, int]], total: int) -> None:
    weights, floors, above = zip(*heads, strict=True)
    caps = tuple(f + a for f, a in zip(floors, above, strict=True))
    expected = by_seats(total, [Fraction(w) for w in weights], list(floors), list(caps))
    assert spread(total, weights, floors, caps) == expected


@settings(max_examples=200, deadline=None)
@given(heads=heads, totals=st.tuples(st.integers(0, 200), st.integers(0, 9)))
def test_spread_is_exact_and_takes_from_nobody(
    heads: list[tuple[int, int, int]], totals: tuple[int, int]
) -> None:
    weights, floors, above = zip(*heads, strict=True)
    caps = tuple(f + a for f, a in zip(floors, above, strict=True))
    less = spread(totals[0], weights, floors, caps)
    more = spread(sum(totals), weights, floors, caps)
    assert all(a <= b for a, b in zip(less, more, strict=True))
    for seats, total in ((less, totals[0]), (more, sum(totals))):
        assert sum(seats) == min(max(total, sum(floors)), sum(caps))
        assert all(f <= s <= c for f, s, c in zip(floors, seats, caps, strict=True))


def test_spread_of_many_entries_is_quick() -> None:
    """10⁷ entries over 1,000 heads: no loop over single entries."""
    draw = torch.Generator().manual_seed(0)
    weights = tuple(torch.randint(0, 10**9, (1000,), generator=draw).tolist())
    caps = (20_000,) * 1000
    started = time.process_time()
    seats = spread(10**7, weights, (0,) * 1000, caps)
    assert time.process_time() - started < 2
    assert sum(seats) == 10**7
    quota = [Fraction(w) for w in weights]
    free = [i for i, s in enumerate(seats) if 0 < s < caps[i]]
    # Webster: somebody's last entry is worth no less than anybody's next.
    last = min(quota[i] / (2 * seats[i] - 1) for i in free)
    assert all(quota[i] / (2 * seats[i] + 1) <= last for i in free)


def test_whole_keeps_proportions() -> None:
    assert whole([Fraction(1, 2), Fraction(1, 3), Fraction(0)]) == (3, 2, 0)
    assert whole([Fraction(0)]) == (0,)


def one_score(layers: int, heads: int, n: int, forced: Tensor) -> list[LayerScores]:
    score = torch.rand(heads, n, generator=torch.Generator().manual_seed(n))
    return [LayerScores(score, forced, score, score) for _ in range(layers)]


def last(n: int, count: int) -> Tensor:
    return torch.arange(n) >= n - count


@pytest.mark.parametrize("allocator", STATIC)
@pytest.mark.parametrize("n", [1, 3, 8, 9, 40, 61])
def test_a_streamed_layer_gets_its_row_of_the_whole(allocator: str, n: int) -> None:
    """Layers 1 and 3 of 6 are sliding-window layers: no part of the contest."""
    policy = make_policy("window", allocator, "plain", window=8)
    evictable, profile = (0, 2, 4, 5), make_profile(6, 3, 7)
    layers = one_score(4, 3, n, last(n, 8))
    whole_plan = Plan(layers, policy, Place(evictable, evictable, profile))
    rows = set()
    for tier in TIERS:
        together = whole_plan.budgets(tier)
        for k, layer in enumerate(evictable):
            alone = Plan([layers[k]], policy, Place((layer,), evictable, profile))
            assert torch.equal(alone.budgets(tier)[0], together[k])
        some = Plan(layers[1:3], policy, Place((2, 4), evictable, profile))
        assert torch.equal(some.budgets(tier), together[1:3])
        rows |= {tuple(row) for row in together.tolist()}
    assert n < 40 or len(rows) > 2


def test_pyramid_falls_linearly_with_the_uniform_total() -> None:
    policy = make_policy("window", "pyramidkv", "plain", window=8)
    plan = Plan(one_score(5, 2, 400, last(400, 8)), policy)
    budgets = plan.budgets("0.27")
    # b = 108, c = 100: 195, 147.5, 100, 52.5, 5, and the window; halves tie, and go first.
    assert budgets.tolist() == [[203] * 2, [156] * 2, [108] * 2, [60] * 2, [13] * 2]


def test_a_full_pyramid_layer_leaves_the_rest_to_the_others() -> None:
    """Where kvpress falls back to uniform budgets and shrinks layer 0."""
    policy = make_policy("window", "pyramidkv", "plain", window=8)
    plan = Plan(one_score(3, 1, 108, last(108, 8)), policy)
    first = [int(plan.budgets(tier)[0, 0]) for tier in TIERS]
    assert first == sorted(first)
    assert first[TIERS.index("0.6")] == 108
    assert all(plan.budgets(tier).sum() == 3 * max(8, int(Decimal(tier) * 108)) for tier in TIERS)


def test_headkv_is_the_published_formula_where_no_head_is_full() -> None:
    rows = ((0.1, 0.3), (0.0, 0.6))
    profile = Profile(model_digest="a" * 64, method="test", importance=rows)
    policy = make_policy("window", "headkv", "plain", window=8)
    plan = Plan(one_score(2, 2, 400, last(400, 8)), policy, Place.whole(2, profile))
    # base = 60 − 8 = 52, ⌊52/1.5⌋ = 34: 18 kept, of 136 to win 13.6, 40.8, 0, 81.6, and
    # the window. Rounded, the shares were one too many.
    won = torch.tensor([[14, 41], [0, 81]])
    assert torch.equal(plan.budgets("0.15"), won + 18 + 8)


@pytest.mark.parametrize("allocator", ["headkv", "pyramidkv"])
@pytest.mark.parametrize("forced", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 2, 7, 33, 100])
def test_static_totals_are_the_uniform_total(allocator: str, forced: int, n: int) -> None:
    layers = one_score(4, 3, n, last(n, forced))
    for beta in ("1.0001", "1.5", "20"):
        policy = make_policy("replay", allocator, "plain", beta=beta)
        plan = Plan(layers, policy, Place.whole(4, make_profile(4, 3, n)))
        uniform = Plan(layers, Policy.parse("replay+uniform+plain"))
        for tier in TIERS:
            budgets = plan.budgets(tier)
            assert budgets.sum() == uniform.budgets(tier).sum()
            assert budgets.min() >= max(1, min(n, forced))
            assert budgets.max() <= n


@pytest.mark.parametrize("allocator", ["headkv", "duo"])
def test_profiles_count_only_layers_that_evict(allocator: str) -> None:
    rows = ((0.1, 0.3), (5.0, 7.0), (0.0, 0.6))
    policy = make_policy("window", allocator, "plain", window=5)

    def budgets(evictable: tuple[int, ...], rows: tuple[tuple[float, ...], ...]) -> Tensor:
        profile = Profile(model_digest="a" * 64, method="test", importance=rows)
        place = Place(evictable, evictable, profile)
        return Plan(one_score(2, 2, 40, last(40, 5)), policy, place).budgets("0.6")

    assert torch.equal(budgets((0, 2), rows), budgets((0, 1), (rows[0], rows[2])))


def test_profiles_of_zeros_are_uniform() -> None:
    profile = Profile(model_digest="a" * 64, method="test", importance=((0.0,) * 2,) * 2)
    plan = Plan(
        one_score(2, 2, 40, last(40, 4)),
        make_policy("window", "headkv", "plain"),
        Place.whole(2, profile),
    )
    assert plan.budgets("0.5").tolist() == [[20, 20], [20, 20]]


def duo_plan(n: int, sinks: int = 2, recent: int = 3) -> Plan:
    rows = ((0.2, 0.9), (0.2, 0.5))
    profile = Profile(model_digest="a" * 64, method="test", importance=rows)
    policy = make_policy("streaming", "duo", "plain", sinks=sinks, recent=recent)
    return Plan(
        one_score(2, 2, n, torch.arange(n) < min(n, sinks)), policy, Place.whole(2, profile)
    )


@pytest.mark.parametrize(
    ("tier", "budgets"),
    [
        ("0.1", [[5, 5], [5, 5]]),  # sinks + recent, above the tier's 8
        ("0.43", [[5, 5], [5, 5]]),  # one entry short of a full head: no part of one
        ("0.4375", [[5, 20], [5, 5]]),
        ("0.625", [[5, 20], [5, 20]]),
        ("0.8125", [[20, 20], [5, 20]]),  # a tie: the lower (layer, head)
        ("0.9999", [[20, 20], [5, 20]]),
        ("1", [[20, 20], [20, 20]]),
    ],
)
def test_duo_fills_whole_heads_by_importance(tier: str, budgets: list[list[int]]) -> None:
    assert duo_plan(20).budgets(tier).tolist() == budgets


def test_duo_of_a_short_context_keeps_all() -> None:
    assert duo_plan(5).budgets("0.1").tolist() == [[5, 5], [5, 5]]
    assert duo_plan(4).budgets("0.1").tolist() == [[4, 4], [4, 4]]
    assert duo_plan(9, sinks=0, recent=0).budgets("0.1").tolist() == [[1, 1], [1, 1]]


def test_duo_goes_with_its_own_scorer() -> None:
    digest = "0" * 64
    with pytest.raises(PolicyError, match="duo goes with the scorer streaming"):
        Policy.parse(f"window+duo+plain:profile={digest}")
    with pytest.raises(PolicyError, match="duo needs profile="):
        Policy.parse("streaming+duo+plain")
    assert Policy.parse(f"streaming+duo+plain:profile={digest}").recent == 256


@pytest.mark.parametrize("allocator", ["headkv", "duo"])
def test_a_missing_profile_is_a_callers_mistake(allocator: str) -> None:
    plan = Plan(one_score(1, 2, 9, last(9, 2)), make_policy("window", allocator, "plain"))
    with pytest.raises(ValueError, match=f"{allocator} needs the model's profile"):
        plan.budgets("0.5")
