"""Variable tracking: who follows the assignments finds exactly the references."""

from __future__ import annotations

import re

import essays
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from criticalkv.services.evaluation.evidence import evidence
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.ruler.fitting import prompt_tokens
from criticalkv.services.evaluation.ruler.suite import Ruler
from criticalkv.shared.errors import ConfigError

INSTRUCTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
)
NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
ASSIGNMENT = re.compile(r"VAR (\w+) = (?:VAR )?(\w+)")
CHAT = essays.chat("bytes")
FEW = settings(max_examples=10, deadline=None)
seeds = st.integers(0, 10**6)


def one(length: int, seed: int) -> Example:
    (example,) = Ruler(CHAT).examples(["vt"], [length], 1, seed)
    return example


def values_of(text: str) -> dict[str, str]:
    """Every variable's value, in the order of assignment."""
    values: dict[str, str] = {}
    for name, given_ in ASSIGNMENT.findall(text):
        assert name not in values
        values[name] = values.get(given_, given_)
    return values


@FEW
@given(seed=seeds, length=st.integers(1600, 9000))
def test_who_follows_the_chain_finds_the_references(seed: int, length: int) -> None:
    example = one(length, seed)
    (question,) = example.questions
    value = re.fullmatch(
        r"\nQuestion: Find all variables that are assigned the value (\d{5}) in the text above\.",
        question.text,
    )
    assert value
    found = [name for name, v in values_of(example.context).items() if v == value[1]]
    assert tuple(found) == question.references
    assert len(found) == 5
    assert all(re.fullmatch("[A-Z]{5}", name) for name in found)
    assert example.context.count(value[1]) == 1
    assert question.answer_prefix == (
        " Answer: According to the chain(s) of variable assignment in the text above, 5 variables "
        f"are assgined the value {value[1]}, they are: "
    )
    assert (question.metric, question.max_tokens) == ("string_match_all", 30)


@FEW
@given(seed=seeds, length=st.integers(1600, 9000))
def test_the_length_is_within_one_line_of_noise(seed: int, length: int) -> None:
    tokens = prompt_tokens(CHAT, one(length, seed))
    assert length - len(NOISE) - 1 <= tokens <= length


@FEW
@given(seed=seeds)
def test_the_solved_example_is_right_and_has_nothing_of_the_question(seed: int) -> None:
    example = one(4000, seed)
    _, solved, asked = example.context.split(INSTRUCTION)
    text, _, answer = solved.partition("\nQuestion: ")
    value = re.search(r"the value (\d{5}) in the text above\. Answer: ", answer)
    assert value
    assert set(values_of(text).values()) == {value[1]}
    assert answer.endswith(f"they are:  {' '.join(values_of(text))}\n\n\n\n")
    assert len(values_of(text)) == 5
    assert not {*values_of(text)} & {*example.questions[0].references}
    assert set(values_of(asked).values()) != {value[1]}
    assert NOISE + " VAR" in asked or "VAR" in asked.split(NOISE, 1)[0]


def test_the_statements_are_the_needles_and_all_else_is_noise() -> None:
    example = one(6000, 3)
    statements = [example.context[start:end] for start, end in example.needles]
    names = example.questions[0].references
    assert [s.split(" = ")[0] for s in statements] == [f"VAR {name}" for name in names]
    assert [s.split(" = ")[1] for s in statements[1:]] == [f"VAR {name}" for name in names[:-1]]
    rest = example.context.rpartition(INSTRUCTION)[2]
    for statement in statements:
        rest = rest.replace(statement, "")
    assert set(rest.replace(NOISE, "")) == {" "}
    assert len(set(starts := [start for start, _ in example.needles])) == 5
    assert starts == sorted(starts)


def test_distractors_are_as_long_and_hold_no_name() -> None:
    example = one(6000, 3)
    found, solved = evidence(example, CHAT), example.context.rpartition(INSTRUCTION)[0]
    lengths = [[end - start for start, end in spans] for spans in (found.E, found.D)]
    assert lengths[0] == lengths[1]
    ids = CHAT.encode_content(example.context)
    before = found.tokens - len(ids)
    for begin, end in found.D:
        text = CHAT.decode(ids[begin - before : end - before])
        assert begin - before >= len(solved + INSTRUCTION)
        assert not any(name in text for name in example.questions[0].references)
        assert all(end <= a or b <= begin for a, b in found.E)


def test_places_differ_from_example_to_example() -> None:
    examples = list(Ruler(CHAT).examples(["vt"], [5000], 6, 1))
    assert len({example.needles for example in examples}) == 6
    assert len({example.questions[0].references for example in examples}) == 6


def test_as_short_as_it_gets() -> None:
    with pytest.raises(ConfigError, match=r"vt takes at least \d+ tokens, not 1000"):
        one(1000, 0)


def test_the_solved_example_takes_500_tokens_or_half_of_a_short_length() -> None:
    chat = essays.chat("real")
    (short, long) = Ruler(chat).examples(["vt"], [600, 4000], 1, 0)
    heads = [len(chat.encode_content(e.context.rpartition(INSTRUCTION)[0])) for e in (short, long)]
    assert heads[0] <= 300 - 30 < heads[1] <= 500 - 30
