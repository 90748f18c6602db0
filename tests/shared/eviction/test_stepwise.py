"""The parts of stepwise eviction: padding, recent queries, budgets, exact counts."""

from __future__ import annotations

import random

import pytest
import torch

from criticalkv.shared.cache.ragged import RaggedLayer, cu_seqlens_of
from criticalkv.shared.cache.tail import Tail
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.padded import Padded
from criticalkv.shared.eviction.plan import Plan
from criticalkv.shared.eviction.policy import (
    STEPWISE,
    Policy,
    canonical_turn_policy,
    parse_turn_policy,
)
from criticalkv.shared.eviction.recent_queries import SLACK, RecentQueries
from criticalkv.shared.eviction.scorers import SCORERS
from criticalkv.shared.eviction.scores import LayerScores
from criticalkv.shared.eviction.stepwise import StepwiseLayer, budget
from criticalkv.shared.model.attention import LayerCall

LENS = (3, 0, 5)


def ragged(lens: tuple[int, ...]) -> RaggedLayer:
    rows = torch.randn(sum(lens), 4, generator=torch.Generator().manual_seed(1))
    positions = torch.cat([2 * torch.arange(n, dtype=torch.int32) for n in lens])
    return RaggedLayer(rows, -rows, positions, cu_seqlens_of(lens))


def test_padding_stands_left_and_goes_again() -> None:
    before, tail = ragged(LENS), torch.randn(3, 2, 4)
    padded = Padded.of(before, tail, -tail, 20)
    assert padded.padding == (2, 5, 0)
    assert padded.real.sum(-1).tolist() == [5, 2, 7]
    assert padded.positions[:, -2:].tolist() == [[20, 21]] * 3
    assert (padded.keys[~padded.real] == 0).all()
    again = padded.take(padded.real)
    assert again.lens.tolist() == [5, 2, 7]
    for head in range(3):
        keys, values, positions = again.head(head)
        old = before.head(head)
        assert torch.equal(keys, torch.cat([old[0], tail[head]]))
        assert torch.equal(values, -keys)
        assert positions.tolist() == [*old[2].tolist(), 20, 21]


@pytest.mark.parametrize("lens", [(0, 0, 0), (1, 0, 2), LENS])
def test_a_layer_splits_into_first_entries_and_rest(lens: tuple[int, ...]) -> None:
    layer = ragged(LENS)
    first, rest = layer.split(lens)
    for head, n in enumerate(lens):
        for whole, a, b in zip(layer.head(head), first.head(head), rest.head(head), strict=True):
            assert torch.equal(whole, torch.cat([a, b]))
            assert a.shape[0] == n


@pytest.mark.parametrize("limit", [1, 5, 40])
def test_the_last_queries_are_there_and_some_may_be_taken_back(limit: int) -> None:
    drawn, recent = random.Random(limit), RecentQueries(limit)
    rows = torch.empty(2, 0, 3)
    for _ in range(200):
        new = torch.randn(2, drawn.choice([1, 1, 1, 7, 90]), 3)
        rows = torch.cat([rows, new], dim=1)
        recent.append(new)
        cut = drawn.randint(0, min(SLACK, recent.length))
        end = rows.shape[1] - cut
        wanted = rows[:, max(0, end - limit) : end]
        assert torch.equal(recent.last(limit, cut), wanted)
        if drawn.random() < 0.1:
            kept = drawn.randint(0, limit)
            recent.forget(kept)
            rows = rows[:, rows.shape[1] - min(kept, rows.shape[1]) :]


def test_bytes_of_recent_queries_are_counted() -> None:
    """What a layer holds is ancestors, survivors, the growing piece and the queries."""
    policy = Policy.parse("window+uniform+plain:window=4,interval=8,keep=0.5")
    layer = StepwiseLayer(policy, ragged((0, 0)), 0, torch.randn(16, 16), None)
    queries, keys = torch.randn(4, 5, 4), torch.randn(2, 5, 4)
    layer.attend(LayerCall(0, queries, keys, keys, 0.5, None))
    assert layer.nbytes >= queries.nbytes + 2 * keys.nbytes


def test_a_tail_grows_up_to_its_limit() -> None:
    tail, rows = Tail(100), torch.randn(2, 100, 3)
    for begin in range(0, 100, 5):
        keys, values = tail.append(rows[:, begin : begin + 5], -rows[:, begin : begin + 5])
        assert torch.equal(keys, rows[:, : begin + 5])
        assert torch.equal(values, -keys)
    assert tail.keys.shape[1] == 100


@pytest.mark.parametrize("allocator", ["uniform", "adakv"])
@pytest.mark.parametrize("selector", ["plain", "twostage", "critical"])
@pytest.mark.parametrize("padding", [(0, 0), (0, 9), (25, 3)])
def test_padding_takes_no_place(allocator: str, selector: str, padding: tuple[int, int]) -> None:
    """The same scores with and without a wall of padding give the same entries."""
    policy = Policy.parse(f"window+{allocator}+{selector}:interval=4,target=10")
    n, real = 30, torch.ones(2, 30, dtype=torch.bool)
    for head, count in enumerate(padding):
        real[head, :count] = False
    generator = torch.Generator().manual_seed(3)
    attention = torch.rand(2, n, generator=generator)
    critical = torch.rand(2, n, generator=generator)
    forced = torch.arange(n) >= n - 2
    for target in (1, 5, 10, 20, 29):
        plan = Plan([LayerScores(attention, forced, critical)], policy, tokens=40, real=real)
        kept = plan.select(f"{target}/40")[0]
        assert not (kept & ~real).any()
        assert (kept | ~(forced & real)).all()
        available = real.sum(-1)
        total = int(available.minimum(torch.tensor(max(target, 2))).sum())
        if allocator == "adakv":
            total = min(int(available.sum()), 2 * max(target, 2))
        assert int(kept.sum()) == total
        # Worse scores in the padding than anywhere, or better: no difference.
        loud = LayerScores(attention.where(real, 9.0), forced, critical.where(real, 9.0))
        assert torch.equal(
            Plan([loud], policy, tokens=40, real=real).select(f"{target}/40")[0], kept
        )


def test_budgets_are_exact() -> None:
    keep = Policy.parse("window+uniform+plain:interval=10,keep=0.29")
    target = Policy.parse("window+uniform+plain:interval=10,target=7")
    assert (budget(keep, 100), budget(target, 33)) == ("0.29", "7/33")


@pytest.mark.parametrize("scorer", [name for name in STEPWISE if name in SCORERS])
def test_first_and_last_tokens_survive_as_their_scorer_wants(scorer: str) -> None:
    options = {"window": ",window=3", "h2o": ",window=3,span=8"}.get(scorer, "")
    policy = Policy.parse(f"{scorer}+adakv+plain:interval=5,target=7{options}")
    layer = StepwiseLayer(policy, ragged((2, 1)), 50, torch.randn(8, 16), None)
    generator = torch.Generator().manual_seed(2)
    for _ in range(9):
        for _ in range(5):
            q, k, v = (torch.randn(h, 1, 4, generator=generator) for h in (4, 2, 2))
            layer.attend(LayerCall(0, q, k, v, 0.5, None))
        layer.evict()
        own = layer.survivors()
        assert int(own.lens.sum()) == min(2 * layer.tokens, 14)
        end = 50 + layer.tokens
        must = {"window": [end - 3, end - 1], "h2o": [end - 3, end - 1], "tova": [end - 1]}
        for head in range(2):
            kept = own.head(head)[2].tolist()
            assert kept == sorted(kept)
            assert set(must.get(scorer, [])) <= set(kept)
            if scorer == "streaming" and layer.tokens > 7:
                recent = len(kept) - 4
                assert kept == [50, 51, 52, 53, *range(end - recent, end)]


def test_a_turns_policy_is_dense_or_stepwise() -> None:
    assert parse_turn_policy("dense") is None
    name = "window+adakv+plain:interval=64,target=48"
    assert canonical_turn_policy(name) == Policy.parse(name).canonical()
    assert canonical_turn_policy("dense") == "dense"


@pytest.mark.parametrize("scorer", [name for name in STEPWISE if name in SCORERS])
def test_a_scorers_queries_are_those_of_the_last_columns(
    scorer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query i sees the columns up to its own: no head may have evicted a later one."""
    seen: list[int] = []
    score = SCORERS[scorer]

    def checked(policy: Policy, layer: ContextLayer) -> LayerScores:
        count = layer.queries.shape[1]
        assert layer.positions is not None
        last = torch.arange(stepwise.tokens - count, stepwise.tokens)
        assert (layer.positions[:, -count:] == last).all()
        assert torch.equal(layer.queries[0, :, 0].long(), last)
        seen.append(count)
        return score(policy, layer)

    monkeypatch.setitem(SCORERS, scorer, checked)
    options = {"window": ",window=3", "h2o": ",window=3,span=20"}.get(scorer, "")
    policy = Policy.parse(f"{scorer}+adakv+plain:interval=5,target=7{options}")
    stepwise = StepwiseLayer(policy, ragged((0, 0)), 0, torch.randn(8, 16), None)
    generator = torch.Generator().manual_seed(2)
    for position in range(40):
        q, k, v = (torch.randn(h, 1, 4, generator=generator) for h in (4, 2, 2))
        q[0, 0, 0] = position
        stepwise.attend(LayerCall(0, q, k, v, 0.5, None))
        if position % 5 == 4:
            stepwise.evict()
    assert seen[-1] == {"window": 3, "h2o": 8}.get(scorer, 1)
