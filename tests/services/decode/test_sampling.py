"""Sampling: filters, seeds, log probabilities."""

from __future__ import annotations

import pytest
import torch

from criticalkv.services.decode.sampling import Sampler, top_logprobs
from criticalkv.shared.errors import NumericsError
from criticalkv.shared.requests import Sampling

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0])


def draws(count: int = 2000, **fields: float) -> torch.Tensor:
    sampler = Sampler(Sampling(max_tokens=1, **fields))  # type: ignore[arg-type]
    return torch.tensor([sampler.choose(LOGITS) for _ in range(count)])


def test_greedy_takes_the_likeliest() -> None:
    assert draws(3, temperature=0).tolist() == [1, 1, 1]


def test_frequencies_follow_the_softmax_at_a_temperature() -> None:
    counts = draws(8000, temperature=1.5, seed=3).bincount(minlength=5) / 8000
    torch.testing.assert_close(counts, (LOGITS / 1.5).softmax(0), atol=0.02, rtol=0)


def test_top_k_and_top_p_cut_the_tail() -> None:
    assert set(draws(temperature=2, top_k=2).tolist()) == {1, 2}
    # Probabilities 0.64, 0.24, 0.09, …: 0.7 needs the second, and no third.
    assert set(draws(temperature=1, top_p=0.7).tolist()) == {1, 2}
    assert set(draws(temperature=1, top_p=1e-9).tolist()) == {1}


def test_a_seed_replays_and_another_does_not() -> None:
    one, again, other = (draws(50, temperature=1, seed=s) for s in (7, 7, 8))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_are_refused(bad: float) -> None:
    with pytest.raises(NumericsError):
        Sampler(Sampling(max_tokens=1)).choose(torch.tensor([0.0, bad]))


def test_top_logprobs_are_of_the_raw_distribution() -> None:
    logprob, top = top_logprobs(LOGITS, 3, 2)
    expected = LOGITS.log_softmax(0)
    assert logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in top] == [1, 2]
    assert top[0][1] == pytest.approx(float(expected[1]))
