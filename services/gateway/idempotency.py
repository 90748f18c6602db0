"""One answer per `Idempotency-Key`: run once, wait for a run, or replay."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from openai.types.chat import ChatCompletion

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.answer import Collector, Reply, ReplyEvent, StoredReply
from criticalkv.services.gateway.async_store import AsyncStore
from criticalkv.services.gateway.auth import Tenant
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.lease import keep
from criticalkv.shared.errors import CriticalKVError, InvalidRequestError
from criticalkv.shared.identity import canonical_digest

MAX_KEY_CHARS = 256
MAX_ANSWER_BYTES = 1024 * 1024
MAX_UNPACKED_BYTES = 64 * 1024 * 1024
LEASE_MS = 15_000
RENEW_S = 5.0  # a lease is short, so that a gateway's death does not block the key for long
POLL_S = (0.05, 1.0)
# How an answer is delivered is not what is asked.
_DELIVERY = ("stream", "stream_options")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Key:
    """An idempotency key with the request that it stands for."""

    tenant: str
    digest: str
    request_digest: str

    @classmethod
    def of(cls, tenant: Tenant, key: str, body: dict[str, Any]) -> Key:
        """Digest a header and a body.

        Raises:
            InvalidRequestError: if the header's length is out of bounds.
        """
        if not 1 <= len(key) <= MAX_KEY_CHARS:
            raise InvalidRequestError(
                f"Idempotency-Key: 1 to {MAX_KEY_CHARS} characters", param="Idempotency-Key"
            )
        asked = {k: v for k, v in body.items() if k not in _DELIVERY}
        canonical = json.dumps(asked, sort_keys=True)
        return cls(
            tenant.digest,
            hashlib.sha256(key.encode()).hexdigest(),
            hashlib.sha256(canonical.encode()).hexdigest(),
        )

    @property
    def handle(self) -> str:
        """The handle of every attempt, so that an attempt after a failed one, too,
        draws the same tokens. Worth nothing without the tenant's API key."""
        fields = [("tenant", self.tenant), ("key", self.digest), ("request", self.request_digest)]
        return f"resp_{canonical_digest(fields)[:32]}"


class Idempotency:
    """Runs requests at most once per key."""

    def __init__(self, store: AsyncStore, ttl_ms: int) -> None:
        self._store = store
        self._ttl_ms = ttl_ms

    async def run(
        self,
        key: Key,
        wants_logprobs: bool,
        deadline: Deadline,
        start: Callable[[str], Awaitable[Reply]],
    ) -> Reply:
        """Return the stored answer, or start the request under the key's handle.

        Raises:
            IdempotencyConflictError: if the key stands for another request.
            DeadlineError: if another attempt runs for longer than this one may wait.
        """
        claim = await self._claim(key, deadline)
        if claim.state == pb.BeginRequestResponse.DONE:
            return StoredReply(_unpack(claim.answer))
        renewal = keep(lambda: self._renew(key, claim.lease_token), RENEW_S, deadline)

        async def finish(answer: bytes) -> None:
            try:
                await self._finish(key, claim.lease_token, answer)
            finally:
                renewal.cancel()

        try:
            reply = await start(claim.handle)
        except BaseException:
            await finish(b"")
            raise
        return _Recorded(reply, wants_logprobs, finish)

    async def _claim(self, key: Key, deadline: Deadline) -> pb.BeginRequestResponse:
        pause = POLL_S[0]
        while True:
            claim = await self._store.begin_request(
                key.tenant, key.digest, key.request_digest, key.handle, LEASE_MS, self._ttl_ms
            )
            if claim.state != pb.BeginRequestResponse.RUNNING:
                return claim
            await asyncio.sleep(min(pause, deadline.remaining()))
            pause = min(2 * pause, POLL_S[1])

    async def _renew(self, key: Key, token: str) -> bool:
        return await self._store.renew_request(
            key.tenant, key.digest, key.request_digest, key.handle, LEASE_MS, self._ttl_ms, token
        )

    async def _finish(self, key: Key, token: str, answer: bytes) -> None:
        if len(answer) > MAX_ANSWER_BYTES:
            log.warning("answer of %d bytes is too large to be replayed", len(answer))
            answer = b""
        try:
            await self._store.finish_request(key.tenant, key.digest, token, answer)
        except CriticalKVError as error:
            log.warning("the answer could not be kept for retries: %s", error.code)


class _Recorded:
    """A reply that is stored for retries before its last event is told."""

    def __init__(
        self, reply: Reply, wants_logprobs: bool, finish: Callable[[bytes], Awaitable[None]]
    ) -> None:
        self._reply = reply
        self._wants_logprobs = wants_logprobs
        self._finish = finish
        self.id = reply.id
        self.created = reply.created
        self.model = reply.model
        self.choices = reply.choices
        self._done = False

    @property
    def usage(self) -> dict[str, Any]:
        return self._reply.usage

    async def aclose(self) -> None:
        """Cancel the reply if it still runs, and free its key."""
        if not self._done:
            self._done = True
            await self._finish(b"")
        await self._reply.aclose()

    async def events(self) -> AsyncGenerator[ReplyEvent, None]:
        collector = Collector(self._reply, self._wants_logprobs)
        try:
            async with aclosing(self._reply.events()) as events:
                async for event in events:
                    collector.add(event)
                    if collector.complete and not self._done:
                        self._done = True
                        await self._finish(_pack(collector.kept()))
                    yield event
        finally:
            await self.aclose()


def _pack(completion: ChatCompletion) -> bytes:
    return zlib.compress(completion.model_dump_json(exclude_unset=True).encode())


def _unpack(answer: bytes) -> ChatCompletion:
    raw = zlib.decompressobj().decompress(answer, MAX_UNPACKED_BYTES)
    return ChatCompletion.model_validate_json(raw)
