"""OpenAI's shapes: completions and chunks, built from one stream of reply events.

A live turn and a replayed answer give the same events. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from criticalkv.shared.requests import TokenLogprob


@dataclass(frozen=True)
class Opened:
    """A choice begins; its handle is known."""

    index: int
    handle: str


@dataclass(frozen=True)
class Said:
    """More text of a choice."""

    index: int
    text: str
    logprobs: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Finished:
    """A choice is over and stored, unless its extension says otherwise.

    Attributes:
        at: when it ended, seconds since 1970.
    """

    index: int
    reason: str
    extension: dict[str, Any]
    at: int = field(default_factory=lambda: int(time.time()))


ReplyEvent = Opened | Said | Finished


class Reply(Protocol):
    """An answer on its way. `usage` is complete once the events are exhausted."""

    id: str
    created: int
    model: str
    choices: int

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        ...

    def events(self) -> AsyncGenerator[ReplyEvent, None]:
        """Yield what happens. Closing the generator cancels the turn."""
        ...

    async def aclose(self) -> None:
        """Cancel the turn if it still runs. Idempotent."""
        ...


@dataclass
class Collector:
    """Adds events up to a ChatCompletion."""

    reply: Reply
    wants_logprobs: bool
    _texts: dict[int, list[str]] = field(default_factory=dict)
    _logprobs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    _finished: dict[int, Finished] = field(default_factory=dict)

    def add(self, event: ReplyEvent) -> None:
        """Take one event."""
        if isinstance(event, Said):
            self._texts.setdefault(event.index, []).append(event.text)
            self._logprobs.setdefault(event.index, []).extend(event.logprobs)
        elif isinstance(event, Finished):
            self._finished[event.index] = event

    @property
    def complete(self) -> bool:
        """Whether every choice is finished."""
        return len(self._finished) == self.reply.choices

    def kept(self) -> ChatCompletion:
        """Return the whole answer as `StoredReply` takes it: also when it ended."""
        ended = max(event.at for event in self._finished.values())
        return self.completion().model_copy(update={"completed_at": ended})

    def completion(self) -> ChatCompletion:
        """Return the whole answer."""
        return ChatCompletion.model_validate(
            {
                "id": self.reply.id,
                "object": "chat.completion",
                "created": self.reply.created,
                "model": self.reply.model,
                "choices": [self._choice(i) for i in range(self.reply.choices)],
                "usage": self.reply.usage,
                "criticalkv": self._finished[0].extension,
            }
        )

    def _choice(self, index: int) -> dict[str, Any]:
        content = self._logprobs.get(index, [])
        return {
            "index": index,
            "finish_reason": self._finished[index].reason,
            "logprobs": {"content": content} if self.wants_logprobs else None,
            "message": {"role": "assistant", "content": "".join(self._texts.get(index, []))},
            "criticalkv": self._finished[index].extension,
        }


class StoredReply:
    """A finished answer, given once more."""

    def __init__(self, completion: ChatCompletion) -> None:
        self._completion = completion
        self.id = completion.id
        self.created = completion.created
        self.model = completion.model
        self.choices = len(completion.choices)

    @property
    def usage(self) -> dict[str, Any]:
        """The usage of the first run."""
        return (
            self._completion.usage.model_dump(exclude_unset=True) if self._completion.usage else {}
        )

    async def aclose(self) -> None:
        """Nothing runs."""

    async def events(self) -> AsyncGenerator[ReplyEvent, None]:
        """Yield the answer in one piece per choice."""
        # What an older version kept does not say when it ended.
        at = (self._completion.model_extra or {}).get("completed_at", self.created)
        for choice in self._completion.choices:
            fields = choice.model_dump(exclude_unset=True)
            extension = fields["criticalkv"]
            yield Opened(choice.index, extension["handle"])
            logprobs = (fields.get("logprobs") or {}).get("content") or ()
            yield Said(choice.index, choice.message.content or "", tuple(logprobs))
            yield Finished(choice.index, choice.finish_reason, extension, at)


def chunk(reply: Reply, event: ReplyEvent, *, usage_later: bool) -> ChatCompletionChunk:
    """Return one event as a chunk of a stream."""
    choice: dict[str, Any] = {"index": event.index, "delta": {}, "finish_reason": None}
    fields = _chunk_fields(reply) | ({"usage": None} if usage_later else {})
    if isinstance(event, Opened):
        choice["delta"] = {"role": "assistant", "content": ""}
        choice["criticalkv"] = {"handle": event.handle}
    elif isinstance(event, Said):
        choice["delta"] = {"content": event.text}
        if event.logprobs:
            choice["logprobs"] = {"content": list(event.logprobs)}
    else:
        choice["finish_reason"] = event.reason
        choice["criticalkv"] = fields["criticalkv"] = event.extension
    return ChatCompletionChunk.model_validate({**fields, "choices": [choice]})


def usage_chunk(reply: Reply) -> ChatCompletionChunk:
    """Return the last chunk of a stream with `include_usage`."""
    return ChatCompletionChunk.model_validate(
        {**_chunk_fields(reply), "choices": [], "usage": reply.usage}
    )


def logprob_fields(logprobs: Sequence[TokenLogprob]) -> tuple[dict[str, Any], ...]:
    """Return log probabilities in OpenAI's shape."""
    return tuple(
        {
            **_token(item.token, item.logprob),
            "top_logprobs": [_token(token, value) for token, value in item.top],
        }
        for item in logprobs
    )


def _token(token: str, logprob: float) -> dict[str, Any]:
    # A token that is part of a character has no text of its own; decode spells its bytes.
    part = token.startswith("bytes:\\x")
    raw = bytes.fromhex(token[6:].replace("\\x", "")) if part else token.encode()
    return {"token": token, "logprob": logprob, "bytes": list(raw)}


def _chunk_fields(reply: Reply) -> dict[str, Any]:
    return {
        "id": reply.id,
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": reply.model,
    }
