"""OpenAI's shapes of responses: the object and its events, built from reply events.

Knows nothing of HTTP. A response has one choice, hence one output item with one part.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from openai.types.responses import Response

from criticalkv.services.gateway.answer import Finished, Reply, Said
from criticalkv.services.gateway.response_schemas import ResponseRequest
from criticalkv.services.gateway.stream import told
from criticalkv.shared.errors import CriticalKVError, InvalidRequestError, OverloadedError

# Of a turn's end → the response's status and why it is incomplete.
_ENDS: dict[str, tuple[str, dict[str, str] | None]] = {
    "stop": ("completed", None),
    "length": ("incomplete", {"reason": "max_output_tokens"}),
}


def echo(request: ResponseRequest) -> dict[str, Any]:
    """Return what a response repeats of its request."""
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": True,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "safety_identifier": request.safety_identifier,
        "store": request.store,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def usage_fields(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage of a chat completion as a response's."""
    details = usage["prompt_tokens_details"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": details["cached_tokens"],
            "cache_write_tokens": details["cache_write_tokens"],
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def finished_fields(
    handle: str, text: str, reason: str, at: int, usage: dict[str, Any]
) -> dict[str, Any]:
    """Return what an ended response has more than one in progress.

    Args:
        handle: the response's id.
        text: of the answer.
        reason: why the turn ended.
        at: when, seconds since 1970.
        usage: of a chat completion.
    """
    status, details = _ENDS[reason]
    done = {} if details else {"completed_at": at}
    return {
        **done,
        "status": status,
        "incomplete_details": details,
        "output": [_item(handle, status, [_part(text)])],
        "usage": usage_fields(usage),
    }


@dataclass
class Shape:
    """Turns one reply into a response's object and events."""

    reply: Reply
    asked: dict[str, Any]
    _texts: list[str] = field(default_factory=list)
    _sequence: int = 0

    async def response(self) -> str:
        """Wait for the whole response; return it as JSON."""
        async with aclosing(self.reply.events()) as events:
            async for event in events:
                if isinstance(event, Said):
                    self._texts.append(event.text)
                elif isinstance(event, Finished):
                    ended = event
        return json.dumps(self._finished(ended), allow_nan=False)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the stream: it ends with the response, or with an error event."""
        for line in self._opening():
            yield line
        try:
            async with aclosing(self.reply.events()) as events:
                async for event in events:
                    if isinstance(event, Said):
                        yield self._delta(event.text)
                    elif isinstance(event, Finished):
                        for line in self._closing(event):
                            yield line
        except Exception as error:
            for line in self._failing(told(error)):
                yield line

    def _opening(self) -> Iterator[bytes]:
        started = self._object(status="in_progress", output=[])
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        item = _item(self.reply.id, "in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place(), part=_part(""))

    def _delta(self, text: str) -> bytes:
        self._texts.append(text)
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def _closing(self, ended: Finished) -> Iterator[bytes]:
        response = self._finished(ended)
        item, text = response["output"][0], "".join(self._texts)
        yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def _failing(self, error: CriticalKVError) -> Iterator[bytes]:
        """Tell it twice: in the response, and so that clients raise it."""
        fields = {
            "code": _code(error),
            "message": error.message,
            "param": error.param,
            "type": error.kind,
        }
        output = [_item(self.reply.id, "incomplete", [_part("".join(self._texts))])]
        failed = self._object(status="failed", error=fields, output=output)
        yield self._event("response.failed", response=failed)
        yield error_event(error, self._sequence)

    def _finished(self, ended: Finished) -> dict[str, Any]:
        text = "".join(self._texts)
        fields = finished_fields(self.reply.id, text, ended.reason, ended.at, self.reply.usage)
        return self._object(**fields, criticalkv=ended.extension)

    def _object(self, **fields: Any) -> dict[str, Any]:
        return object_fields(
            self.reply.id, self.reply.created, self.reply.model, {**self.asked, **fields}
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": _item_id(self.reply.id), "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        line = event_line(kind, self._sequence, fields)
        self._sequence += 1
        return line


def object_fields(handle: str, created: int, model: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a response's object, checked against OpenAI's types."""
    head = {"id": handle, "object": "response", "created_at": created, "model": model}
    whole = {"error": None, "incomplete_details": None, "usage": None, **head, **fields}
    return Response.model_validate(whole).model_dump(exclude_unset=True)


def error_event(error: CriticalKVError, sequence: int) -> bytes:
    """Return the event after which a stream is over; OpenAI's clients raise its `error`."""
    flat = {"code": error.code, "message": error.message, "param": error.param}
    return event_line("error", sequence, {**flat, "error": {**flat, "type": error.kind}})


def event_line(kind: str, sequence: int, fields: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    data = json.dumps({"type": kind, "sequence_number": sequence, **fields}, allow_nan=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()


def _code(error: CriticalKVError) -> str:
    """The nearest of OpenAI's codes; ours is in the error event."""
    if isinstance(error, OverloadedError):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequestError) else "server_error"


def _item_id(handle: str) -> str:
    return f"msg_{handle.removeprefix('resp_')}"


def _item(handle: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": _item_id(handle),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
