"""Handles: random names owned by a tenant, each bound to one node or a better one of it."""

from __future__ import annotations

import random
import secrets

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import checks, keys, scripts
from criticalkv.services.store.metadata_room import MetadataRoom
from criticalkv.services.store.nodes import Nodes
from criticalkv.services.store.quotas import Quotas
from criticalkv.services.store.redis_data import Argument, RedisData
from criticalkv.shared.cache.manifest import MAX_PART_BYTES
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import (
    ContextNotFoundError,
    IdempotencyConflictError,
    InvalidRequestError,
    NodeMissingError,
)

MAX_LIST = 1000
_PAGE = 100
_LOOKED_AT = 3
"""Listed handles that are looked at with every new one: of those that are listed, no more
than about one of so many has expired."""
_OUTCOMES = {
    "moved": pb.MoveHandleResponse.MOVED,
    "children": pb.MoveHandleResponse.HAS_CHILDREN,
    "elsewhere": pb.MoveHandleResponse.ELSEWHERE,
}


class Handles:
    """All handles. An unknown, expired or foreign one always looks the same."""

    def __init__(
        self,
        redis: RedisData,
        nodes: Nodes,
        config: StoreConfig,
        room: MetadataRoom | None = None,
    ) -> None:
        self._redis = redis
        self._nodes = nodes
        self._room = room or MetadataRoom(config)
        self._ttl_ms = config.record_ttl_s * 1000
        self._node_ttl_ms = config.node_ttl_s * 1000
        self._quotas = Quotas(config)

    async def bind(self, request: pb.BindHandleRequest) -> pb.Handle:
        """Bind a handle to a node; again with the same node is the same binding.

        Raises:
            NodeMissingError: if neither the node nor its token record is stored.
            IdempotencyConflictError: if the handle names another node.
        """
        tenant, handle = checks.tenant(request.tenant), checks.handle(request.handle)
        node_id = checks.node_id(request.node_id)
        metadata = checks.size(request.metadata, MAX_PART_BYTES, "metadata")
        ttl_ms = self._quotas.of(tenant).shortened(checks.ttl(request.ttl_ms, self._ttl_ms))
        if not await self._nodes.known(node_id):
            raise NodeMissingError.of(node_id, "not stored")
        digest = keys.digest(tenant, handle)
        bound = await self._redis.run(
            scripts.BIND,
            [keys.handle(digest)],
            [handle, tenant, node_id, metadata, ttl_ms, self._room.longest_ms],
        )
        if bound is None:
            raise IdempotencyConflictError("the handle names another node", param="handle")
        created, life_ms, node_id = int(bound[0]), int(bound[1]), bound[2].decode()
        await self._keep_node(node_id, digest, life_ms)
        # As long as it may live once there is room again: reading it does not extend the list.
        await self._list(tenant, handle, created, ttl_ms)
        return pb.Handle(
            handle=handle,
            tenant=tenant,
            node_id=node_id,
            metadata=metadata,
            created_at=created,
            ttl_ms=life_ms,
        )

    async def resolve(self, tenant: str, handle: str) -> pb.Handle:
        """Return a handle, and keep it and its nodes alive.

        Raises:
            ContextNotFoundError: if the tenant has no such handle.
        """
        digest = _digest(tenant, handle)
        reply = await self._redis.run(
            scripts.RESOLVE, [keys.handle(digest)], [self._room.longest_ms]
        )
        found = _handle(reply, tenant)
        await self._keep_node(found.node_id, digest, found.ttl_ms)
        return found

    async def move(self, request: pb.MoveHandleRequest) -> pb.MoveHandleResponse:
        """Bind a handle to another node, if it is still on a childless one.

        Raises:
            ContextNotFoundError: if the tenant has no such handle.
            NodeMissingError: if neither the new node nor its token record is stored.
        """
        digest = _digest(request.tenant, request.handle)
        old = checks.node_id(request.from_node, "from_node")
        new = checks.node_id(request.to_node, "to_node")
        if old == new:
            raise InvalidRequestError("from_node and to_node are the same", param="to_node")
        checks.size(request.metadata, MAX_PART_BYTES, "metadata")
        if not await self._nodes.known(new) or not await self._can_carry_pin(
            request.tenant, old, new
        ):
            raise NodeMissingError.of(new, "not stored")
        ttl_ms = await self._redis.command("PTTL", keys.handle(digest))
        if ttl_ms <= 0:
            raise _not_found()
        # Before anything else, so that the new node cannot be removed in between.
        await self._keep_node(new, digest, ttl_ms)
        outcome = await self._move(request, digest)
        if outcome == "moved":
            await self._carry_pin(request.tenant, old, new)
        elif await self._node_of(digest) != new:  # another mover may have led it there
            await self._redis.command("ZREM", keys.bindings(new), digest)
        if outcome == "gone":
            raise _not_found()
        return pb.MoveHandleResponse(outcome=_OUTCOMES[outcome])

    async def _move(self, request: pb.MoveHandleRequest, digest: str) -> str:
        """Leave the old node, then name the new one; a third one is never overwritten."""
        old, new = request.from_node, request.to_node
        if await self._node_of(digest) == old and not await self._leave(old, digest):
            return "children"
        replaces = int(request.HasField("metadata"))
        outcome: bytes = await self._redis.run(
            scripts.MOVE, [keys.handle(digest)], [old, new, replaces, request.metadata]
        )
        return outcome.decode()

    async def _node_of(self, digest: str) -> str | None:
        found = await self._redis.command("HGET", keys.handle(digest), "node")
        return None if found is None else str(found.decode())

    async def _leave(self, node_id: str, digest: str) -> bool:
        names = [keys.children(node_id), keys.bindings(node_id)]
        left = bool(await self._redis.run(scripts.LEAVE, names, [digest]))
        if not left and await self._nodes.forget_dead_children(node_id):
            return await self._leave(node_id, digest)
        return left

    async def _can_carry_pin(self, tenant: str, old: str, new: str) -> bool:
        """A record alone cannot be pinned: better known before the handle is there."""
        pinned = await self._redis.command("SISMEMBER", keys.pins(old), tenant)
        return not pinned or (await self._nodes.present([new]))[0]

    async def _carry_pin(self, tenant: str, old: str, new: str) -> None:
        """Pin the new node if the old one is pinned; unpin that with its last handle."""
        if not await self._redis.command("SISMEMBER", keys.pins(old), tenant):
            return
        await self._nodes.pin(tenant, new, limited=False)  # it takes the old pin's place
        if not await self._redis.command("ZCARD", keys.bindings(old)):
            await self._nodes.unpin(tenant, old)

    async def list_of(self, request: pb.ListHandlesRequest) -> list[pb.Handle]:
        """Return a tenant's handles with a prefix, newest first."""
        tenant, limit = checks.tenant(request.tenant), request.limit or _PAGE
        if limit > MAX_LIST:
            raise InvalidRequestError(f"limit is {limit}, at most {MAX_LIST}", param="limit")
        out: list[pb.Handle] = []
        offset = 0
        while len(out) < limit:
            names = await self._names(tenant, offset)
            if not names:
                break
            wanted = [name for name in names if name.startswith(request.prefix)]
            found = await self._read(tenant, wanted)
            out += [handle for handle in found if handle is not None]
            expired = [n for n, h in zip(wanted, found, strict=True) if h is None]
            if expired:
                await self._redis.command("ZREM", keys.tenant_handles(tenant), *expired)
            offset += len(names) - len(expired)
        return out[:limit]

    async def delete(self, tenant: str, handle: str) -> list[str]:
        """Remove a handle, then every node that nothing refers to any more.

        Returns:
            The ids of the nodes that went.

        Raises:
            ContextNotFoundError: if the tenant has no such handle.
        """
        digest = _digest(tenant, handle)
        names = [keys.handle(digest), keys.unbound(digest)]
        found = await self._redis.run(scripts.UNBIND, names, [secrets.token_hex(8)])
        if found is None:
            raise _not_found()
        node_id, moved_from = (name.decode() for name in found)
        await self._redis.command("ZREM", keys.tenant_handles(tenant), handle)
        await self._redis.command("ZREM", keys.bindings(node_id), digest)
        gone = await self._nodes.delete_unreferenced(node_id)
        return gone + await self._delete_left(tenant, moved_from, digest) if moved_from else gone

    async def _delete_left(self, tenant: str, node_id: str, digest: str) -> list[str]:
        """Remove what a deleted handle was moved from, unless something refers to it."""
        names = keys.bindings(node_id)
        await self._redis.command("ZREM", names, digest)  # by a read that met the move
        if not await self._redis.command("ZCARD", names):
            # A pin that met the move: nobody could take it back any more.
            await self._nodes.unpin(tenant, node_id)
        return await self._nodes.delete_unreferenced(node_id)

    async def _list(self, tenant: str, handle: str, created: int, ttl_ms: int) -> None:
        """List a handle; strike off some that have expired, or the list would only grow."""
        name = keys.tenant_handles(tenant)
        place = repr(random.random())
        arguments: list[Argument] = [handle, created, ttl_ms, place, _LOOKED_AT]
        listed = [
            found.decode() for found in await self._redis.run(scripts.LISTED, [name], arguments)
        ]
        there = await self._redis.commands(
            [("EXISTS", keys.handle(keys.digest(tenant, found))) for found in listed]
        )
        expired = [found for found, alive in zip(listed, there, strict=True) if not alive]
        if expired:
            await self._redis.command("ZREM", name, *expired)

    async def _keep_node(self, node_id: str, digest: str, ttl_ms: int) -> None:
        await self._redis.run(scripts.BOUND, [keys.bindings(node_id)], [digest, ttl_ms])
        await self._nodes.touch(node_id, min(ttl_ms, self._node_ttl_ms))

    async def _names(self, tenant: str, offset: int) -> list[str]:
        found = await self._redis.command(
            "ZREVRANGE", keys.tenant_handles(tenant), offset, offset + _PAGE - 1
        )
        return [name.decode() for name in found]

    async def _read(self, tenant: str, names: list[str]) -> list[pb.Handle | None]:
        replies = await self._redis.commands(
            [
                command
                for key in (keys.handle(keys.digest(tenant, name)) for name in names)
                for command in (
                    ("HMGET", key, "handle", "tenant", "node", "metadata", "created", "ttl"),
                    ("PTTL", key),
                )
            ]
        )
        out: list[pb.Handle | None] = []
        for fields, ttl_ms in zip(replies[::2], replies[1::2], strict=True):
            alive = fields[0] is not None and ttl_ms > 0
            out.append(_handle([*fields[:5], ttl_ms], tenant) if alive else None)
        return out


def _digest(tenant: str, handle: str) -> str:
    # A malformed handle is an unknown one: the same answer.
    try:
        return keys.digest(checks.tenant(tenant), checks.handle(handle))
    except InvalidRequestError as error:
        if error.param == "tenant":
            raise
        raise _not_found() from None


def _handle(fields: list[bytes] | None, tenant: str) -> pb.Handle:
    if fields is None or fields[1].decode() != tenant:
        raise _not_found()
    return pb.Handle(
        handle=fields[0].decode(),
        tenant=tenant,
        node_id=fields[2].decode(),
        metadata=fields[3],
        created_at=int(fields[4]),
        ttl_ms=int(fields[5]),
    )


def _not_found() -> ContextNotFoundError:
    return ContextNotFoundError("no such handle", param="handle")
