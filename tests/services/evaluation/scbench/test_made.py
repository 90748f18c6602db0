"""What all made tasks share: lengths, turns, and the same example for the same seed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.prompt import first_prompt, next_ids
from criticalkv.services.evaluation.scbench.suite import MAKERS
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate

Make = Callable[..., Example]
UNITS = {"retr_kv": 80, "math_find": 12, "multi_needle": 9}
"""Most bytes of a pair, of two numbers, of an essay's word; what separates them included."""

tasks = pytest.mark.parametrize("task", MAKERS)
few = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 10**9)


@tasks
@few
@given(length=st.integers(900, 5000), turns=st.integers(1, 5), seed=seeds)
def test_an_example_is_as_long_as_asked_but_for_one_unit(
    make: Make, used: Callable[[Example], int], task: str, length: int, turns: int, seed: int
) -> None:
    example = make(task, length, turns, seed)
    assert 0 <= length - used(example) < UNITS[task]
    assert (example.length, len(example.questions)) == (length, turns)


@tasks
@few
@given(seed=seeds, number=st.integers(0, 2))
def test_an_example_depends_on_its_seed_and_number_alone(
    make: Make, task: str, seed: int, number: int
) -> None:
    example = make(task, 1200, 3, seed, number)
    assert example == make(task, 1200, 3, seed, number)
    assert example.name == f"{task}-1200-{number}"
    others = [make(task, 1200, 3, seed + 1, number), make(task, 1200, 3, seed, number + 1)]
    assert example.context not in {other.context for other in others}


@pytest.mark.parametrize("task", ["retr_kv", "math_find"])
@few
@given(seed=seeds)
def test_more_turns_only_ask_more(make: Make, task: str, seed: int) -> None:
    short, long = make(task, 1500, 2, seed), make(task, 1500, 6, seed)
    assert (short.context, short.questions) == (long.context, long.questions[:2])


@tasks
def test_a_question_reads_right_after_the_context_and_as_a_turn(
    make: Make, chat: ChatTemplate, task: str
) -> None:
    example = make(task, 1500, 2, 0)
    first, later = example.questions
    prompt = first_prompt(chat, example, first, "context-only")
    text = chat.decode((*prompt.context_ids, *prompt.question_ids))
    assert re.search(r"[^\n]\n\n" + re.escape(first.text), text)
    assert "user\n" + later.text in chat.decode(next_ids(chat, later))


@tasks
def test_the_least_length_is_named_and_is_enough(
    make: Make, used: Callable[[Example], int], task: str
) -> None:
    with pytest.raises(ConfigError, match="at least") as refused:
        make(task, 120, 3, 0)
    assert refused.value.param == "lengths"
    named = re.search(r"at least (\d+)", refused.value.message)
    assert named is not None
    least = int(named[1])
    assert used(make(task, least, 3, 0)) <= least
    with pytest.raises(ConfigError, match="at least"):
        make(task, least - 20, 3, 0)


@pytest.mark.parametrize(("task", "turns"), [("math_find", 8), ("multi_needle", 41)])
def test_there_are_only_so_many_turns(make: Make, task: str, turns: int) -> None:
    with pytest.raises(ConfigError, match="no more than") as refused:
        make(task, 5000, turns, 0)
    assert refused.value.param == "turns"


def test_a_seed_is_an_example_on_every_machine(make: Make) -> None:
    pairs, numbers = make("retr_kv", 1500, 1, 0), make("math_find", 1500, 1, 0)
    assert pairs.questions[0].references == ("1be9571f-2820-480f-81bd-68d99bfcaeff",)
    assert numbers.context.startswith("[774, 1049, 867, 1900, 4127, ")
    assert numbers.questions[0].references == ("4938",)
