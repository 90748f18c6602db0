"""Whether examples fit the model's positions, before any of them is asked."""

from __future__ import annotations

from criticalkv.services.evaluation.answer import History
from criticalkv.services.evaluation.asking import rounds
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.prompt import Setting
from criticalkv.shared.errors import ContextLengthError
from criticalkv.shared.model.chat import ChatTemplate


def check_fits(
    chat: ChatTemplate, example: Example, max_positions: int, setting: Setting, history: History
) -> None:
    """Refuse an example that may not fit, its longest answers included.

    Raises:
        ContextLengthError: naming it.
    """
    needed = max(
        len(part.context_ids) + sum(len(s.token_ids) + s.question.max_tokens for s in steps)
        for part in rounds(chat, example, setting, history)
        for steps in part.conversations
    )
    if needed > max_positions:
        raise ContextLengthError(
            f"{example.name} may take {needed} tokens, context, questions and answers; the model "
            f"has {max_positions} positions",
            param="lengths",
        )
