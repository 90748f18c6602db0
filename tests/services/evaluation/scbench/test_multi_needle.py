"""There is one needle for each turn, and each number is nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.metrics.registry import METRICS

Make = Callable[..., Example]
# A key may have a space: "ad hoc" is one of the adjectives.
ASKED = re.compile(r"What is the special magic number for (.+) mentioned in the provided text\?")


@settings(max_examples=15, deadline=None)
@given(length=st.integers(1100, 5000), turns=st.integers(1, 6), seed=st.integers(0, 10**9))
def test_needles_are_hidden_once(make: Make, length: int, turns: int, seed: int) -> None:
    example = make("multi_needle", length, turns, seed)
    context = example.context
    assert context.count("special magic numbers for") == turns
    keys = []
    for question, span in zip(example.questions, example.needles, strict=True):
        asked = ASKED.fullmatch(question.text)
        assert asked is not None
        (number,) = question.references
        needle = f"One of the special magic numbers for {asked[1]} is: {number}."
        assert context[slice(*span)] == needle
        assert context.count(number) == context.count(asked[1]) == 1
        assert asked[1] in question.answer_prefix
        assert METRICS[question.metric](f" {number}.", question) == 1
        keys.append(asked[1])
    assert len(set(keys)) == turns


def test_turns_ask_in_any_order(make: Make) -> None:
    orders = [make("multi_needle", 2500, 4, seed).needles for seed in range(20)]
    assert any(needles != tuple(sorted(needles)) for needles in orders)
    assert any(needles != tuple(sorted(needles, reverse=True)) for needles in orders)
