"""Evidence: the needles' tokens hold the answers, their distractors' tokens hold none."""

from __future__ import annotations

import json
from pathlib import Path

import essays
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from criticalkv.services.evaluation.distractors import Stretches
from criticalkv.services.evaluation.evidence import Evidence, evidence, write_evidence
from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.prompt import first_prompt
from criticalkv.services.evaluation.rows import Rows
from criticalkv.services.evaluation.ruler.suite import Ruler
from criticalkv.services.evaluation.scbench.suite import SCBench
from criticalkv.services.evaluation.token_spans import TokenSpans

TASKS = [f"niah_{kind}" for kind in ("single_1", "single_2", "single_3", "multivalue")] + [
    f"niah_{kind}" for kind in ("multikey_1", "multikey_2", "multikey_3", "multiquery")
]
kinds = st.sampled_from(essays.KINDS)


@pytest.fixture(scope="module")
def rulers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ruler]:
    folder = essays.write_essays(tmp_path_factory.mktemp("texts") / "essays")
    return {kind: Ruler(essays.chat(kind), essays=folder) for kind in essays.KINDS}


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


@given(
    task=st.sampled_from(TASKS),
    kind=kinds,
    length=st.integers(1700, 3000),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_needles_tokens_hold_the_values_and_distractors_none(
    rulers: dict[str, Ruler], task: str, kind: str, length: int, seed: int
) -> None:
    chat = essays.chat(kind)
    (example,) = rulers[kind].examples([task], [length], 1, seed)
    found = evidence(example, chat)
    ids = first_prompt(chat, example, example.questions[0], "context-only").context_ids
    assert found.tokens == len(ids)
    assert found.values == example.questions[0].references
    assert len(found.E) == len(found.D) == len(found.values) in (1, 4)
    for (start, end), (first, last), value in zip(found.E, found.D, found.values, strict=True):
        held = chat.decode(ids[start:end]).strip()
        assert held.startswith("One of the special magic ")
        assert held.endswith(f" is: {value}.")
        assert last - first == end - start
        assert not any(value in chat.decode(ids[first:last]) for value in found.values)
    spans = [*found.E, *found.D]
    assert not any(overlap(one, two) for i, one in enumerate(spans) for two in spans[:i])
    instruction, _, haystack = example.context.partition("afterwards.\n")
    assert example.haystack is not None
    assert example.context[slice(*example.haystack)] == haystack
    texts = [chat.decode(ids[first:last]) for first, last in found.D]
    assert not any(text in instruction for text in texts)
    if task != "niah_multikey_2" and task != "niah_multikey_3":
        assert not any(" is: " in text for text in texts)


@given(kind=kinds, seed=st.integers(0, 10**6), task=st.sampled_from(TASKS[:3]))
@settings(max_examples=20, deadline=None)
def test_one_needles_distractor_touches_it(
    rulers: dict[str, Ruler], kind: str, seed: int, task: str
) -> None:
    (example,) = rulers[kind].examples([task], [2000], 1, seed)
    found = evidence(example, essays.chat(kind))
    ((start, end),), ((first, last),) = found.E, found.D
    # No nearer place is free; a boundary within one character may cost a few bytes.
    assert min(abs(last - start), abs(first - end)) <= 3


@given(text=st.text(max_size=60), kind=kinds, data=st.data())
@settings(max_examples=150, deadline=None)
def test_covering_tokens_are_those_with_a_character(
    text: str, kind: str, data: st.DataObject
) -> None:
    chat = essays.chat(kind)
    text = f"ab{text}c"
    spans, offsets = TokenSpans(chat, text), chat.content_offsets(text)
    assert len(offsets) == len(chat.encode_content(text)) == spans.count
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    covering = [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
    if not covering:  # the real model has no token for some control characters
        assert len(range(*spans.covering((start, end)))) == 0
        return
    assert spans.covering((start, end)) == (covering[0], covering[-1] + 1)
    reached = spans.characters((covering[0], covering[-1] + 1))
    assert reached == (offsets[covering[0]][0], offsets[covering[-1]][1])


def test_a_distractor_with_an_answer_is_passed_over() -> None:
    context = "x" * 20 + "NEEDLE" + "..7..." + "y" * 6 + "z" * 20
    spans = TokenSpans(essays.chat("bytes"), context)
    stretches = Stretches(spans, context, (22, len(context)), ("7",))
    assert stretches.like([(20, 26)]) == ((29, 35),)
    assert stretches.like([(20, 26)], avoid=[(30, 40)]) == ((40, 46),)
    assert stretches.like([(20, 26)], avoid=[(26, 58)]) == ()


def test_distractors_of_adjacent_needles_are_apart() -> None:
    context = "x" * 20 + "n" * 12 + "z" * 30
    spans = TokenSpans(essays.chat("bytes"), context)
    stretches = Stretches(spans, context, (22, len(context)), ("n",))
    assert stretches.like([(20, 26), (26, 32)]) == ((32, 38), (38, 44))


def test_a_distractor_is_as_near_as_there_is_one() -> None:
    chat = essays.chat("bytes")
    question = Question("?", ("42",), "string_match_all", 4)
    example = Example("vt", "vt-0", "aaaa It is 42. bbbbbbbbbbbb", (question,), needles=((5, 14),))
    found = evidence(example, chat)
    assert found == Evidence("vt-0", "vt", 6 + 27, ((11, 20),), ((20, 29),), ("42",))
    ids = first_prompt(chat, example, question, "context-only").context_ids
    assert chat.decode(ids[11:20]) == "It is 42."


def test_distractors_are_of_the_haystack_and_of_no_decoy() -> None:
    chat = essays.chat("bytes")
    question = Question("?", ("42",), "string_match_all", 4)
    context = "Find it now! It is 42. It is 43. bbbbbbbbbbbb"
    spans = {"needles": ((13, 22),), "decoys": ((23, 32),), "haystack": (13, len(context))}
    found = evidence(Example("vt", "vt-0", context, (question,), **spans), chat)
    assert (found.E, found.D) == (((19, 28),), ((38, 47),))


def test_no_token_of_a_distractor_is_of_the_instruction_too() -> None:
    context = "one two three four five"
    spans = TokenSpans(essays.chat("real"), context)
    (_, start), needle, after = (spans.characters((i, i + 1)) for i in (1, 2, 3))
    # The haystack begins inside of the token before the needle, which is none of its tokens.
    assert context[start - 2 : start] == "wo"
    assert Stretches(spans, context, (start - 1, len(context)), ("x",)).like([needle]) == (after,)


@pytest.mark.parametrize("task", ["retr_kv", "multi_needle"])
def test_turns_have_evidence_in_their_haystack(task: str, tmp_path: Path) -> None:
    chat = essays.chat("real")
    essays.write_essays(tmp_path)
    (tmp_path / "a.txt").rename(tmp_path / "inaugural.txt")
    made = SCBench(chat, data=tmp_path, rows=Rows())
    (example,) = made.examples([task], [1500], 1, 4, 0)
    found, spans = evidence(example, chat), TokenSpans(chat, example.context)
    assert len(found.E) == len(found.D) == len(found.values) == 4
    assert not example.decoys
    assert example.haystack is not None
    begins = {"retr_kv": '"', "multi_needle": "Verse"}[task]
    assert example.context[example.haystack[0] :].startswith(begins)
    for first, last in found.D:
        start, end = spans.characters(
            (first - found.tokens + spans.count, last - found.tokens + spans.count)
        )
        assert example.haystack[0] <= start < end <= example.haystack[1]
        assert not any(value in example.context[start:end] for value in found.values)


def test_tasks_without_needles_are_named(tmp_path: Path) -> None:
    chat, told = essays.chat("bytes"), list[str]()
    examples = list(Ruler(chat).examples(["fwe", "vt"], [2000], 2, 0))
    write_evidence(tmp_path / "e", examples, chat, told.append)
    rows = [json.loads(line) for line in (tmp_path / "e").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["vt-2000-0", "vt-2000-1"]
    assert [line.partition(":")[0] for line in told] == ["no evidence of fwe"]


def test_the_file_has_a_line_for_each_example(rulers: dict[str, Ruler], tmp_path: Path) -> None:
    chat = essays.chat("real")
    examples = list(rulers["real"].examples(["niah_single_2", "niah_multivalue"], [1000], 2, 0))
    write_evidence(tmp_path / "new" / "evidence.jsonl", iter(examples), chat, pytest.fail)
    lines = (tmp_path / "new" / "evidence.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["name"] for row in rows] == [example.name for example in examples]
    for row, example in zip(rows, examples, strict=True):
        expected = evidence(example, chat)
        assert set(row) == {"name", "task", "tokens", "E", "D", "values"}
        assert row["E"] == [list(span) for span in expected.E]
        assert row["D"] == [list(span) for span in expected.D]
        assert (row["task"], row["tokens"]) == (example.task, expected.tokens)
        assert row["values"] == list(example.questions[0].references)


def test_values_are_those_of_every_question() -> None:
    chat = essays.chat("bytes")
    first, second = (Question(f"{n}?", (f"4{n}",), "kv_match", 4) for n in (1, 2))
    text = "aaaa It is 41. bbbbbbbbbbbb It is 42. cccccccccccc"
    needles = ((5, 14), (28, 37))
    found = evidence(Example("kv", "kv-0", text, (first, second), needles=needles), chat)
    assert found.values == ("41", "42")
    assert len(found.E) == 2
