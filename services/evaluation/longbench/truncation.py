"""Prompts longer than a model lose the middle of their context (LongBench, pred.py).

Their start says what to do and their end what is asked.
"""

from __future__ import annotations

from dataclasses import replace

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.ruler.fitting import prompt_tokens
from criticalkv.shared.model.chat import ChatTemplate


def fit(chat: ChatTemplate, example: Example, max_positions: int) -> tuple[Example, int]:
    """Keep the first and the last half of a prompt's tokens, at most what the model takes.

    Chat template and answer are counted first: what they leave is halved. The question and
    the answer's prefix belong to the last half and are kept.

    Args:
        example: with one question.
        max_positions: of the model: context, question and answer.

    Returns:
        The example that fits, and how many tokens its context lost.

    Raises:
        ValueError: if there is no room for any context.
    """
    over = prompt_tokens(chat, example) - max_positions
    if over <= 0:
        return example, 0
    ids = chat.encode_content(example.context)
    head, tail = _halves(len(ids), _asked(chat, example.questions[0]), over)
    if head <= 0:
        raise ValueError(f"the model's {max_positions} positions leave no room for a context")
    text, kept = _without_middle(chat, ids, head, tail)
    return replace(example, context=text), len(ids) - kept


def _asked(chat: ChatTemplate, question: Question) -> int:
    """Return the tokens of a question and of its answer's prefix, without the template."""
    return sum(len(chat.encode_content(t)) for t in (question.text, question.answer_prefix))


def _halves(context: int, asked: int, over: int) -> tuple[int, int]:
    """Return how many first and last tokens of a context stay if a prompt loses `over`."""
    half = (context + asked - over) // 2
    tail = max(0, half - asked)
    return 2 * half - asked - tail, tail


def _without_middle(chat: ChatTemplate, ids: list[int], head: int, tail: int) -> tuple[str, int]:
    """Return the text of the first and last tokens, and its tokens: `head + tail` at most.

    A text that was cut may take more tokens than it had: then fewer of them are kept.
    """
    room = head + tail
    while True:
        text = chat.decode(ids[:head]) + chat.decode(ids[len(ids) - tail :])
        count = len(chat.encode_content(text))
        if count <= room:
            return text, count
        less = min(head, count - room)
        head, tail = head - less, max(0, tail - (count - room - less))
