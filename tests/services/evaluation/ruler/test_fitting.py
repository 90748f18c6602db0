"""Fitting finds the most units that fit, however wrong the estimates are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import essays
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.ruler.fitting import TokenCounts, fit, prompt_tokens
from criticalkv.shared.errors import ConfigError

CHAT = essays.chat("bytes")
QUESTION = Question(" Why?", ("x",), "string_match_all", 7, answer_prefix="Because")
FRAME = 19 + len(" Why?Because") + 7  # ChatML, question, prefix and answer


class Units:
    """Texts of given sizes; counts how often an example is made."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.made = sizes, 0

    def example(self, units: int) -> Example:
        self.made += 1
        text = "a" * sum(self.sizes[i % len(self.sizes)] for i in range(units))
        return Example("task", "task-1-0", text, (QUESTION,))

    def most(self, length: int) -> int:
        """As slowly as it goes."""
        return next(n - 1 for n in itertools.count(2) if self.total(n) > length)

    def total(self, units: int) -> int:
        return FRAME + sum(self.sizes[i % len(self.sizes)] for i in range(units))

    def endless(self, wrong: float) -> Iterator[int]:
        """Estimates of all units but the first, at most twice as large as they are."""
        later = itertools.islice(itertools.cycle(self.sizes), 1, None)
        return (max(1, round(wrong * size)) for size in later)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    length=st.integers(100, 4000),
    wrong=st.floats(0.6, 1.9),
)
@settings(max_examples=200, deadline=None)
def test_the_most_that_fits(sizes: list[int], length: int, wrong: float) -> None:
    units = Units(sizes)
    example = fit(units.example, CHAT, length, units.endless(wrong))
    assert len(example.context) + FRAME == units.total(units.most(length)) <= length
    assert prompt_tokens(CHAT, example) == len(example.context) + FRAME


def test_right_estimates_need_few_tries() -> None:
    units = Units([23])
    fit(units.example, CHAT, 30_000, itertools.repeat(23))
    assert units.made <= 3
    units = Units([3, 50, 7, 31])
    fit(units.example, CHAT, 30_000, itertools.repeat(22))
    assert units.made <= 6


@given(count=st.integers(0, 20), wrong=st.floats(0.6, 1.9))
@settings(max_examples=50, deadline=None)
def test_no_more_units_than_there_are(count: int, wrong: float) -> None:
    units = Units([10])
    known = itertools.islice(units.endless(wrong), count)
    assert len(fit(units.example, CHAT, 400, known, least=2).context) == 10 * (count + 2)


def test_too_short_names_the_least_length() -> None:
    units = Units([10])
    least = FRAME + 30
    with pytest.raises(ConfigError, match=f"task takes at least {least} tokens, not {least - 1}"):
        fit(units.example, CHAT, least - 1, units.endless(1), least=3)
    assert len(fit(units.example, CHAT, least, units.endless(1), least=3).context) == 30


def test_pieces_are_counted_with_what_is_before_them() -> None:
    count = TokenCounts(CHAT, "\n")
    assert (count("abc"), count("é"), count("")) == (4, 3, 1)
    assert TokenCounts(CHAT, "")("") == 1
