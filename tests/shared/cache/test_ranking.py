"""Ranking: every tier is a prefix of one order, and equals compressing at it directly."""

import logging
from decimal import Decimal
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import IDS, MATRIX, make_policy, make_profile, whole_model
from torch import Tensor

from criticalkv.shared.cache.ragged import RaggedCache, dense_layer
from criticalkv.shared.cache.ranking import (
    Ranking,
    build_layer,
    join_rankings,
    rank_layers,
)
from criticalkv.shared.errors import NumericsError
from criticalkv.shared.eviction import allocators
from criticalkv.shared.eviction.allocators.contest import Contest
from criticalkv.shared.eviction.plan import Place, Plan
from criticalkv.shared.eviction.policy import Allocator, Policy, Selector
from criticalkv.shared.eviction.scores import LayerScores

torch.set_num_threads(1)

TIERS = ("0.05", "0.1", "0.2", "0.3", "0.4", "0.6", "0.8", "1")


def make_layers(seed: int, layers: int, heads: int, n: int, forced: int) -> list[LayerScores]:
    """bf16-rounded scores near 1e-3, where almost everything ties."""
    generator = torch.Generator().manual_seed(seed)

    def score() -> Tensor:
        return (torch.rand(heads, n, generator=generator) * 1e-5 + 1e-3).bfloat16().float()

    mask = torch.arange(n) >= n - forced
    return [LayerScores(score(), mask, score(), score()) for _ in range(layers)]


def heads_of(ranking: Ranking, tier: int = -1) -> list[list[list[int]]]:
    """Kept indices in rank order, [layer][head], at a tier read as a prefix."""
    out = []
    for layer, order in enumerate(ranking.order):
        begin = order.cu_seqlens.tolist()
        lens = ranking.tier_lens[tier, layer].tolist()
        out.append([order.indices[b : b + n].tolist() for b, n in zip(begin, lens, strict=False)])
    return out


def as_sets(heads: list[list[list[int]]]) -> list[list[set[int]]]:
    return [[set(head) for head in layer] for layer in heads]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**30),
    n=st.integers(1, 40),
    forced=st.integers(0, 9),
    tiers=st.lists(st.integers(1, 100), min_size=1, max_size=6, unique=True),
)
@pytest.mark.parametrize(("allocator", "selector"), MATRIX, ids=IDS)
def test_reading_a_tier_equals_compressing_at_it(
    allocator: Allocator, selector: Selector, seed: int, n: int, forced: int, tiers: list[int]
) -> None:
    policy = make_policy("replay", allocator, selector)
    layers, place = make_layers(seed, 2, 3, n, forced), whole_model(2, 3, seed)
    names = [str(Decimal(t) / 100) for t in sorted(tiers)]
    ranking = rank_layers(layers, policy, names, place)
    assert ranking.nested
    assert ranking.tiers == tuple(names)
    for k, tier in enumerate(names):
        read = heads_of(ranking, k)
        direct = rank_layers(layers, policy, (tier,), place)
        assert as_sets(read) == as_sets(heads_of(direct))
        assert read == heads_of(rank_layers(layers, policy, names[: k + 1], place))


@pytest.mark.parametrize(("allocator", "selector"), MATRIX, ids=IDS)
def test_rank_is_first_tier_then_score_then_index(allocator: Allocator, selector: Selector) -> None:
    policy = make_policy("replay", allocator, selector)
    layers, place = make_layers(4, 3, 2, 37, 5), whole_model(3, 2)
    plan = Plan(layers, policy, place)
    masks = [plan.select(tier) for tier in TIERS]
    name = {"plain": "attention", "twostage": "critical"}.get(selector, selector)
    ranking = rank_layers(layers, policy, TIERS, place)
    for layer, h in product(range(3), range(2)):
        score = layers[layer].needed(name)[h]

        def rank(i: int, la: int = layer, h: int = h, s: Tensor = score) -> tuple[int, float, int]:
            return next(t for t in range(8) if masks[t][la, h, i]), -float(s[i]), i

        assert heads_of(ranking)[layer][h] == sorted(range(37), key=rank)
        assert ranking.tier_lens[:, layer, h].tolist() == [int(m[layer, h].sum()) for m in masks]


@pytest.mark.parametrize("n", [1, 2, 9, 33])
@pytest.mark.parametrize(("allocator", "selector"), MATRIX, ids=IDS)
def test_tier_one_is_lossless(allocator: Allocator, selector: Selector, n: int) -> None:
    torch.manual_seed(n)
    keys = torch.randn(3, n, 8).bfloat16()
    values = torch.randn(3, n, 8).bfloat16()
    policy = make_policy("replay", allocator, selector)
    ranking = rank_layers(make_layers(n, 1, 3, n, 4), policy, TIERS, whole_model(1, 3))
    layer = build_layer(ranking, 0, keys, values, 1000)
    assert layer.lens.tolist() == [n] * 3
    for h in range(3):
        k, v, positions = layer.head(h)
        by_position = positions.argsort()
        assert positions[by_position].tolist() == list(range(1000, 1000 + n))
        assert torch.equal(k[by_position], keys[h])
        assert torch.equal(v[by_position], values[h])


@pytest.mark.parametrize(("allocator", "selector"), MATRIX, ids=IDS)
def test_build_layer_gathers_the_ranked_entries(allocator: Allocator, selector: Selector) -> None:
    keys, values = torch.randn(2, 21, 8), torch.randn(2, 21, 8)
    policy = make_policy("replay", allocator, selector)
    ranking = rank_layers(make_layers(1, 2, 2, 21, 3), policy, ("0.2", "0.5"), whole_model(2, 2))
    cache = RaggedCache(
        tuple(build_layer(ranking, i, keys, values, 7) for i in range(2)),
        21,
        28,
        ranking.tiers,
        ranking.tier_lens,
    )
    for k, tier in enumerate(ranking.tiers):
        for i, layer in enumerate(cache.at_tier(tier).layers):
            assert layer.positions.dtype == torch.int32
            assert layer.cu_seqlens.dtype == torch.int32
            for h, indices in enumerate(heads_of(ranking, k)[i]):
                head_keys, head_values, positions = layer.head(h)
                assert torch.equal(head_keys, keys[h, indices])
                assert torch.equal(head_values, values[h, indices])
                assert positions.tolist() == [7 + x for x in indices]


@pytest.mark.parametrize(("allocator", "selector"), MATRIX, ids=IDS)
def test_layers_that_keep_all_are_outside_the_budget(
    allocator: Allocator, selector: Selector
) -> None:
    """A sliding-window layer may be shorter and changes nothing for the others."""
    policy = make_policy("replay", allocator, selector)
    full = make_layers(2, 2, 2, 40, 3)
    place = Place((0, 2), (0, 2), make_profile(3, 2))
    alone = rank_layers(full, policy, TIERS, place)
    mixed = rank_layers([full[0], LayerScores.everything(2, 16), full[1]], policy, TIERS, place)
    assert torch.equal(mixed.tier_lens[:, [0, 2]], alone.tier_lens)
    assert mixed.tier_lens[:, 1].eq(16).all()
    assert heads_of(mixed)[1] == [list(range(16))] * 2
    assert [heads_of(mixed)[i] for i in (0, 2)] == heads_of(alone)


def test_dense_node_is_in_position_order() -> None:
    keys, values = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    ranking = rank_layers([LayerScores.everything(2, 5)] * 3, None, ("1",))
    assert ranking.tier_lens.tolist() == [[[5, 5]] * 3]
    built, dense = build_layer(ranking, 2, keys, values, 9), dense_layer(keys, values, 9)
    for name in ("keys", "values", "positions", "cu_seqlens"):
        assert torch.equal(getattr(built, name), getattr(dense, name))
        assert getattr(built, name).dtype == getattr(dense, name).dtype


@pytest.mark.parametrize("allocator", ["uniform", "adakv", "headkv", "pyramidkv", "duo"])
def test_streamed_layers_join_to_the_whole(allocator: str) -> None:
    selector = "plain" if allocator == "duo" else "twostage"
    policy = make_policy("window", allocator, selector, window=4)
    layers = make_layers(6, 4, 2, 30, 4)
    layers[1] = LayerScores.everything(2, 12)
    evictable, profile = (0, 2, 3), make_profile(4, 2, 1)
    whole = rank_layers(layers, policy, TIERS, Place(evictable, evictable, profile))
    places = [Place((i,), evictable, profile) for i in range(4)]
    joined = join_rankings(
        [
            rank_layers([layer], policy, TIERS, place)
            for layer, place in zip(layers, places, strict=True)
        ]
    )
    assert joined.tiers == whole.tiers
    assert joined.nested
    assert torch.equal(joined.tier_lens, whole.tier_lens)
    assert heads_of(joined) == heads_of(whole)
    with pytest.raises(ValueError, match="same tiers"):
        join_rankings([whole, rank_layers(layers[:1], policy, TIERS[:2], places[0])])


def test_without_nesting_only_the_highest_tier_remains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def shrinking(contest: Contest) -> Tensor:
        budgets = allocators.uniform(contest)
        budgets[..., 0] = 12 if contest.tier == "0.2" else 3
        return budgets

    monkeypatch.setitem(allocators.ALLOCATORS, "uniform", shrinking)
    layers = make_layers(8, 2, 2, 30, 2)
    with caplog.at_level(logging.WARNING):
        ranking = rank_layers(layers, Policy.parse("snapkv"), ("0.1", "0.2", "0.4"))
    assert not ranking.nested
    assert ranking.tiers == ("0.4",)
    assert ranking.tier_lens.tolist() == [[[3, 12]] * 2]
    assert as_sets(heads_of(ranking)) == as_sets(
        heads_of(rank_layers(layers, Policy.parse("snapkv"), ("0.4",)))
    )
    assert "not nested" in caplog.text


def test_heads_may_be_empty_under_model_wide_budgets() -> None:
    score = torch.cat([torch.full((1, 10), 0.1), torch.full((1, 10), 0.9)])
    none = torch.zeros(10, dtype=torch.bool)
    ranking = rank_layers([LayerScores(score, none)], Policy.parse("kvzip"), ("0.2", "0.5"))
    assert ranking.tier_lens.tolist() == [[[0, 4]], [[0, 10]]]
    layer = build_layer(ranking, 0, torch.randn(2, 10, 4), torch.randn(2, 10, 4), 0)
    assert layer.cu_seqlens.tolist() == [0, 0, 10]
    assert layer.head(0)[0].shape == (0, 4)


@pytest.mark.parametrize("tiers", [(), ("0.4", "0.2"), ("0.2", "0.2"), ("0.1", "0.10")])
def test_tiers_must_ascend(tiers: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        rank_layers(make_layers(0, 1, 1, 5, 0), Policy.parse("snapkv"), tiers)


def test_a_policy_is_needed_to_evict() -> None:
    with pytest.raises(ValueError, match="policy"):
        rank_layers(make_layers(0, 1, 1, 5, 0), None, ("1",))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_input_is_refused(bad: float) -> None:
    layers = make_layers(0, 1, 2, 9, 2)
    ranking = rank_layers(layers, Policy.parse("snapkv"), ("0.4", "1"))
    for which in range(2):
        kv = [torch.zeros(2, 9, 4), torch.zeros(2, 9, 4)]
        kv[which][1, 3, 2] = bad
        with pytest.raises(NumericsError, match="layer 0"):
            build_layer(ranking, 0, kv[0], kv[1], 0)
    layers[0].attention[0, 0] = bad
    with pytest.raises(NumericsError):
        rank_layers(layers, Policy.parse("snapkv"), ("0.4", "1"))
