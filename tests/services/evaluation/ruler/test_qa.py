"""Question answering: the right paragraphs once, others until the length is filled."""

from __future__ import annotations

import gc
import json
import operator
import re
from functools import reduce
from pathlib import Path
from typing import Any

import essays
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from longest import longest_that_is_made
from question_files import paragraph, write_hotpot, write_squad

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.ruler import qa, suite
from criticalkv.services.evaluation.ruler.corpus import Asked, Corpus
from criticalkv.services.evaluation.ruler.fitting import prompt_tokens
from criticalkv.services.evaluation.ruler.order import Order
from criticalkv.services.evaluation.ruler.qa import Text
from criticalkv.services.evaluation.ruler.sources import Sources
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
    ruler = Ruler(CHAT, data=data)
    found = list(ruler.examples(["qa_1"], [530], 10, 0))
    assert all(prompt_tokens(CHAT, example) <= 530 for example in found)
    assert len({query(example) for example in found}) == 10
    with pytest.raises(ConfigError, match=r"fit into 530 tokens; the shortest other takes \d{3}"):
        ruler.examples(["qa_1"], [530], 48, 0)


def test_only_questions_that_fit_get_other_documents_and_none_are_kept(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, draw = list[str](), Text.draw

    def counted(corpus: Corpus, asked: Asked, seed: str) -> Text:
        drawn.append(asked.query)
        return draw(corpus, asked, seed)

    monkeypatch.setattr(Text, "draw", counted)
    monkeypatch.setattr(qa, "SWAY", -1)  # a byte is a byte anywhere
    examples = list(Ruler(CHAT, data=data).examples(["qa_1"], [530], 10, 0))
    assert sorted(drawn) == sorted(map(query, examples))
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is Text]


def test_the_order_of_a_questions_documents_may_decide_whether_it_fits(tmp_path: Path) -> None:
    chat = essays.chat("real")
    rows = [
        {"question": f"q{n}", "answer": "d", "context": [["a", ["b "]], ["c", ["d"]]]}
        for n in range(10, 22)
    ]
    other = {**rows[0], "context": [[f"t{i}", ["three " * 40]] for i in range(9)]}
    (tmp_path / "hotpotqa.json").write_text(json.dumps([*rows, other]))
    ruler = Ruler(chat, data=tmp_path)
    (whole,) = ruler.examples(["qa_2"], [180], 1, 0)
    most = prompt_tokens(chat, whole)
    # A space at a text's end is a token of its own; before a line's end it is none.
    with pytest.raises(ConfigError) as refused:
        list(ruler.examples(["qa_2"], [most - 1], 12, 0))
    found = re.search(rf"(\d+) questions .* the shortest other takes {most}", str(refused.value))
    assert found
    assert 0 < int(found[1]) < 12
    examples = list(ruler.examples(["qa_2"], [most - 1], int(found[1]), 0))
    assert {prompt_tokens(chat, example) for example in examples} == {most - 1}


def test_documents_are_too_few_only_if_another_would_fit(tmp_path: Path) -> None:
    write_squad(tmp_path, articles=1)
    length = longest_that_is_made(lambda length: one(tmp_path, "qa_1", length, 0), 1000, 5000)
    example = one(tmp_path, "qa_1", length, 0)
    assert len(documents(example)) == 6
    assert length - prompt_tokens(CHAT, example) == 149


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


SQUAD = {
    "data": [
        {"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": [{"text": "a"}]}]}]}
    ]
}
HOTPOT = [{"question": "q", "answer": "a", "context": [["t", ["s"]]]}]


def changed(whole: Any, path: str, value: Any) -> str:
    """The JSON text of what has another value at a path, such as "data.0.paragraphs"."""
    copy = json.loads(json.dumps(whole))
    *before, last = (int(step) if step.isdigit() else step for step in path.split("."))
    reduce(operator.getitem, before, copy)[last] = value
    return json.dumps(copy)


PLACES = ("data.0.paragraphs.0", "data.0.paragraphs.0.qas.0")


BROKEN = [
    ("qa_1", "[]", "Input should be an object"),
    ("qa_1", "{", "Invalid JSON"),
    ("qa_1", "[" * 100_000, "recursion limit"),
    ("qa_1", '{"data": [{"paragraphs": [{}]}]}', "data.0.paragraphs.0.context: Field required"),
    (
        "qa_1",
        changed(SQUAD, f"{PLACES[0]}.context", 7),
        "context: Input should be a valid string",
    ),
    (
        "qa_1",
        changed(SQUAD, f"{PLACES[1]}.question", None),
        "question: Input should be a valid",
    ),
    (
        "qa_1",
        changed(SQUAD, f"{PLACES[1]}.answers.0.text", ""),
        "text: String should have at least",
    ),
    ("qa_1", changed(SQUAD, f"{PLACES[1]}.question", "\ud800"), "hex escape"),
    ("qa_2", changed(HOTPOT, "0.answer", ""), "0.answer: String should have at least 1"),
    ("qa_2", changed(HOTPOT, "0.context", []), "0.context: List should have at least 1"),
    ("qa_2", changed(HOTPOT, "0.context.0.1", "s"), "0.context.0.1: Input should be a valid"),
    (
        "qa_2",
        changed(HOTPOT, "0.supporting_facts", [["other", 0]]),
        "0.supporting_facts: none is of the question's documents",
    ),
]


@pytest.mark.parametrize(("task", "content", "said"), BROKEN, ids=[row[-1] for row in BROKEN])
def test_a_file_of_another_format(task: str, content: str, said: str, tmp_path: Path) -> None:
    name = {"qa_1": "squad", "qa_2": "hotpot"}[task]
    (tmp_path / {"qa_1": "squad.json", "qa_2": "hotpotqa.json"}[task]).write_text(content)
    with pytest.raises(ConfigError, match=rf"\.json is not in {name}'s format: ") as refused:
        one(tmp_path, task, 2000, 0)
    assert said in refused.value.message


def test_the_second_name_is_read_too(data: Path, tmp_path: Path) -> None:
    (tmp_path / "xquad_en.json").write_bytes((data / "squad.json").read_bytes())
    assert one(tmp_path, "qa_1", 2000, 0) == one(data, "qa_1", 2000, 0)


@pytest.mark.parametrize(
    ("task", "length", "message", "others"),
    [
        ("qa_2", 2000, r"qa_2 needs hotpotqa\.json", 0),
        ("qa_1", 530, "questions of squad", 1),
        ("vt", 530, "vt takes at least", 1),
    ],
)
def test_what_cannot_be_made_is_refused_before_the_others_are(
    task: str,
    length: int,
    message: str,
    others: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def noted(_: Sources, order: Order) -> Example:
        made.append(order.number)
        return Example(order.task, order.name, "", ())

    monkeypatch.setitem(suite.TASKS, "niah_single_1", noted)
    ruler = Ruler(CHAT, data=write_squad(tmp_path))
    with pytest.raises(ConfigError, match=message):
        ruler.examples(["niah_single_1", task], [length], 48, 0)
    assert len(made) == others  # at most one, to see whether it can be made itself


def test_what_is_possible_of_all_tasks(tmp_path: Path) -> None:
    told: list[str] = []
    ruler = Ruler(CHAT, data=write_squad(tmp_path), essays=essays.write_essays(tmp_path / "own"))
    found = list(ruler.possible([300, 2600], 3, 7, told.append))
    places = dict.fromkeys((example.task, example.length) for example in found)
    assert len(found) == 3 * len(places)
    assert ("qa_1", 300) not in places
    assert [place for place in places if place[1] == 2600] == [
        (task, 2600) for task in suite.TASKS if task != "qa_2"
    ]
    assert found == [
        example for task, length in places for example in ruler.examples([task], [length], 3, 7)
    ]
    left_out = [tuple(line.split(": ")[0].split()[2:5:2]) for line in told]
    assert {*left_out} == {(t, str(n)) for t in suite.TASKS for n in (300, 2600)} - {
        (task, str(length)) for task, length in places
    }
    assert len(told) == len(left_out) == len(set(left_out))
    assert any(
        line.startswith("left out, qa_2 of 2600 tokens: qa_2 needs hotpotqa") for line in told
    )


def test_what_is_wrong_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "squad.json").write_text("{")
    with pytest.raises(ConfigError, match="not in squad's format"):
        list(Ruler(CHAT, data=tmp_path).possible([3000], 1, 0, print))
    with pytest.raises(ConfigError, match="is no folder"):
        list(Ruler(CHAT, data=tmp_path / "none").possible([3000], 1, 0, print))
