"""Choosing the tokens of a batch from its logits.

A row depends on its own logits and seed, never on the batch: every row is worked on alone,
by operations whose result does not depend on its place in memory or on threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from criticalkv.shared.errors import NumericsError
from criticalkv.shared.finite import is_finite
from criticalkv.shared.requests import Sampling

Row = NDArray[np.float32]
Indices = NDArray[np.intp]
Mass = NDArray[np.float64]

BUCKETS_PER_LOGIT = 32.0  # a power of two: the product below is exact
BUCKETS = 4096  # the last one takes everything that is 128 or more below the largest logit


class Sampler:
    """How one sequence's tokens are drawn, and where its draws stand.

    Args:
        sampling: of the request.
        seed: another one than the request's, for a branch.
    """

    def __init__(self, sampling: Sampling, seed: int | None = None) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed if seed is None else seed)

    def skip(self, tokens: int) -> None:
        """Go on as if so many tokens had been drawn."""
        if self._sampling.temperature:
            for _ in range(tokens):
                self._uniform()

    def pick(self, row: Row) -> int:
        """Return a token id for finite logits [vocab]."""
        if self._sampling.temperature == 0:
            return int(row.argmax())  # the first of equal ones
        # One draw per token, whatever the filters leave: a seed replays exactly.
        return _draw(row, self._sampling, self._uniform())

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def choose(logits: Tensor, samplers: Sequence[Sampler]) -> list[int | NumericsError]:
    """Return the next token of every row.

    Args:
        logits: fp32 [batch, vocab], on the CPU.
        samplers: of the rows.

    Returns:
        Per row a token id, or the error if its logits are not finite; such a row draws
        nothing, and the others do not notice.
    """
    # One pass over all rows; row by row only if something is wrong.
    fine = [True] * len(samplers) if is_finite(logits) else [is_finite(row) for row in logits]
    rows = logits.contiguous().numpy()
    return [
        sampler.pick(row) if ok else NumericsError("the model produced non-finite logits")
        for row, sampler, ok in zip(rows, samplers, fine, strict=True)
    ]


def top_logprobs(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int | None]
) -> list[tuple[float, list[tuple[int, float]]] | None]:
    """Return each row's log probability of its token, and the likeliest alternatives.

    Taken from the model's own distribution, before temperature and filters.

    Args:
        logits: fp32 [batch, vocab], on the CPU.
        tokens: the rows' tokens.
        counts: how many alternatives, per row; None = nothing is wanted, and returned.
    """
    rows = zip(logits.contiguous(), tokens, counts, strict=True)
    return [None if n is None else _logprobs(row, token, n) for row, token, n in rows]


def _logprobs(logits: Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    logprobs: Row = logits.log_softmax(0).numpy()
    return float(logprobs[token]), [(int(i), float(logprobs[i])) for i in _top(logprobs, count)]


def _top(values: Row, count: int) -> Indices:
    """Return the indices of the largest values, descending; equal ones by index."""
    indices = _largest(values, count)
    return indices[_descending(values[indices])]


def _largest(values: Row, count: int) -> Indices:
    """Return the indices of the largest values, ascending; of equal ones the first."""
    if count >= values.size:
        return np.arange(values.size)
    if count == 0:
        return np.arange(0)
    least = np.partition(values, values.size - count)[values.size - count]
    indices = np.flatnonzero(values >= least)
    surplus = indices.size - count
    return np.setdiff1d(indices, np.flatnonzero(values == least)[-surplus:]) if surplus else indices


def _descending(values: Row) -> Indices:
    return np.argsort(-values, kind="stable")


def _draw(row: Row, sampling: Sampling, u: float) -> int:
    """Return the token at `u`, in [0, 1), of the filtered distribution."""
    with np.errstate(over="ignore"):  # a gap or its quotient may fall to −∞: probability 0
        gaps = row - row.max()  # relative to the largest: no exponential overflows
        if not sampling.top_k:
            return _Ranking(gaps, sampling.temperature).at(u, sampling.top_p)
        tokens = _largest(gaps, sampling.top_k)
        return int(tokens[_Ranking(gaps[tokens], sampling.temperature).at(u, sampling.top_p)])


class _Ranking:
    """Tokens, likeliest first, equal ones by index: sorted only where it matters.

    A token's bucket never rises as its logit falls. So the buckets, laid side by side, are
    in order, and a place in the whole order is found by sorting the one bucket it is in.

        bucket    0        1 (empty)   2              …   4095
        tokens  [ 17 4 ]  [ ]        [ 9 1 230 8 ]       [ the tail ]
        mass           m₀   m₁ = m₀               m₂      cumulative

    Args:
        gaps: logits less the largest one.
        temperature: above 0.
    """

    def __init__(self, gaps: Row, temperature: float) -> None:
        buckets = gaps * np.float32(-BUCKETS_PER_LOGIT)
        self._gaps = gaps
        self._buckets = np.minimum(buckets, BUCKETS - 1, out=buckets).astype(np.intp)
        self._weights = gaps.astype(np.float64)
        self._weights /= temperature
        np.exp(self._weights, out=self._weights)
        self._mass = np.bincount(self._buckets, self._weights, BUCKETS).cumsum()

    def at(self, u: float, top_p: float) -> int:
        """Return the index that covers `u` of the mass that top_p leaves."""
        last, tokens, ends = self._last_kept(top_p)
        mass = u * ends[-1]
        bucket = int(self._mass.searchsorted(mass, side="right"))
        if bucket < last:
            tokens, ends = self._sorted(bucket)
        # Rounding may put the mass at the very end: there, too, is the last token.
        return int(tokens[min(int(ends.searchsorted(mass, side="right")), ends.size - 1)])

    def _last_kept(self, top_p: float) -> tuple[int, Indices, Mass]:
        """Return the last bucket that tokens are kept of, its tokens, and where the kept end.

        The likeliest token is kept, and every one that starts below the mass.
        """
        mass = top_p * self._mass[-1]
        bucket = int(self._mass.searchsorted(mass))
        tokens, ends = self._sorted(bucket)
        # A token starts where the one before it ends; the first of the bucket is kept.
        return bucket, tokens, ends[: 1 + int(ends[:-1].searchsorted(mass))]

    def _sorted(self, bucket: int) -> tuple[Indices, Mass]:
        """Return a bucket's tokens in order, and the mass up to the end of each."""
        members = np.flatnonzero(self._buckets == bucket)
        tokens = members[_descending(self._gaps[members])]
        before = self._mass[bucket - 1] if bucket else 0.0
        return tokens, before + self._weights[tokens].cumsum()
