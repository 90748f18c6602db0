"""Question answering: the right paragraphs once, others until the length is filled."""

from __future__ import annotations

import re
from pathlib import Path

import essays
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from question_files import paragraph, write_hotpot, write_squad

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.ruler.fitting import prompt_tokens
from criticalkv.services.evaluation.ruler.suite import Ruler
from criticalkv.shared.errors import ConfigError

ASK = (
    "Answer the question based on the given documents. Only give me the answer and do not "
    "output any other words."
)
CHAT = essays.chat("bytes")
FEW = settings(max_examples=10, deadline=None)
LONGEST = 260  # bytes of a paragraph below
seeds = st.integers(0, 10**6)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hotpot(write_squad(tmp_path_factory.mktemp("data")))


def one(data: Path, task: str, length: int, seed: int) -> Example:
    (example,) = Ruler(CHAT, data=data).examples([task], [length], 1, seed)
    return example


def documents(example: Example) -> list[str]:
    start = f"{ASK}\n\nThe following are given documents.\n\n"
    assert example.context.startswith(start)
    numbers, texts = zip(
        *re.findall(
            r"(?s)Document (\d+):\n(.*?)(?=\n\nDocument |$)", example.context[len(start) :]
        ),
        strict=True,
    )
    assert [*map(int, numbers)] == list(range(1, len(numbers) + 1))
    return list(texts)


def query(example: Example) -> str:
    (question,) = example.questions
    start = f"\n\n{ASK}\n\nQuestion: "
    assert question.text.startswith(start)
    assert question.answer_prefix == " Answer:"
    assert (question.metric, question.max_tokens) == ("string_match_part", 32)
    return question.text.removeprefix(start)


@FEW
@given(seed=seeds, length=st.integers(1000, 6000))
def test_a_squad_paragraph_among_others(data: Path, seed: int, length: int) -> None:
    example = one(data, "qa_1", length, seed)
    key = re.fullmatch(r"Which code has (\w+)\?", query(example))
    assert key
    found = documents(example)
    assert found.count(paragraph(key[1])) == 1
    assert len(set(found)) == len(found)
    assert example.questions[0].references == (key[1][::-1],)
    assert query(example) not in example.context
    assert [example.context[a:b] for a, b in example.needles] == [paragraph(key[1])]
    assert length - LONGEST < prompt_tokens(CHAT, example) <= length


@FEW
@given(seed=seeds, length=st.integers(1200, 6000))
def test_hotpot_paragraphs_among_others(data: Path, seed: int, length: int) -> None:
    example = one(data, "qa_2", length, seed)
    joined = re.fullmatch(r"What joins (\w+) and (\w+)\?", query(example))
    assert joined
    found = documents(example)
    gold = {f"{title}\n{paragraph(title)}" for title in joined.groups()}
    assert all(found.count(text) == 1 for text in gold)
    assert len(set(found)) == len(found)
    assert {example.context[a:b] for a, b in example.needles} == gold
    assert example.questions[0].references == (joined[1][::-1],)
    assert query(example) not in example.context
    assert length - LONGEST < prompt_tokens(CHAT, example) <= length


def test_documents_of_the_same_article_come_first(data: Path) -> None:
    example = one(data, "qa_1", 2600, 4)
    article = re.findall(r"s(\d+)p", query(example))[0]
    titles = [re.findall(r"code of s(\d+)p", text)[0] for text in documents(example)]
    assert titles.count(article) == 6 < len(titles)


def test_without_supporting_facts_all_documents_of_a_question_are_gold(tmp_path: Path) -> None:
    example = one(write_hotpot(tmp_path, facts=False), "qa_2", 2800, 1)
    number = re.findall(r"h(\d)t", query(example))[0]
    assert len(example.needles) == 6
    texts = {f"h{number}t{t}\n{paragraph(f'h{number}t{t}')}" for t in range(6)}
    assert texts < set(documents(example))


def test_the_right_document_stands_anywhere(data: Path) -> None:
    examples = list(Ruler(CHAT, data=data).examples(["qa_1"], [3000], 20, 0))
    places = {
        documents(example).index(example.context[slice(*example.needles[0])])
        for example in examples
    }
    assert len(places) > 5


def test_every_question_once_the_same_each_time(data: Path) -> None:
    examples = list(Ruler(CHAT, data=data).examples(["qa_1"], [2000], 48, 3))
    assert len({query(example) for example in examples}) == 48
    assert list(Ruler(CHAT, data=data).examples(["qa_1"], [2000], 48, 3)) == examples
    last = list(Ruler(CHAT, data=data).examples(["qa_2", "qa_1"], [2000], 2, 3))[-1]
    assert last == examples[1]
    with pytest.raises(ConfigError, match=r"qa_1: 48 questions of squad\.json fit into 2000"):
        list(Ruler(CHAT, data=data).examples(["qa_1"], [2000], 49, 3))


def test_questions_whose_paragraphs_are_too_long_are_left_out(data: Path) -> None:
    examples = Ruler(CHAT, data=data).examples(["qa_1"], [530], 48, 0)
    found = [next(examples) for _ in range(10)]
    assert all(prompt_tokens(CHAT, example) <= 530 for example in found)
    assert len({query(example) for example in found}) == 10
    with pytest.raises(ConfigError, match=r"fit into 530 tokens; the shortest other takes \d{3}"):
        list(examples)


def test_a_file_with_too_few_documents(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"squad\.json has too few documents for 30000 tokens"):
        one(data, "qa_1", 30_000, 0)


@pytest.mark.parametrize(
    ("task", "names"),
    [("qa_1", r"squad\.json or xquad_en\.json"), ("qa_2", r"hotpotqa\.json or hotpotqa_100\.json")],
)
def test_a_missing_file_is_named(
    task: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"{task} needs {names} in the folder"):
        one(tmp_path, task, 2000, 0)
    monkeypatch.delenv("CRITICALKV_DATA", raising=False)
    with pytest.raises(ConfigError, match="--data or CRITICALKV_DATA"):
        list(Ruler(CHAT).examples([task], [2000], 1, 0))


@pytest.mark.parametrize("content", ["[]", "{", '{"data": [{"paragraphs": [{}]}]}', '{"data": 3}'])
def test_a_file_of_another_format(content: str, tmp_path: Path) -> None:
    (tmp_path / "squad.json").write_text(content)
    with pytest.raises(ConfigError, match=r"squad\.json is not in squad's format"):
        one(tmp_path, "qa_1", 2000, 0)


def test_the_second_name_is_read_too(data: Path, tmp_path: Path) -> None:
    (tmp_path / "xquad_en.json").write_bytes((data / "squad.json").read_bytes())
    assert one(tmp_path, "qa_1", 2000, 0) == one(data, "qa_1", 2000, 0)
