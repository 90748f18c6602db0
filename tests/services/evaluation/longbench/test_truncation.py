"""A prompt that is too long keeps its first and last half, to the token."""

from __future__ import annotations

import pytest
from tiny_models import byte_tokenizer

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.longbench.truncation import fit
from criticalkv.services.evaluation.prompt import first_prompt
from criticalkv.shared.model.chat import ChatTemplate

MAX_TOKENS = 7


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer())


def of(context: str, question: str = "Why? ", prefix: str = "It:") -> Example:
    asked = Question(question, ("x",), "qa_f1", MAX_TOKENS, prefix)
    return Example("musique", "musique-0", context, (asked,))


def needed(chat: ChatTemplate, example: Example) -> int:
    prompt = first_prompt(chat, example, example.questions[0], "context-only")
    return len(prompt.context_ids) + len(prompt.question_ids) + MAX_TOKENS


def letters(count: int) -> str:
    return "".join(chr(ord("A") + i % 26) for i in range(count))


def test_what_fits_stays_whole(chat: ChatTemplate) -> None:
    example = of(letters(200))
    assert fit(chat, example, needed(chat, example)) == (example, 0)


@pytest.mark.parametrize("over", [1, 2, 3, 50, 151])
@pytest.mark.parametrize("size", [200, 201])
def test_the_middle_goes_as_in_longbench(chat: ChatTemplate, size: int, over: int) -> None:
    example = of(letters(size))
    limit = needed(chat, example) - over
    fitting, lost = fit(chat, example, limit)
    # One byte is one token here: LongBench's own rule on the text of the whole prompt.
    whole = example.context + "Why? " + "It:"
    half = (len(whole) - over) // 2
    assert fitting.context + "Why? " + "It:" == whole[:half] + whole[-half:]
    assert needed(chat, fitting) == limit - (len(whole) - over) % 2
    assert lost == len(example.context) - len(fitting.context)
    assert fitting.questions == example.questions


def test_a_question_longer_than_half_is_kept(chat: ChatTemplate) -> None:
    example = of(letters(100), question="?" * 300)
    limit = needed(chat, example) - 90
    fitting, lost = fit(chat, example, limit)
    assert fitting.context == letters(100)[: 100 - lost]
    assert needed(chat, fitting) in (limit, limit - 1)


@pytest.mark.parametrize("limit", [250, 251, 252, 253, 300])
def test_characters_that_are_cut_in_two_still_fit(chat: ChatTemplate, limit: int) -> None:
    example = of("é€😀" * 60)
    fitting, lost = fit(chat, example, limit)
    assert limit - 8 <= needed(chat, fitting) <= limit
    assert lost == needed(chat, example) - needed(chat, fitting)


def test_no_room_for_a_context_is_an_error(chat: ChatTemplate) -> None:
    example = of(letters(100), question="?" * 300)
    with pytest.raises(ValueError, match="320 positions leave no room for a context"):
        fit(chat, example, 320)
