"""Prefill leases: at most one worker computes a node at a time.

The token fences: a commit is refused while another holds the lease. Time is Redis's.
"""

from __future__ import annotations

import secrets

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import checks, keys, scripts
from criticalkv.services.store.redis_data import RedisData
from criticalkv.shared.config import StoreConfig


class Leases:
    """All leases, one per node."""

    def __init__(self, redis: RedisData, config: StoreConfig) -> None:
        self._redis = redis
        self._ttl_ms = config.lease_ttl_s * 1000

    async def acquire(self, request: pb.AcquireLeaseRequest) -> pb.AcquireLeaseResponse:
        """Take a node's lease, or learn for how long another still has it.

        With a token the lease that it holds is extended, and none is taken.
        """
        token = request.lease_token or secrets.token_hex(16)
        ttl_ms = checks.ttl(request.ttl_ms, self._ttl_ms, limit_ms=checks.MAX_LEASE_MS)
        key = keys.lease(checks.node_id(request.node_id))
        held_ms = int(
            await self._redis.run(scripts.ACQUIRE, [key], [token, ttl_ms, request.lease_token])
        )
        if held_ms:
            return pb.AcquireLeaseResponse(held_for_ms=max(held_ms, 0))
        return pb.AcquireLeaseResponse(acquired=True, lease_token=token)

    async def release(self, request: pb.ReleaseLeaseRequest) -> bool:
        """Give a lease back; False if the token no longer holds it."""
        key = keys.lease(checks.node_id(request.node_id))
        return bool(await self._redis.run(scripts.RELEASE, [key], [request.lease_token]))
