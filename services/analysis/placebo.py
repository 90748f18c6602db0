"""A placebo for a masked span: another one, as long and as strong, that should not matter.

Masking any span disturbs the output. What masking the target does beyond masking a span of
equal length and equal Δθ (see `strength`) is due to what the target says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from criticalkv.services.analysis.span import Span

TOLERANCE = 0.05


@dataclass(frozen=True)
class Placebo:
    """What a search found.

    Attributes:
        span: the best match, within the tolerance or not; None: no span of the length is
            allowed.
        target: Δθ of the span to be matched.
        strength: Δθ of the placebo; 0 without one.
        gap: |strength − target| ÷ target; 0 if both are 0, ∞ without a match at all.
        matched: whether the gap is within the tolerance.
    """

    span: Span | None
    target: float
    strength: float
    gap: float
    matched: bool


def find_placebo(
    strengths: Tensor,
    target: Span,
    *,
    tolerance: float = TOLERANCE,
    forbidden: Sequence[Span] = (),
    before: int | None = None,
    nearby: bool = False,
) -> Placebo:
    """Search all spans as long as the target, in O(n) by prefix sums.

    Args:
        strengths: Δθ of every token, [n], see `token_strength`.
        target: the placebo does not overlap it.
        tolerance: greatest gap of a match.
        forbidden: further spans that it must not overlap, such as sinks.
        before: it ends here at the latest: where the queries begin; None: anywhere.
        nearby: take of all matches the nearest in position, not the nearest in Δθ.

    Returns:
        The earlier of two that are equally good. Without a match the nearest in Δθ.

    Raises:
        ConfigError: if the target ends after the last token.
    """
    target.check_within(strengths.numel())
    sums = _sums(strengths, len(target))
    wanted = float(sums[target.begin])
    allowed = _allowed(sums.numel(), target, forbidden, before)
    if not allowed.any():
        return Placebo(None, wanted, 0.0, float("inf"), matched=False)
    distances = (sums - wanted).abs().masked_fill(~allowed, torch.inf)
    gaps = _gaps(distances, wanted)
    matches = (gaps <= tolerance) & allowed
    found = _nearest(matches, target.begin) if nearby else None
    if found is None:
        found = int(distances.argmin())
    span = Span(found, found + len(target))
    return Placebo(span, wanted, float(sums[found]), float(gaps[found]), bool(matches[found]))


def _sums(strengths: Tensor, length: int) -> Tensor:
    """Δθ of the span that starts at each token, fp64 [n − length + 1]."""
    total = F.pad(strengths.double().cpu(), (1, 0)).cumsum(0)
    return total[length:] - total[:-length]


def _allowed(count: int, target: Span, forbidden: Sequence[Span], before: int | None) -> Tensor:
    """Say where a span may start, bool [count]."""
    length = len(target)
    allowed = torch.ones(count, dtype=torch.bool)
    for span in (target, *forbidden):
        allowed[max(0, span.begin - length + 1) : span.end] = False
    if before is not None:
        allowed[max(0, before - length + 1) :] = False
    return allowed


def _gaps(distances: Tensor, wanted: float) -> Tensor:
    if wanted:
        return distances / wanted
    return torch.zeros_like(distances).masked_fill(distances > 0, torch.inf)


def _nearest(matches: Tensor, start: int) -> int | None:
    starts = matches.nonzero()[:, 0]
    return int(starts[(starts - start).abs().argmin()]) if starts.numel() else None
