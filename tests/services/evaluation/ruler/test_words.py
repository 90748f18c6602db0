"""Words to count: a counter finds exactly the references."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import essays
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from longest import longest_that_is_made

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.ruler import common_words
from criticalkv.services.evaluation.ruler.common_words import all_words
from criticalkv.services.evaluation.ruler.fitting import prompt_tokens
from criticalkv.services.evaluation.ruler.frequent_words import LEAST, coded_text
from criticalkv.services.evaluation.ruler.suite import Ruler
from criticalkv.shared.errors import ConfigError

LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
ANSWER = (
    "\nQuestion: What are the 10 most common words in the above list?"
    " Answer: The top 10 words that appear most often in the list are: "
)
CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three "
    "most frequently appeared coded words. "
)
CHAT = essays.chat("bytes")
FEW = settings(max_examples=10, deadline=None)
seeds = st.integers(0, 10**6)
kinds = st.sampled_from(essays.KINDS)


def one(task: str, length: int, seed: int, kind: str = "bytes") -> Example:
    (example,) = Ruler(essays.chat(kind)).examples([task], [length], 1, seed)
    return example


def listed(text: str) -> list[str]:
    """The words of a numbered list."""
    numbers, words = zip(*re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", text), strict=True)
    assert [*map(int, numbers)] == list(range(1, len(words) + 1))
    return list(words)


@FEW
@given(seed=seeds, length=st.integers(1000, 9000))
def test_counting_finds_the_common_words(seed: int, length: int) -> None:
    example = one("cwe", length, seed, "real")
    (question,) = example.questions
    counts = Counter(listed(example.context.rpartition(LIST)[2]))
    common, other = (6, 1) if length < 4096 else (30, 3)
    assert {word for word, _ in counts.most_common(10)} == set(question.references)
    assert [counts[word] for word in question.references] == [common] * 10
    assert {n for word, n in counts.items() if word not in question.references} == {other}
    assert question.text + question.answer_prefix + " " == ANSWER
    assert (question.metric, question.max_tokens) == ("string_match_all", 120)


@FEW
@given(seed=seeds, length=st.integers(1000, 9000))
def test_a_list_is_solved_before(seed: int, length: int) -> None:
    example = one("cwe", length, seed, "real")
    _, solved, asked = example.context.split(LIST)
    text, _, answer = solved.partition(ANSWER)
    counts, different = Counter(listed(text)), 20 if length < 4096 else 40
    common, other = (3, 1) if length < 4096 else (10, 3)
    assert [counts[word] for word in listed(answer.removesuffix("\n"))] == [common] * 10
    assert sorted(counts.values()) == [other] * (different - 10) + [common] * 10
    assert not set(counts) & set(listed(asked))


@FEW
@given(seed=seeds, length=st.integers(1000, 9000), kind=kinds)
def test_the_list_is_within_one_word_of_the_length(seed: int, length: int, kind: str) -> None:
    length += 0 if kind == "real" else 7000
    tokens = prompt_tokens(essays.chat(kind), one("cwe", length, seed, kind))
    longest = max(map(len, all_words())) + len(" 1000. ")
    assert length - 3 * longest < tokens <= length


def test_too_short_and_too_long_for_common_words() -> None:
    with pytest.raises(ConfigError, match=r"cwe takes at least \d+ tokens, not 512"):
        one("cwe", 512, 0, "real")
    with pytest.raises(ConfigError, match="more words than there are"):
        one("cwe", 400_000, 0)


def test_words_are_too_few_only_if_another_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    words = tuple(word for word in all_words() if len(word) == 6)[:60]
    monkeypatch.setattr(common_words, "all_words", lambda: words)
    length = longest_that_is_made(lambda length: one("cwe", length, 0), 1500, 4000)
    example = one("cwe", length, 0)
    assert len(set(listed(example.context.rpartition(LIST)[2]))) == 60 - 20
    assert length - prompt_tokens(CHAT, example) == len(" 1000. abcdef") - 1


@pytest.mark.parametrize(("task", "length"), [("cwe", 2000), ("cwe", 5000), ("fwe", 1000)])
def test_what_is_asked_for_is_anywhere_in_the_text(task: str, length: int) -> None:
    example = one(task, length, 1, "real")
    text = example.context.rpartition(LIST)[2]
    half = len(text) // 2
    for word in example.questions[0].references:
        assert word in text[:half]
        assert word in text[half:]


def test_words_are_english_each_once() -> None:
    words = all_words()
    assert len(words) == len(set(words)) > 8000
    assert {"aardvark", "quizzical", "abide"} <= set(words)


@FEW
@given(seed=seeds, length=st.integers(256, 9000))
def test_the_three_most_frequent_coded_words(seed: int, length: int) -> None:
    example = one("fwe", length, seed, "real")
    (question,) = example.questions
    text = example.context.removeprefix(CODED)
    (dots, most), *ranked = Counter(text.split(" ")).most_common()
    assert dots == "..."
    assert tuple(word for word, _ in ranked[:3]) == question.references
    assert most > ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1]
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)
    assert len(ranked) < max(5, length // 50)
    assert question.text == (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
        "three most frequently appeared words in the above coded text?"
    )
    assert question.answer_prefix == (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    assert (question.metric, question.max_tokens) == ("string_match_all", 50)


@FEW
@given(seed=seeds, length=st.integers(1000, 9000))
def test_the_coded_text_is_within_one_step_of_the_length(seed: int, length: int) -> None:
    example = one("fwe", length, seed)
    tokens = prompt_tokens(CHAT, example)
    words = len(example.context.removeprefix(CODED).split())
    # One more in the total, and so many words are added to the text.
    shares = np.arange(1, max(5, length // 50) + 1) ** -2.0 * 6 / np.pi**2
    sizes = [int((total * shares).astype(int).sum()) for total in range(LEAST, length)]
    step = next(b - a for a, b in pairwise(sizes) if a == words < b)
    assert length - step * len(" abcdef") < tokens <= length


def test_ranks_are_as_frequent_as_zipf_says() -> None:
    counts = Counter(coded_text(["a", "b", "c", "d"], 10_000, 0).split())
    assert counts == {"a": 6079, "b": 1519, "c": 675, "d": 379}  # 10000 ÷ k² ÷ 1.6449


def test_from_the_least_total_on_the_fourth_is_more_frequent_than_the_fifth() -> None:
    for total in range(LEAST, 600):
        counts = Counter(coded_text(["...", *"abcd"], total, 0).split())
        assert counts["a"] > counts["b"] > counts["c"] > counts["d"]


def test_the_least_length_of_coded_words_is_said() -> None:
    with pytest.raises(ConfigError, match=r"fwe takes at least \d+ tokens, not 200"):
        one("fwe", 200, 0, "real")


@pytest.mark.parametrize(("task", "length"), [("vt", 2000), ("cwe", 3000), ("fwe", 2000)])
def test_an_example_depends_on_nothing_but_its_order(task: str, length: int) -> None:
    first, _, third = Ruler(CHAT).examples([task], [length], 3, 7)
    assert list(Ruler(CHAT).examples(["fwe", task], [length], 3, 7))[-1] == third
    assert [first] == list(Ruler(CHAT).examples([task], [length], 1, 7))
    assert first.name == f"{task}-{length}-0"
    others = [first, third, one(task, length, 8), one(task, length + 200, 7)]
    assert len({e.context for e in others}) == 4
    assert len({e.questions for e in others}) == 4
