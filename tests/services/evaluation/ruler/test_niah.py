"""Needle tasks: each needle once and at its depth, the asked length, one answer."""

from __future__ import annotations

import random
import re
from pathlib import Path

import essays
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.ruler import haystack as haystacks
from criticalkv.services.evaluation.ruler import magic
from criticalkv.services.evaluation.ruler.needle import Needles
from criticalkv.services.evaluation.ruler.suite import Ruler
from criticalkv.shared.errors import ConfigError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = re.compile(r"One of the special magic (\w+) for ([^:]+?) is: ([0-9a-f-]+)\.")
SHAPES = {"numbers": r"[1-9]\d{6}", "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f-]{17}"}
# Task: kind of values, keys asked for, values of each, needles that are not asked for (None:
# they are the haystack), and where needles stand.
TASKS = {
    "niah_single_1": ("numbers", 1, 1, 0, "noise"),
    "niah_single_2": ("numbers", 1, 1, 0, "essay"),
    "niah_single_3": ("uuids", 1, 1, 0, "essay"),
    "niah_multikey_1": ("numbers", 1, 1, 3, "essay"),
    "niah_multikey_2": ("numbers", 1, 1, None, "needle"),
    "niah_multikey_3": ("uuids", 1, 1, None, "needle"),
    "niah_multivalue": ("numbers", 1, 4, 0, "essay"),
    "niah_multiquery": ("numbers", 4, 1, 0, "essay"),
}
# RULER: np.round(np.linspace(0, 100, num=40, endpoint=True)).
DEPTHS = [int(d) for d in np.round(np.linspace(0, 100, num=40, endpoint=True))]
BYTE_FRAME = 6 + 2 + 11  # ChatML around one user message, and before the answer
FEW = settings(max_examples=12, deadline=None)

tasks = st.sampled_from(sorted(TASKS))
kinds = st.sampled_from(essays.KINDS)
seeds = st.integers(0, 10**6)


@pytest.fixture(scope="module")
def rulers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ruler]:
    folder = essays.write_essays(tmp_path_factory.mktemp("texts") / "essays")
    return {kind: Ruler(essays.chat(kind), essays=folder) for kind in essays.KINDS}


def one(ruler: Ruler, task: str, length: int, seed: int) -> Example:
    (example,) = ruler.examples([task], [length], 1, seed)
    return example


def asked_keys(example: Example) -> list[str]:
    (question,) = example.questions
    found = re.search(r" for (.+) mentioned in the provided text\?$", question.text)
    assert found
    return re.split(r", and |, ", found[1])


def token_count(kind: str, *texts: str) -> int:
    return sum(len(essays.chat(kind).encode_content(text)) for text in texts)


def whole_length(kind: str, example: Example) -> int:
    """Tokens of prompt and answer, counted piece by piece."""
    (question,) = example.questions
    chat = essays.chat(kind)
    frame = len(chat.encode_template(chat_text(kind)))
    texts = (example.context, question.text, question.answer_prefix)
    return frame + token_count(kind, *texts) + question.max_tokens


def chat_text(kind: str) -> str:
    """What the template puts around a user's text."""
    tokenizer = essays.chat(kind)._tokenizer
    empty = [{"role": "user", "content": ""}]
    return str(tokenizer.apply_chat_template(empty, tokenize=False, add_generation_prompt=True))


@given(task=tasks, kind=kinds, length=st.integers(1700, 3000), seed=seeds)
@settings(max_examples=40, deadline=None)
def test_each_needle_is_there_once_and_no_answer_is_anywhere_else(
    rulers: dict[str, Ruler], task: str, kind: str, length: int, seed: int
) -> None:
    values, keys, each, others, _ = TASKS[task]
    example = one(rulers[kind], task, length, seed)
    context, (question,) = example.context, example.questions
    needles = NEEDLE.findall(context)
    asked = asked_keys(example)
    answers = [value for key in asked for _, k, value in needles if k == key]
    assert len(asked) == keys
    assert sorted(answers) == sorted(question.references)
    assert len(set(answers)) == keys * each
    if others is not None:
        assert len(needles) == keys * each + others
    assert len({value for *_, value in needles}) == len(needles)
    around = question.text + question.answer_prefix
    for key in asked:
        assert context.lower().count(key.lower()) == each
        assert question.text.count(key) == question.answer_prefix.count(key) == 1
    for value in question.references:
        assert re.fullmatch(SHAPES[values], value)
        assert context.count(value) == 1
        assert value not in around
    held = [NEEDLE.fullmatch(context[start:end]) for start, end in example.needles]
    assert [match and match[3] for match in held] == list(question.references)


@given(task=tasks, kind=kinds, length=st.integers(1000, 3000), seed=seeds)
@settings(max_examples=40, deadline=None)
def test_the_length_is_the_asked_one_or_less_by_less_than_a_needle(
    rulers: dict[str, Ruler], task: str, kind: str, length: int, seed: int
) -> None:
    example = one(rulers[kind], task, length, seed)
    needles = [match[0] for match in NEEDLE.finditer(example.context)]
    # A line of noise is the only thing that may be longer than a needle.
    unit = max(token_count(kind, text + "\n") for text in (*needles, *NOISE.split("\n")))
    if TASKS[task][4] != "noise":
        unit = max(token_count(kind, text + "\n") for text in needles)
    assert length - unit < whole_length(kind, example) <= length
    assert example.length == length


def test_the_length_is_of_everything_the_model_sees(rulers: dict[str, Ruler]) -> None:
    example = one(rulers["bytes"], "niah_single_2", 1500, 0)
    (question,) = example.questions
    texts = (example.context, question.text, question.answer_prefix)
    counted = BYTE_FRAME + len("".join(texts).encode()) + 128
    assert 1500 - len("herons ") <= counted <= 1500


@given(task=tasks, length=st.integers(1700, 4000), seed=seeds)
@settings(max_examples=40, deadline=None)
def test_needles_stand_at_rulers_depths(
    rulers: dict[str, Ruler], task: str, length: int, seed: int
) -> None:
    example = one(rulers["bytes"], task, length, seed)
    _, text = example.context.split(" afterwards.\n")
    # The last sentence of an essay may be cut short, before a needle or the end.
    between = r"(?<=\.) | (?=One of the special)" if TASKS[task][4] == "essay" else "\n"
    pieces = re.split(between, text)
    hidden = {match[0] for match in NEEDLE.finditer(text)}
    if TASKS[task][4] == "needle":
        hidden = {example.context[slice(*example.needles[0])]}
    assert all(pieces.count(needle) == 1 for needle in hidden)
    haystack = [piece for piece in pieces if piece not in hidden]
    spots = [
        i - earlier
        for earlier, i in enumerate(i for i, piece in enumerate(pieces) if piece in hidden)
    ]
    if TASKS[task][4] == "essay":
        assert set(spots) <= {len(haystack) * depth // 100 for depth in DEPTHS}
    if example.depth is not None:
        index = pieces.index(example.context[slice(*example.needles[0])])
        before = sum(piece not in hidden for piece in pieces[:index])
        assert before == int(len(haystack) * example.depth)
    assert (example.depth is None) == (len(example.needles) == 4)


def test_every_depth_is_taken(rulers: dict[str, Ruler]) -> None:
    found = rulers["bytes"].examples(["niah_single_2"], [1000], 200, 0)
    depths = {example.depth for example in found}
    assert depths <= {depth / 100 for depth in DEPTHS}
    assert len(depths) > 36


@given(seed=seeds)
@FEW
def test_essays_are_the_users_own_sentences_in_order(rulers: dict[str, Ruler], seed: int) -> None:
    example = one(rulers["bytes"], "niah_multikey_1", 2000, seed)
    _, text = example.context.split(" afterwards.\n")
    plain = re.sub(r" ?" + NEEDLE.pattern, "", text).strip()
    assert plain in " ".join(essays.sentences() * 2)
    assert plain.startswith("Verse ")


@given(task=st.sampled_from(["niah_single_1", "niah_multikey_2"]), seed=seeds)
@FEW
def test_noise_and_needles_are_lines(rulers: dict[str, Ruler], task: str, seed: int) -> None:
    example = one(rulers["bytes"], task, 2000, seed)
    answer = example.context[slice(*example.needles[0])]
    _, *lines = example.context.split("\n")
    lines.remove(answer)
    if task == "niah_single_1":
        assert set(lines) == {NOISE}
    else:
        assert all(NEEDLE.fullmatch(line) for line in lines)
        assert len(set(lines)) == len(lines) > 5


@given(task=tasks, seed=seeds)
@FEW
def test_an_example_depends_on_nothing_but_its_order(
    rulers: dict[str, Ruler], task: str, seed: int
) -> None:
    ruler = rulers["bytes"]
    many = list(ruler.examples(["niah_single_1", task], [1000, 1100], 3, seed))
    assert many[9:11] == list(ruler.examples([task], [1100], 2, seed))
    assert [example.name for example in many[9:]] == [f"{task}-1100-{i}" for i in range(3)]
    other = one(ruler, task, 1100, seed + 1)
    answers = [example.questions[0].references for example in (*many[6:], other)]
    assert len(set(answers)) == 7


@given(task=tasks, kind=kinds, seed=seeds)
@FEW
def test_a_length_that_is_too_short_is_refused_with_the_least(
    rulers: dict[str, Ruler], task: str, kind: str, seed: int
) -> None:
    with pytest.raises(ConfigError, match=rf"{task} takes at least \d+ tokens, not 100") as info:
        one(rulers[kind], task, 100, seed)
    assert info.value.param == "lengths"


def test_the_texts_are_rulers(rulers: dict[str, Ruler]) -> None:
    single = one(rulers["bytes"], "niah_single_3", 1000, 1)
    (key,) = asked_keys(single)
    (question,) = single.questions
    assert single.context.startswith(
        "A special magic uuid is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the uuid afterwards.\n"
    )
    asked = f"the special magic uuid for {key} mentioned in the provided text"
    assert question.text == f"\nWhat is {asked}?"
    assert question.answer_prefix == f" T{asked[1:]} is"
    assert (question.metric, question.max_tokens) == ("string_match_all", 128)
    several = one(rulers["bytes"], "niah_multiquery", 2000, 1)
    keys = "{}, {}, {}, and {}".format(*asked_keys(several))
    (question,) = several.questions
    assert several.context.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the numbers afterwards.\n"
    )
    asked = f"the special magic numbers for {keys} mentioned in the provided text"
    assert question.text == f"\nWhat are all {asked}?"
    assert question.answer_prefix == f" T{asked[1:]} are"


def test_an_unknown_task_is_refused_at_once(rulers: dict[str, Ruler]) -> None:
    with pytest.raises(ConfigError, match="no task niah_9; it has niah_single_1, "):
        rulers["bytes"].examples(["niah_9"], [1000], 1, 0)


@given(seed=seeds)
@settings(max_examples=50, deadline=None)
def test_no_key_is_a_part_of_another(seed: int) -> None:
    lists = {"adjectivelist": ("blue", "Blue", "light-blue", "red"), "nounlist": ("car", "cart")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "criticalkv.services.evaluation.ruler.magic.word_list", lambda name: lists[name]
        )
        needles = Needles(random.Random(seed), "words", "numbers", lambda _: False)
        (hidden,) = needles.hide(1)
        other = next(needles.distract())
    key = NEEDLE.fullmatch(other)
    assert key
    assert hidden.key.lower() not in key[2].lower()
    assert key[2].lower() not in hidden.key.lower()


@given(seed=seeds)
@FEW
def test_what_the_haystack_mentions_is_drawn_again(seed: int) -> None:
    plain = Needles(random.Random(seed), "words", "numbers", lambda _: False)
    (first,) = plain.hide(1)
    wary = Needles(
        random.Random(seed), "words", "numbers", lambda word: word in (first.key, first.value)
    )
    (second,) = wary.hide(1)
    assert second.key != first.key
    assert second.value != first.value


@given(seed=seeds)
@FEW
def test_no_value_is_drawn_twice(seed: int) -> None:
    few = ("1000001", "1000002", "1000003", "1000004")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(magic._MAKERS, "numbers", lambda rng: rng.choice(few))
        hidden = Needles(random.Random(seed), "words", "numbers", lambda _: False).hide(4)
    assert sorted(needle.value for needle in hidden) == list(few)


def test_mentions_are_found_in_any_case(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("Nobody has seen an Able-Bear in 12345678 years or so.")
    haystack = haystacks.essays(own=text)
    assert haystack.mentions("able-bear")
    assert haystack.mentions("1234567")
    assert not haystack.mentions("7654321")
