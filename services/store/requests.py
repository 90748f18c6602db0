"""Idempotency keys: one request under one key runs once; retries read its answer."""

from __future__ import annotations

import secrets

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import checks, keys, scripts
from criticalkv.services.store.metadata_room import MetadataRoom
from criticalkv.services.store.redis_data import Argument, RedisData
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import IdempotencyConflictError

DEFAULT_LEASE_MS = 60_000


class Requests:
    """All idempotency keys, apart per tenant."""

    def __init__(
        self, redis: RedisData, config: StoreConfig, room: MetadataRoom | None = None
    ) -> None:
        self._redis = redis
        self._room = room or MetadataRoom(config)
        self._ttl_ms = config.record_ttl_s * 1000

    async def begin(self, request: pb.BeginRequestRequest) -> pb.BeginRequestResponse:
        """Start a request, or learn that it runs or is done.

        With a token the attempt that it runs is extended, and none is started.

        Raises:
            IdempotencyConflictError: if the key was used with another request.
        """
        key = keys.request(checks.tenant(request.tenant), _digest(request.key_digest))
        body = checks.node_id(request.request_digest, "request_digest")
        lease_ms = checks.ttl(request.lease_ms, DEFAULT_LEASE_MS, "lease_ms", checks.MAX_LEASE_MS)
        state, handle, answer, token = await self._redis.run(
            scripts.BEGIN,
            [key],
            [
                body,
                checks.handle(request.handle),
                secrets.token_hex(16),
                lease_ms,
                self._room.shortened(checks.ttl(request.ttl_ms, self._ttl_ms)),
                request.lease_token,
            ],
        )
        if state == 0:
            raise IdempotencyConflictError(
                "the idempotency key was used with another request", param="key_digest"
            )
        return pb.BeginRequestResponse(
            state=state, handle=handle.decode(), answer=answer, lease_token=token.decode()
        )

    async def finish(self, request: pb.FinishRequestRequest) -> bool:
        """Store the answer, or with an empty one forget the key; False if taken over."""
        key = keys.request(checks.tenant(request.tenant), _digest(request.key_digest))
        answer = checks.size(request.answer, checks.MAX_ANSWER_BYTES, "answer")
        names = [key, keys.forgotten(key)]
        arguments: list[Argument] = [request.lease_token, answer, self._room.longest_ms]
        return bool(await self._redis.run(scripts.FINISH, names, arguments))


def _digest(value: str) -> str:
    return checks.node_id(value, "key_digest")
