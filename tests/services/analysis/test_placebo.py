"""The search for a placebo, against trying every span."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from criticalkv.services.analysis.placebo import TOLERANCE, Placebo, find_placebo
from criticalkv.services.analysis.span import Span
from criticalkv.shared.errors import ConfigError


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[int], Span, list[Span], int | None, float, bool]:
    """Whole numbers, whose sums are exact: many ties, many zeros."""
    strengths = draw(st.lists(st.integers(0, draw(st.sampled_from([1, 5, 1000]))), min_size=1))
    n = len(strengths)

    def span() -> Span:
        begin = draw(st.integers(0, n - 1))
        return Span(begin, draw(st.integers(begin + 1, min(n, begin + 6))))

    forbidden = [span() for _ in range(draw(st.integers(0, 2)))]
    before = draw(st.none() | st.integers(0, n + 2))
    tolerance = draw(st.sampled_from([0.0, 0.05, 0.5]))
    return strengths, span(), forbidden, before, tolerance, draw(st.booleans())


def tried(
    strengths: list[int],
    target: Span,
    forbidden: list[Span],
    before: int | None,
    tolerance: float,
    nearby: bool,
) -> Placebo:
    """Try every span."""
    length = target.end - target.begin
    wanted = sum(strengths[target.begin : target.end])
    found: list[tuple[float, float, int, int]] = []
    for begin in range(len(strengths) - length + 1):
        tokens = set(range(begin, begin + length))
        taken = any(tokens & set(range(s.begin, s.end)) for s in (target, *forbidden))
        if taken or (before is not None and begin + length > before):
            continue
        total = sum(strengths[i] for i in tokens)
        distance = abs(total - wanted)
        gap = distance / wanted if wanted else (math.inf if distance else 0.0)
        away = abs(begin - target.begin) if nearby and gap <= tolerance else 0
        missed = float(nearby and gap > tolerance)
        found.append((missed, away if not missed and nearby else distance, begin, total))
    if not found:
        return Placebo(None, wanted, 0.0, math.inf, matched=False)
    _, _, begin, total = min(found)
    distance = abs(total - wanted)
    gap = distance / wanted if wanted else (math.inf if distance else 0.0)
    return Placebo(Span(begin, begin + length), wanted, total, gap, gap <= tolerance)


@given(searches())
def test_the_search_finds_what_trying_every_span_finds(
    search: tuple[list[int], Span, list[Span], int | None, float, bool],
) -> None:
    strengths, target, forbidden, before, tolerance, nearby = search
    found = find_placebo(
        torch.tensor(strengths),
        target,
        tolerance=tolerance,
        forbidden=forbidden,
        before=before,
        nearby=nearby,
    )
    assert found == tried(strengths, target, forbidden, before, tolerance, nearby)


def planted(seed: int) -> tuple[Tensor, Span, Span]:
    """Strengths like those of a context with a heavy sink, and one span within 5 %."""
    draw = torch.Generator().manual_seed(seed)
    strengths = 1e-3 * torch.rand(400, generator=draw, dtype=torch.float64)
    strengths[0] = 1e5
    strengths[200:208] = torch.rand(8, generator=draw, dtype=torch.float64) + 1
    strengths[[200, 207]] = 2  # so that spans beside the match are none
    strengths[80:88] = strengths[200:208].flip(0) * 1.049
    return strengths, Span(200, 208), Span(80, 88)


@pytest.mark.parametrize("seed", range(5))
def test_a_span_within_five_percent_is_found_and_its_absence_said(seed: int) -> None:
    strengths, target, match = planted(seed)
    found = find_placebo(strengths, target)
    assert (found.span, found.matched) == (match, True)
    assert found.gap == pytest.approx(0.049, abs=1e-8)
    assert found.strength == pytest.approx(1.049 * found.target, rel=1e-8)
    assert not find_placebo(strengths, target, tolerance=0.048).matched
    none = find_placebo(strengths, target, forbidden=[Span(87, 89)])
    assert none.gap > TOLERANCE
    assert not none.matched
    assert none.span is not None
    assert not none.span.overlaps(Span(87, 89))


def test_no_room_for_a_placebo() -> None:
    found = find_placebo(torch.ones(9), Span(2, 7))
    assert found == Placebo(None, 5.0, 0.0, math.inf, matched=False)
    with pytest.raises(ConfigError, match="after the last"):
        find_placebo(torch.ones(9), Span(2, 10))
