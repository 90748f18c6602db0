"""A suite with few, short essays, and a tokenizer of bytes: a token is a byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tiny_models import byte_tokenizer

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.prompt import first_prompt
from criticalkv.services.evaluation.rows import Rows
from criticalkv.services.evaluation.scbench.suite import SCBench
from criticalkv.shared.model.chat import ChatTemplate

ESSAYS = "\n".join(f"Heron number {i} waits at dawn. Nobody asks what it sees." for i in range(9))

Make = Callable[..., Example]


@pytest.fixture(scope="session")
def chat() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer())


@pytest.fixture(scope="session")
def make(chat: ChatTemplate, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Make one example, by a suite of its own."""
    data = tmp_path_factory.mktemp("data")
    (data / "inaugural.txt").write_text(ESSAYS)

    def one(task: str, length: int, turns: int, seed: int, number: int = 0) -> Example:
        suite = SCBench(chat, data=data, rows=Rows())
        return list(suite.examples([task], [length], number + 1, turns, seed))[number]

    return one


@pytest.fixture(scope="session")
def used(chat: ChatTemplate) -> Callable[[Example], int]:
    """Count an example's tokens as a model sees them, its longest first answer included."""

    def count(example: Example) -> int:
        question = example.questions[0]
        prompt = first_prompt(chat, example, question, "context-only")
        return len(prompt.context_ids) + len(prompt.question_ids) + question.max_tokens

    return count
