"""Responses: a turn with instructions, kept so that it can be continued and read again.

A response is a chat turn, and its id the turn's handle: `previous_response_id` goes on from
the node that the handle is bound to, from whichever earlier response, as often as wanted. Any
handle will do, also a registered context's or a chat completion's.

Instructions are not part of a conversation: they come before it, and each response has its
own or none. The same as before, and the conversation goes on from its node. Others, and it is
rendered anew behind them: for that the handle's metadata hold the texts of the conversation,
compressed, in 16 KiB. They are the tenant's own, live as long as the
handle, and go with it. A longer conversation keeps its node and can be continued, but not
under other instructions: that is a 400 that says to send the messages again.

`store: false`: the turn's own node is neither published nor bound; its id leads nowhere.
Contexts before a breakpoint are cached as ever, and an `Idempotency-Key` keeps the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from criticalkv.services.gateway.auth import Tenant
from criticalkv.services.gateway.chat import Base, Chat, Keeping, Turn, base_after
from criticalkv.services.gateway.contexts import Contexts
from criticalkv.services.gateway.core import GatewayCore
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.response_schemas import ResponseRequest
from criticalkv.services.gateway.response_shape import echo, finished_fields, object_fields
from criticalkv.services.gateway.schemas import MAX_BREAKPOINTS, ChatMessage, TextPart
from criticalkv.services.gateway.transcript import Metadata
from criticalkv.shared.cache.manifest import MAX_PART_BYTES
from criticalkv.shared.errors import (
    ContextExpiredError,
    ContextNotFoundError,
    InvalidRequestError,
)
from criticalkv.shared.model.chat import Message, Part
from criticalkv.shared.requests import DecodeEnd

MAX_KEPT_BYTES = 16 * 1024
"""Of one response, compressed: handles count against no quota of bytes."""
MAX_UNPACKED_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Kept:
    """What a handle's metadata hold of a response.

    Attributes:
        fields: of its object; None if they were too long.
        messages: of the whole conversation, its answer included, without instructions; None
            if they were too long, or are not known.
    """

    fields: dict[str, Any] | None
    messages: list[Message] | None

    def encode(self) -> bytes:
        """Return it as compressed JSON."""
        plain = None if self.messages is None else [_listed(m) for m in self.messages]
        return zlib.compress(json.dumps([self.fields, plain]).encode(), 9)

    @classmethod
    def decode(cls, data: bytes) -> Kept:
        """Read what `encode` returned, or the nothing of a handle that is no response's."""
        if not data:
            return cls(None, None)
        raw = zlib.decompressobj().decompress(data, MAX_UNPACKED_BYTES)
        fields, plain = json.loads(raw)
        return cls(fields, None if plain is None else [_message(item) for item in plain])

    def shorter(self) -> Iterator[Kept]:
        """Yield it, and what is kept of it where that is too long."""
        yield self
        yield replace(self, messages=None)
        yield Kept(None, None)


@dataclass(frozen=True)
class Before:
    """What a response follows.

    Attributes:
        base: where it begins; None = with nothing.
        messages: to run.
        history: the conversation with its input, without instructions; None if not known.
    """

    base: Base | None
    messages: list[ChatMessage]
    history: list[Message] | None


class Responses:
    """What a client can do with responses."""

    def __init__(self, core: GatewayCore) -> None:
        self._core = core
        self._chat = Chat(core)
        self._contexts = Contexts(core)

    async def start(
        self,
        tenant: Tenant,
        request: ResponseRequest,
        handle: str,
        deadline: Deadline,
        *,
        is_retry: bool = False,
    ) -> Turn:
        """Begin a response; see `Chat.start`.

        Raises:
            CriticalKVError: everything that can be refused before the first token.
        """
        self._core.check_model(request.model)
        before = await self._before(tenant, request)
        keeping = Keeping(request.store, _Completion(handle, request, before.history))
        try:
            return await self._chat.start(
                tenant,
                request.chat(before.messages),
                handle,
                deadline,
                is_retry=is_retry,
                base=before.base,
                keeping=keeping,
            )
        except InvalidRequestError as error:
            raise _renamed(error) from None

    async def get(self, tenant: Tenant, handle: str) -> dict[str, Any]:
        """Return a stored response.

        Raises:
            ContextNotFoundError: unknown, expired, another tenant's, or no response's.
            ContextExpiredError: if it was too long to be kept.
        """
        found, meta = await self._resolve(tenant, handle, "response_id")
        if not meta.response:
            raise ContextNotFoundError("no such context", param="response_id")
        kept = await asyncio.to_thread(Kept.decode, meta.response)
        if kept.fields is None:
            raise ContextExpiredError("the response was too long to be kept; it can be continued")
        extension = {"handle": handle, "node_id": found.node_id, "published": True}
        fields = {**kept.fields, "criticalkv": extension}
        return object_fields(handle, found.created_at, meta.model, fields)

    async def delete(self, tenant: Tenant, handle: str) -> dict[str, Any]:
        """Remove a response, and KV that nothing references any more."""
        _, meta = await self._resolve(tenant, handle, "response_id")
        if not meta.response:
            raise ContextNotFoundError("no such context", param="response_id")
        await self._contexts.delete(tenant, handle)
        return {"id": handle, "object": "response", "deleted": True}

    async def _before(self, tenant: Tenant, request: ResponseRequest) -> Before:
        asked, said = request.messages, [message.plain() for message in request.messages]
        if request.base_id is None:
            return Before(None, [*_instructions(request), *asked], said)
        param = "previous_response_id" if request.previous_response_id else "criticalkv.context_id"
        found, meta = await self._resolve(tenant, request.base_id, param)
        base = base_after(tenant, request.criticalkv, meta, found)
        known = (await asyncio.to_thread(Kept.decode, meta.response)).messages
        history = None if known is None else [*known, *said]
        if meta.instructions == _digest(request.instructions):
            return Before(base, asked, history)
        if known is None:
            raise InvalidRequestError(
                f"instructions: others than those of {param}, whose messages are not kept; send "
                "them again",
                param="instructions",
            )
        core = self._core
        anew = replace(base, transcript=core.transcript(base.policy, base.salt), node_id=None)
        return Before(anew, [*_instructions(request), *_again(known, asked)], history)

    async def _resolve(self, tenant: Tenant, handle: str, param: str) -> tuple[Any, Metadata]:
        found = await self._core.resolve(tenant, handle, param)
        return found, self._core.metadata(found.metadata)


@dataclass(frozen=True)
class _Completion:
    """Adds to a handle's metadata what is kept of its response, as far as it fits."""

    handle: str
    request: ResponseRequest
    history: list[Message] | None

    def __call__(
        self, metadata: Metadata, text: str, end: DecodeEnd, usage: dict[str, Any]
    ) -> Metadata:
        answer = Message("assistant", (Part(text),))
        messages = None if self.history is None else [*self.history, answer]
        finished = finished_fields(self.handle, text, end.finish_reason, int(time.time()), usage)
        kept = Kept({**echo(self.request), **finished}, messages)
        for less in kept.shorter():
            instructions, response = _digest(self.request.instructions), less.encode()
            whole = metadata.model_copy(update={"instructions": instructions, "response": response})
            if len(response) <= MAX_KEPT_BYTES and len(whole.encode()) <= MAX_PART_BYTES:
                break
        return whole


def _instructions(request: ResponseRequest) -> list[ChatMessage]:
    if not request.instructions:
        return []
    part = TextPart(type="text", text=request.instructions)
    return [ChatMessage(role="system", content=[part])]


def _digest(instructions: str | None) -> str:
    return hashlib.sha256(instructions.encode()).hexdigest() if instructions else ""


def _again(known: Sequence[Message], asked: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a conversation's messages to be sent once more, with as many marks as may be."""
    free = MAX_BREAKPOINTS - sum(p.mark is not None for m in asked for p in m.content)
    again = []
    for message in known:
        parts = []
        for part in message.parts:
            is_marked = part.breakpoint and free > 0
            free -= is_marked
            mark = {"mode": "explicit"} if is_marked else None
            parts.append({"type": "text", "text": part.text, "prompt_cache_breakpoint": mark})
        again.append(ChatMessage.model_validate({"role": message.role, "content": parts}))
    return [*again, *asked]


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    """Return an error about a chat completion's fields with the names of a response's."""
    for chat, own in (("messages", "input"), ("max_tokens", "max_output_tokens")):
        if error.param is not None and error.param.startswith(chat):
            text = error.message.replace(chat, own, 1)
            return type(error)(text, param=error.param.replace(chat, own, 1))
    return error


def _listed(message: Message) -> list[Any]:
    return [message.role, [[part.text, part.breakpoint] for part in message.parts]]


def _message(item: list[Any]) -> Message:
    role, parts = item
    return Message(role, tuple(Part(text, mark) for text, mark in parts))
