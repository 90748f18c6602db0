"""Texts to look at: MultiNews rows, or Python's own reference where they are not at hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from criticalkv.services.evaluation.case import Case, context_ids, question_ids
from criticalkv.services.evaluation.news import MIN_TOKENS, news
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate
from criticalkv.shared.python_reference import python_reference

QUESTION = "How does the text go on?"


def texts(chat: ChatTemplate, data: Path | None, count: int, max_tokens: int) -> list[Case]:
    """Return up to `count` contexts of ≤ `max_tokens` tokens, each with question and answer.

    Args:
        chat: of the model.
        data: folder with `multi_news_50.jsonl`; None: $CRITICALKV_DATA.
        count: texts.
        max_tokens: of a context.

    Raises:
        ConfigError: if no text fits.
    """
    rows = (case for case in news(chat, data, max_tokens) if case.answer_ids)
    found = list(islice(rows, count))
    if not found:
        found = list(islice(_reference(chat, max_tokens), count))
    if not found:
        raise ConfigError(
            f"there is no text for contexts of {max_tokens} tokens; news need more than "
            f"{MIN_TOKENS}",
            param="tokens",
        )
    return found


def _reference(chat: ChatTemplate, max_tokens: int) -> Iterator[Case]:
    """Yield parts of the reference; the answer is how each goes on."""
    corpus, size = python_reference(), 8 * max_tokens
    question = tuple(question_ids(chat, QUESTION))
    for number, begin in enumerate(range(0, len(corpus) - size, size)):
        ids = tuple(context_ids(chat, corpus[begin : begin + size]))
        if len(ids) > max_tokens:
            yield Case(f"python-{number}", ids[:max_tokens], question, ids[max_tokens:])
