"""Requests, and what a client sees of each: when its tokens came, and how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError, AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from criticalkv.services.bench.words import Words

MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
TIMEOUT = "timeout"
CONNECTION = "connection"
INCOMPLETE = "incomplete_stream"
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        body: messages, max_tokens and criticalkv.
        context: names the text or answer that it builds on; None = it has no context.
        context_tokens: of the prompt, up to the context's end.
    """

    body: dict[str, Any]
    context: str | None = None
    context_tokens: int = 0


@dataclass(frozen=True)
class Asker:
    """Makes requests.

    Attributes:
        words: texts.
        overhead: tokens of the chat template before a message's text.
        extension: the request's `criticalkv` fields.
    """

    words: Words
    overhead: int
    extension: dict[str, Any]

    def ask(
        self,
        parts: Sequence[str],
        marks: int,
        context_tokens: int,
        output_tokens: int,
    ) -> Ask:
        """Return a request of one message.

        Args:
            parts: its text.
            marks: how many of its leading parts end with a breakpoint.
            context_tokens: words in these parts.
            output_tokens: of the answer, at most.
        """
        before = self.overhead + self.words.extra * marks
        content = [
            {"type": "text", "text": text} | (MARK if at < marks else {})
            for at, text in enumerate(parts)
        ]
        return Ask(
            self.body(content, output_tokens),
            context="".join(parts[:marks]) if marks else None,
            context_tokens=before + context_tokens if marks else 0,
        )

    def body(self, content: Any, output_tokens: int, **extension: str) -> dict[str, Any]:
        """Return the fields of a request with one message."""
        return {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": output_tokens,
            "extra_body": {"criticalkv": {**self.extension, **extension}},
        }


@dataclass
class Record:
    """What became of a request. Times are in seconds.

    Attributes:
        sent_s: since the run began.
        queue_s: between its time to be sent and its being sent.
        is_warm: an earlier request with its context had ended when it was sent.
        ttft_s: to the first text, or to the end of an answer without any; None = neither came.
        itls_s: between one piece of text and the next.
        e2e_s: to the last chunk of a complete answer, usage aside; else to its failure.
        cached_tokens: of the prompt, that were stored.
        error: code; None = the answer is complete.
    """

    ask: Ask
    sent_s: float = 0.0
    queue_s: float = 0.0
    is_warm: bool = False
    ttft_s: float | None = None
    itls_s: list[float] = field(default_factory=list)
    e2e_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    extension: dict[str, Any] = field(default_factory=dict)
    handle: str = ""
    error: str | None = INTERRUPTED

    @property
    def is_hit(self) -> bool:
        """Whether the whole context was stored already."""
        return self.ask.context is not None and self.cached_tokens >= self.ask.context_tokens

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None if there is only one."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


class LoadClient:
    """Sends requests and keeps a record of each, from the moment that it is sent.

    Args:
        openai: without retries: a request is one attempt.
        model: name in the API.
        timeout_s: deadline of each request, from its being sent.
        clock: seconds; the run begins now.
    """

    def __init__(
        self,
        openai: AsyncOpenAI,
        model: str,
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._openai = openai
        self._model = model
        self._timeout_s = timeout_s
        self._clock = clock
        self._began = clock()
        self._stored: set[str] = set()
        self.records: list[Record] = []

    def now(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    async def send(self, ask: Ask, due_s: float | None = None) -> Record:
        """Send a request and read its answer. Its failure is in the record.

        Args:
            due_s: when it was to be sent; None = now.
        """
        sent = self.now()
        record = Record(ask, sent, sent - due_s if due_s is not None else 0.0)
        record.is_warm = ask.context in self._stored
        self.records.append(record)
        try:
            record.error = await self._outcome(record)
        finally:  # also when it is interrupted
            if record.error is not None:
                record.e2e_s = self.now() - sent
        if record.error is None:
            self._stored.update({record.handle} | ({ask.context} if ask.context else set()))
        return record

    async def _outcome(self, record: Record) -> str | None:
        """Return why the request failed, or None."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read(record)
        except (TimeoutError, APITimeoutError):
            return TIMEOUT
        except APIConnectionError:
            return CONNECTION
        except APIStatusError as error:
            return error.code or f"http_{error.status_code}"
        except APIError as error:  # an event of the stream
            return error.code or INCOMPLETE
        except ValueError:  # an event that is no JSON
            return INCOMPLETE
        return None if record.handle and record.ttft_s is not None else INCOMPLETE

    async def _read(self, record: Record) -> None:
        stream = await self._openai.chat.completions.create(
            model=self._model,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **record.ask.body,
        )
        async with stream:
            last: float | None = None
            async for chunk in stream:
                at = self.now() - record.sent_s
                if _has_text(chunk):
                    last = _token_came(record, at, last)
                _note(record, chunk, at)


def _has_text(chunk: ChatCompletionChunk) -> bool:
    return any(choice.delta.content for choice in chunk.choices)


def _token_came(record: Record, at: float, last: float | None) -> float:
    if last is None:
        record.ttft_s = at
    else:
        record.itls_s.append(at - last)
    return at


def _note(record: Record, chunk: ChatCompletionChunk, at: float) -> None:
    """Take what the last chunks tell."""
    if chunk.choices:
        record.e2e_s = at
    if any(choice.finish_reason for choice in chunk.choices) and record.ttft_s is None:
        record.ttft_s = at
    record.extension = getattr(chunk, "criticalkv", None) or record.extension
    if chunk.usage is None:
        return
    record.handle = chunk.id  # the stream is complete
    record.prompt_tokens = chunk.usage.prompt_tokens
    record.output_tokens = chunk.usage.completion_tokens
    details = chunk.usage.prompt_tokens_details
    record.cached_tokens = (details and details.cached_tokens) or 0
