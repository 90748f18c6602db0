"""One request's tokens, flat, with the offsets where something may be cut.

Pure functions over pieces; no store, no workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from criticalkv.services.gateway.schemas import MAX_BREAKPOINTS
from criticalkv.services.gateway.transcript import Transcript
from criticalkv.shared.errors import ContextLengthError
from criticalkv.shared.model.chat import ChatTemplate, Message, Part, Piece


@dataclass(frozen=True)
class Answer:
    """An assistant's message in resent history: a stored turn may stand for it."""

    end: int
    """Offset after the template tokens that close it."""
    alias: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """Token ids to run after a base, and where they may be cut.

    Attributes:
        boundaries: offsets at which a breakpoint's node ends, ascending.
        content_starts: offsets at which a content part begins.
        answers: assistant messages, in order; empty when turns cannot be reused.
        begun: how many of the last tokens begin the answer.
    """

    ids: tuple[int, ...]
    boundaries: tuple[int, ...]
    content_starts: tuple[int, ...]
    answers: tuple[Answer, ...] = ()
    begun: int = 0

    def begin(self, answer_ids: Sequence[int]) -> Prompt:
        """Return the prompt with the first tokens of the answer at its end; no place to cut."""
        return replace(self, ids=(*self.ids, *answer_ids), begun=len(answer_ids))

    def cut(self, start: int, pending: int, limit: int) -> int:
        """Return how much of a long suffix goes to prefill.

        Args:
            start: offset at which the suffix begins.
            pending: tokens that precede it.
            limit: most tokens that decode gets.

        Returns:
            Tokens of the suffix (pending included) before the last content part, if
            the rest fits; else all but the last `limit`.
        """
        total = pending + len(self.ids) - start
        parts = [at - start + pending for at in self.content_starts if at >= start]
        fitting = [at for at in parts[-1:] if at > 0 and total - at <= limit]
        return fitting[0] if fitting else max(0, total - limit)


def flatten(
    pieces: Sequence[Piece],
    template: ChatTemplate,
    messages: Sequence[Message] = (),
    transcripts: Sequence[Transcript] = (),
) -> Prompt:
    """Join pieces into a prompt.

    Args:
        pieces: as rendered.
        template: for the tokens that close an answer.
        messages: resent history, if stored turns may stand for its answers.
        transcripts: after each message of the history.
    """
    ids: list[int] = []
    boundaries: list[int] = []
    starts: list[int] = []
    answers: list[Answer] = []
    for i, piece in enumerate(pieces):
        if piece.kind == "content":
            starts.append(len(ids))
        ids += piece.ids
        if piece.breakpoint and len(ids) > (boundaries[-1] if boundaries else 0):
            boundaries.append(len(ids))
        answer = _answer(piece, pieces[i + 1 : i + 2], template, messages, transcripts)
        if answer is not None:
            answers.append(replace(answer, end=len(ids) + answer.end))
    return Prompt(tuple(ids), tuple(boundaries), tuple(starts), tuple(answers))


def _answer(
    piece: Piece,
    following: Sequence[Piece],
    template: ChatTemplate,
    messages: Sequence[Message],
    transcripts: Sequence[Transcript],
) -> Answer | None:
    if piece.message is None or not piece.message < len(transcripts):
        return None
    message, closing = messages[piece.message], template.closing_ids
    last = piece.part == len(message.parts) - 1
    closed = bool(following) and following[0].ids[: len(closing)] == closing
    if message.role != "assistant" or not last or not closed:
        return None
    text = "".join(part.text for part in message.parts)
    return Answer(len(closing), transcripts[piece.message].digest, text)


def add_implicit(
    messages: Sequence[Message], template: ChatTemplate, threshold: int
) -> list[Message]:
    """Mark the end of a long first system or user message as a breakpoint.

    It counts among the four: a request that spent them all gets no fifth. A message
    with a mark of its own has said where its prefix ends.
    """
    marks = sum(part.breakpoint for m in messages for part in m.parts)
    for i, message in enumerate(messages):
        if message.role == "assistant" or marks >= MAX_BREAKPOINTS:
            break
        if any(part.breakpoint for part in message.parts):
            break
        if _is_long(message, template, threshold):
            *parts, end = message.parts
            marked = replace(message, parts=(*parts, Part(end.text, True)))
            return [*messages[:i], marked, *messages[i + 1 :]]
    return list(messages)


def _is_long(message: Message, template: ChatTemplate, threshold: int) -> bool:
    if sum(len(part.text) for part in message.parts) * 4 < threshold:
        return False  # a character is at most four byte tokens
    return sum(len(template.encode_content(part.text)) for part in message.parts) >= threshold


def check_text_size(messages: Sequence[Message], template: ChatTemplate, limit: int) -> None:
    """Refuse, without tokenizing, text that cannot fit whatever its tokens are.

    Raises:
        ContextLengthError: naming the limit.
    """
    chars = sum(len(part.text) for m in messages for part in m.parts)
    # Twice: normalizers may shrink text a little.
    if chars > 2 * limit * template.longest_token:
        raise ContextLengthError(
            f"messages: {chars} characters cannot fit the model's {limit} tokens", param="messages"
        )
