"""Sampling: filters, seeds, log probabilities; a row of a batch is as if it were alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from criticalkv.services.decode.sampling import Sampler, _draw, _Ranking, choose, top_logprobs
from criticalkv.shared.errors import NumericsError
from criticalkv.shared.requests import Sampling

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0])
LAST_U = 1 - 2**-53
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 2.0},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.37},
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 2.0, "top_k": 3000, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.0},
]


def sampling(**fields: Any) -> Sampling:
    return Sampling(max_tokens=1, **fields)


def rows(batch: int, vocab: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(batch, vocab, generator=torch.Generator().manual_seed(seed))


def draws(count: int = 2000, logits: Tensor = LOGITS, **fields: Any) -> Tensor:
    sampler = Sampler(sampling(**fields))
    return torch.tensor([choose(logits[None], [sampler])[0] for _ in range(count)])


def oracle(logits: Tensor, wanted: Sampling, us: Tensor) -> list[int]:
    """What the filters mean, in plain words: everything sorted, everything summed up."""
    order = torch.sort(
        (logits - logits.max()).double() / wanted.temperature, descending=True, stable=True
    )
    probs = order.values.softmax(0)[: wanted.top_k or None]
    below = probs.cumsum(0) - probs
    mass = probs[below < wanted.top_p * probs.sum()].cumsum(0)
    index = torch.searchsorted(mass, us * mass[-1], right=True)
    return order.indices[index.clamp(max=mass.numel() - 1)].tolist()


@pytest.fixture(params=[1, 2], ids=lambda n: f"{n}threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------- which token


def test_greedy_takes_the_likeliest_and_of_equal_ones_the_first() -> None:
    assert draws(3, temperature=0).tolist() == [1, 1, 1]
    assert draws(1, torch.tensor([0.0, 5.0, 1.0, 5.0]), temperature=0).tolist() == [1]


def test_frequencies_follow_the_softmax_at_a_temperature() -> None:
    counts = draws(8000, temperature=1.5, seed=3).bincount(minlength=5) / 8000
    torch.testing.assert_close(counts, (LOGITS / 1.5).softmax(0), atol=0.02, rtol=0)


def test_top_k_and_top_p_cut_the_tail() -> None:
    assert set(draws(temperature=2, top_k=2).tolist()) == {1, 2}
    # Probabilities 0.64, 0.24, 0.09, …: 0.7 needs the second, and no third.
    assert set(draws(temperature=1, top_p=0.7).tolist()) == {1, 2}
    assert set(draws(temperature=1, top_p=1e-9).tolist()) == {1}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_p": 0.5}, 2),  # the third starts at the mass, not below it
        ({"top_p": 0.51}, 3),
        ({"top_k": 3}, 3),
        ({"top_k": 9}, 4),
        ({"top_k": 2, "top_p": 0.5}, 1),  # of the mass that top_k leaves
        ({"top_k": 2, "top_p": 0.51}, 2),
    ],
    ids=str,
)
def test_of_equal_logits_the_first_ones_are_kept(fields: dict[str, Any], kept: int) -> None:
    logits = torch.tensor([1.0, -50.0, 1.0, 1.0, 1.0])
    assert set(draws(200, logits, temperature=1, **fields).tolist()) == set([0, 2, 3, 4][:kept])


@pytest.mark.parametrize("scale", [0.01, 3.0, 60.0])
@pytest.mark.parametrize("vocab", [1, 2, 5, 1021, 49152])
@pytest.mark.parametrize("fields", SETTINGS[:-1], ids=str)
def test_tokens_are_the_oracles(fields: dict[str, Any], vocab: int, scale: float) -> None:
    logits, wanted = rows(1, vocab, scale)[0], sampling(**fields)
    us = torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    us[:2] = torch.tensor([0.0, 0.999999])
    found = [_draw(logits.numpy(), wanted, float(u)) for u in us]
    assert found == oracle(logits, wanted, us)


@pytest.mark.parametrize("fields", SETTINGS[:-1], ids=str)
def test_tokens_are_the_oracles_among_many_equal_logits(fields: dict[str, Any]) -> None:
    logits, wanted = rows(1, 5001, 2.0)[0].round(), sampling(**fields)
    us = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = [_draw(logits.numpy(), wanted, float(u)) for u in us]
    assert found == oracle(logits, wanted, us)


@pytest.mark.parametrize("fields", SETTINGS[:-1], ids=str)
def test_the_last_point_is_a_token_of_the_filtered_ones(fields: dict[str, Any]) -> None:
    logits, wanted = rows(1, 1000)[0], sampling(**fields)
    kept = oracle(logits, wanted, torch.linspace(0, 1, 200_000, dtype=torch.float64))
    assert _draw(logits.numpy(), wanted, LAST_U) in kept


@pytest.mark.parametrize("seed", [3, 6, 17])  # with buckets whose two sums differ
def test_between_two_buckets_rounding_leaves_no_gap(seed: int) -> None:
    gaps = rows(1, 5000, seed=seed)[0]
    ranking = _Ranking((gaps - gaps.max()).numpy(), 1.0)
    place = np.empty(5000, dtype=np.intp)
    place[(-ranking._gaps).argsort(kind="stable")] = range(5000)
    last, _, kept = ranking._last_kept(1.0)
    for bucket in np.unique(ranking._buckets[ranking._buckets < last]):
        u = ranking._sorted(bucket)[1][-1] / kept[-1]
        near = [place[ranking.at(x, 1.0)] for x in (np.nextafter(u, 0), u, np.nextafter(u, 1))]
        assert 0 <= near[-1] - near[0] <= 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-6, 2.0])
def test_extreme_logits_and_temperatures_overflow_nowhere(temperature: float) -> None:
    logits = torch.tensor([-3e38, 3e38, 2.9e38, -3e38])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(draws(5, logits, temperature=temperature, top_p=0.9).tolist()) == {1}
        assert set(draws(5, logits, temperature=temperature, top_k=3).tolist()) == {1}


# ------------------------------------------------------------------- seeds


def test_a_seed_replays_and_another_does_not() -> None:
    one, again, other = (draws(50, temperature=1, seed=s) for s in (7, 7, 8))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("seed", [0, 9])
def test_a_branch_draws_as_a_request_with_its_seed(seed: int) -> None:
    branch = Sampler(sampling(temperature=1, seed=5), seed=seed)
    found = [choose(LOGITS[None], [branch])[0] for _ in range(50)]
    assert found == draws(50, temperature=1, seed=seed).tolist()


def test_every_token_takes_one_draw_whatever_the_filters() -> None:
    states = []
    for fields in SETTINGS[:-1]:
        sampler = Sampler(sampling(seed=4, **fields))
        for _ in range(3):
            choose(LOGITS[None], [sampler])
        states.append(sampler._generator.get_state())
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        torch.rand((), dtype=torch.float64, generator=generator)
    assert all(torch.equal(state, generator.get_state()) for state in states)


# ------------------------------------------------------------------- batch


def batch_samplers(order: list[int]) -> list[Sampler]:
    return [Sampler(sampling(seed=100 + i, **SETTINGS[i])) for i in order]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("vocab", [7, 1021, 49152])
def test_a_row_is_the_same_alone_and_in_any_batch(vocab: int) -> None:
    steps = [rows(8, vocab, seed=step) for step in range(6)]
    alone = []
    for i in range(8):
        (sampler,) = batch_samplers([i])
        alone.append([choose(logits[i : i + 1], [sampler])[0] for logits in steps])
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [5, 2, 7, 0, 4, 1, 3, 6], [6, 3, 1]):
        samplers = batch_samplers(order)
        found = [choose(logits[order], samplers) for logits in steps]
        assert [list(row) for row in zip(*found, strict=True)] == [alone[i] for i in order]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("vocab", [7, 1021, 49152])
def test_rows_that_are_not_contiguous_are_the_same(vocab: int) -> None:
    logits, order = rows(8, vocab), list(range(8))
    wide = torch.cat([rows(8, 3), logits], 1)[:, 3:]
    across = logits.t().contiguous().t()
    expected = choose(logits, batch_samplers(order))
    logprobs = top_logprobs(logits, [*order[:7], 0], [3] * 8)
    for strided in (wide, across):
        assert not strided.is_contiguous()
        assert choose(strided, batch_samplers(order)) == expected
        assert top_logprobs(strided, [*order[:7], 0], [3] * 8) == logprobs


@pytest.mark.parametrize("offset", range(17))
def test_a_rows_place_in_memory_changes_no_bit(offset: int) -> None:
    gaps = rows(1, 1021)[0]
    gaps -= gaps.max()
    shifted = np.empty(1021 + offset, dtype=np.float32)[offset:]
    shifted[:] = gaps
    assert np.array_equal(_Ranking(shifted, 0.7)._mass, _Ranking(gaps.numpy(), 0.7)._mass)


def test_an_empty_batch_has_no_tokens() -> None:
    assert choose(torch.empty(0, 5), []) == []
    assert top_logprobs(torch.empty(0, 5), [], []) == []


# ---------------------------------------------------------------- numerics


@pytest.mark.parametrize(
    "bad", [[float("nan"), 0.0], [float("inf"), 0.0], [float("inf"), -float("inf")]], ids=str
)
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_row_that_is_not_finite_is_refused_alone(bad: list[float], at: int) -> None:
    logits, samplers = rows(8, 1021), batch_samplers(list(range(8)))
    broken = logits.clone()
    broken[at, 5:7] = torch.tensor(bad)
    found, expected = choose(broken, samplers), choose(logits, batch_samplers(list(range(8))))
    assert isinstance(found[at], NumericsError)
    assert found[:at] + found[at + 1 :] == expected[:at] + expected[at + 1 :]
    # It drew nothing: its next token is its first.
    assert choose(logits, samplers)[at] == expected[at]


def test_large_finite_logits_are_fine() -> None:
    assert choose(torch.full((2, 8), 3e38), [Sampler(sampling())] * 2) == [0, 0]
    # Beside a bad row, too, where every row is asked for itself.
    logits = torch.full((2, 8), 3e38)
    logits[0, 3] = float("nan")
    found = choose(logits, [Sampler(sampling())] * 2)
    assert isinstance(found[0], NumericsError)
    assert found[1] == 0


# ------------------------------------------------------- log probabilities


def test_top_logprobs_are_of_the_raw_distribution() -> None:
    ((logprob, top),) = [found for found in top_logprobs(LOGITS[None], [3], [2]) if found]
    expected = LOGITS.log_softmax(0)
    assert logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in top] == [1, 2]
    assert top[0][1] == pytest.approx(float(expected[1]))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("vocab", [21, 1021, 49152])
def test_logprobs_of_a_row_are_the_same_alone_and_in_any_batch(vocab: int) -> None:
    logits, tokens, counts = rows(8, vocab), list(range(8)), [0, 1, None, 20, 5, None, 20, 3]
    found = top_logprobs(logits, tokens, counts)
    for i, row in enumerate(found):
        assert top_logprobs(logits[i : i + 1], [tokens[i]], [counts[i]]) == [row]
        assert (row is None) == (counts[i] is None)
        if row is None:
            continue
        expected = logits[i].log_softmax(0)
        values, indices = expected.topk(counts[i] or 0)
        assert row == (
            float(expected[i]),
            list(zip(indices.tolist(), values.tolist(), strict=True)),
        )


def test_equal_alternatives_come_by_index_and_never_more_than_there_are() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]])
    for count, expected in [(1, [1]), (3, [1, 3, 0]), (4, [1, 3, 0, 2]), (20, [1, 3, 0, 2, 4])]:
        (found,) = top_logprobs(logits, [0], [count])
        assert found is not None
        assert [token for token, _ in found[1]] == expected
