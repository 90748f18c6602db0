"""Each rank has one right answer, the one that sorting gives."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.metrics.registry import METRICS

Make = Callable[..., Example]
ASKED = re.compile(
    r"What is the (.+) number of the list\?\n\n"
    r"You should answer with only one number, no other words\. The \1 number of the list is: "
)
PLACES = {
    **{"largest": -1, "second largest": -2, "third largest": -3},
    **{"smallest": 0, "second smallest": 1, "third smallest": 2},
}


@settings(max_examples=25, deadline=None)
@given(length=st.integers(220, 6000), turns=st.integers(1, 7), seed=st.integers(0, 10**9))
def test_answers_are_those_of_sorting(make: Make, length: int, turns: int, seed: int) -> None:
    example = make("math_find", length, turns, seed)
    numbers = json.loads(example.context)
    assert len(set(numbers)) == len(numbers)
    ranks = []
    for question in example.questions:
        asked = ASKED.fullmatch(question.text)
        assert asked is not None
        ranks.append(asked[1])
        median = statistics.median(numbers)
        right = median if asked[1] == "median" else sorted(numbers)[PLACES[asked[1]]]
        assert question.references == (str(right),)
        assert METRICS[question.metric](f" {right}.", question) == 1
        assert METRICS[question.metric](f" {right + 1}", question) == 0
        assert question.max_tokens >= len(str(right)) + 2  # a space, and an end
    assert len(set(ranks)) == turns


def test_numbers_are_drawn_from_their_whole_range(make: Make) -> None:
    numbers = json.loads(make("math_find", 4000, 1, 0).context)
    assert min(numbers) < 500
    assert max(numbers) > 9500
    assert numbers != sorted(numbers)
