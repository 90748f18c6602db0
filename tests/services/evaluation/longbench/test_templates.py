"""Prompts are LongBench's own, cut where kvpress cuts them."""

from __future__ import annotations

import hashlib

import pytest

from criticalkv.services.evaluation.longbench.suite import TASKS
from criticalkv.services.evaluation.longbench.templates import TEMPLATES
from criticalkv.services.evaluation.metrics.registry import METRICS

# sha256 of the prompt in LongBench's dataset2prompt.json, most tokens of an answer in its
# dataset2maxlen.json, metric in its eval.py.
OFFICIAL = {
    "narrativeqa": ("5178f3835db90239", 128, "qa_f1"),
    "qasper": ("0fbdd123fe7f83d6", 128, "qa_f1"),
    "multifieldqa_en": ("20b4666a2de8a1f7", 64, "qa_f1"),
    "hotpotqa": ("9ec4ae308865bd0c", 32, "qa_f1"),
    "2wikimqa": ("9ec4ae308865bd0c", 32, "qa_f1"),
    "musique": ("9ec4ae308865bd0c", 32, "qa_f1"),
    "gov_report": ("91c25d585b189ced", 512, "rouge_l"),
    "qmsum": ("dca23b678fe0183b", 512, "rouge_l"),
    "multi_news": ("2af3f28c40b902e6", 512, "rouge_l"),
    "trec": ("0eff8bebdba99d91", 64, "classification_first_line"),
    "triviaqa": ("00a802e6377e72fc", 32, "qa_f1_first_line"),
    "samsum": ("a68d884234907eef", 128, "rouge_l_first_line"),
    "passage_count": ("986550b6c61009c6", 32, "count"),
    "passage_retrieval_en": ("39b96b7fa52bdd2a", 32, "retrieval"),
    "lcc": ("6a1f24cf0bb83cd9", 64, "code_similarity"),
    "repobench-p": ("ee9ec182ea5ffeb7", 64, "code_similarity"),
}
QUESTIONS = {
    "narrativeqa": "Question: Q\n\n",
    "qasper": "Question: Q\n\n",
    "multifieldqa_en": "Question: Q\n",
    "hotpotqa": "Question: Q\n",
    "2wikimqa": "Question: Q\n",
    "musique": "Question: Q\n",
    "gov_report": "Now, write a one-page summary of the report.\n\n",
    "qmsum": "Query: Q\n",
    "multi_news": "Now, write a one-page summary of all the news.\n\n",
    "trec": "Q",
    "triviaqa": "Q",
    "samsum": "Q",
    "lcc": "",
    "repobench-p": "Q",
}


def test_all_datasets_are_there() -> None:
    assert list(OFFICIAL) == list(TEMPLATES) == list(TASKS)


@pytest.mark.parametrize("task", OFFICIAL)
def test_the_parts_are_the_official_prompt(task: str) -> None:
    template = TEMPLATES[task]
    whole = "".join(template.render("{context}", "{input}"))
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    assert (digest, template.max_tokens, template.metric) == OFFICIAL[task]
    assert template.metric in METRICS


@pytest.mark.parametrize("task", QUESTIONS)
def test_what_is_asked_after_compression(task: str) -> None:
    assert TEMPLATES[task].render("C", "Q")[1] == QUESTIONS[task]


@pytest.mark.parametrize("task", ["passage_count", "passage_retrieval_en"])
def test_long_instructions_are_asked_after_compression(task: str) -> None:
    context, question, prefix = TEMPLATES[task].render("C", "Q")
    assert "Please enter the" in question
    assert "Please enter" not in context
    assert question.endswith(".\n\n")
    assert prefix in ("The final answer is: ", "The answer is: ")


@pytest.mark.parametrize("task", OFFICIAL)
def test_braces_in_a_row_stay_as_they_are(task: str) -> None:
    context, question, _ = TEMPLATES[task].render("f{input}{context}{0}", "{context} {x}")
    assert context.count("f{input}{context}{0}") == 1
    assert question.count("{context} {x}") == ("{input}" in TEMPLATES[task].question)


@pytest.mark.parametrize(
    ("task", "end"), [("trec", "Type:"), ("triviaqa", "Answer:"), ("samsum", "Summary:")]
)
def test_examples_end_in_the_answers_prefix(task: str, end: str) -> None:
    assert TEMPLATES[task].render("C", f"Why {end}?\n{end}")[1:] == (f"Why {end}?\n", end)
    assert TEMPLATES[task].render("C", "Why?")[1:] == ("Why?", "")
