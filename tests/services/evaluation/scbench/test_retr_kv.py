"""Every asked key is in the JSON object once, and its value is nowhere else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.metrics.registry import METRICS

Make = Callable[..., Example]
ASKED = re.compile(r'Key: "(.+)"\nThe value associated with the specified key is: ')


@settings(max_examples=25, deadline=None)
@given(length=st.integers(900, 6000), turns=st.integers(1, 5), seed=st.integers(0, 10**9))
def test_asked_keys_and_values_are_there_once(
    make: Make, length: int, turns: int, seed: int
) -> None:
    example = make("retr_kv", length, turns, seed)
    instruction, _, written = example.context.partition("\n\nJSON data:\n")
    assert instruction == (
        "Extract the value corresponding to the specified key in the JSON object below."
    )
    records = json.loads(written)
    keys = []
    for question, span in zip(example.questions, example.needles, strict=True):
        asked = ASKED.fullmatch(question.text)
        assert asked is not None
        (value,) = question.references
        assert records[asked[1]] == value
        assert example.context.count(asked[1]) == example.context.count(value) == 1
        assert example.context[slice(*span)] == f'"{asked[1]}": "{value}"'
        assert METRICS[question.metric](f'It is "{value}".', question) == 1
        keys.append(asked[1])
    assert len(set(keys)) == turns
    assert len({*records, *records.values()}) == 2 * len(records)
    assert all(UUID(text).version == 4 for text in (*records, *records.values()))


def test_keys_are_asked_for_anywhere_in_the_object(make: Make) -> None:
    depths = [make("retr_kv", 3000, 1, seed).depth for seed in range(40)]
    assert None not in depths
    assert min(depths) < 0.2 < 0.8 < max(depths)
    example = make("retr_kv", 3000, 1, 0)
    keys = list(json.loads(example.context.partition("JSON data:\n")[2]))
    asked = ASKED.fullmatch(example.questions[0].text)
    assert asked is not None
    assert example.depth == keys.index(asked[1]) / (len(keys) - 1)
