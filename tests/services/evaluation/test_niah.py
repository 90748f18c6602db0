"""The grid of needles: the same needle in the same text, at the depth that was asked for."""

from __future__ import annotations

import re
from pathlib import Path

import essays
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from criticalkv.services.evaluation.niah import DEPTHS, Niah
from criticalkv.shared.errors import ConfigError

CHAT = essays.chat("bytes")
NEEDLE = re.compile(r" ?One of the special magic numbers for ([^:]+) is: (\d{7})\.")


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Niah:
    return Niah(CHAT, essays=essays.write_essays(tmp_path_factory.mktemp("texts") / "essays"))


@given(
    length=st.integers(1200, 4000),
    depth=st.one_of(st.sampled_from(DEPTHS), st.floats(0, 1)),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=50, deadline=None)
def test_the_needle_is_within_a_sentence_of_its_depth(
    grid: Niah, length: int, depth: float, seed: int
) -> None:
    (example,) = grid.examples([length], 1, seed, [depth])
    _, text = example.context.split(" afterwards.\n")
    before, *needle, after = NEEDLE.split(text)
    longest = max(map(len, map(str.encode, essays.sentences())))
    tokens, whole = len(before.encode()), len((before + after).encode())
    assert abs(tokens - depth * whole) <= longest / 2 + 1
    assert example.depth == depth
    assert needle[1] == example.questions[0].references[0]
    assert not before or before.endswith(".") or not after


def test_both_ends_are_reached(grid: Niah) -> None:
    first, last = grid.examples([1500], 1, 0, [0, 1])
    assert NEEDLE.match(first.context.split(" afterwards.\n")[1])
    assert NEEDLE.fullmatch(last.context[last.context.rindex("One of") :])


def test_only_the_depth_differs_along_a_column(grid: Niah) -> None:
    examples = list(grid.examples([1500], 2, 3))
    assert len(examples) == 22
    assert [example.depth for example in examples[::2]] == [i / 10 for i in range(11)]
    texts = {NEEDLE.sub("", e.context).replace("\n ", "\n").strip() for e in examples[::2]}
    assert len(texts) == 1
    assert len({example.questions for example in examples[::2]}) == 1
    assert examples[0].questions != examples[1].questions
    assert len({example.name for example in examples}) == 22
    assert examples[4].name == "niah-1500-0.2-0"


def test_a_cell_is_the_same_alone(grid: Niah) -> None:
    (alone,) = grid.examples([1500], 1, 3, [0.2])
    assert alone == list(grid.examples([1300, 1500], 2, 3))[22 + 4]
    assert alone not in list(grid.examples([1500], 1, 4))


def test_pythons_reference_is_the_default_text() -> None:
    (example,) = Niah(CHAT).examples([1500], 1, 0, [0.5])
    assert NEEDLE.search(example.context)


@pytest.mark.parametrize("depth", [-0.1, 1.5])
def test_a_depth_outside_is_refused(grid: Niah, depth: float) -> None:
    with pytest.raises(ConfigError, match=rf"depth {depth:g} is not from 0 to 1"):
        grid.examples([1500], 1, 0, [0.5, depth])


def test_essays_without_sentences_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no sentences"):
        next(Niah(CHAT, essays=tmp_path).examples([1500], 1, 0))
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"x\.txt is no readable text"):
        next(Niah(CHAT, essays=tmp_path).examples([1500], 1, 0))
