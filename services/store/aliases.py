"""Aliases: from a digest of conversation text to the nodes that hold it."""

from __future__ import annotations

from collections.abc import Sequence

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import checks, keys, scripts
from criticalkv.services.store.metadata_room import MetadataRoom
from criticalkv.services.store.nodes import Nodes
from criticalkv.services.store.redis_data import RedisData
from criticalkv.shared.config import StoreConfig


class Aliases:
    """All aliases. A target whose node is gone is never returned."""

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

    async def put(self, request: pb.PutAliasRequest) -> None:
        """Add a target to an alias; at most the newest 16 are kept."""
        key = keys.alias(checks.node_id(request.alias, "alias"))
        node_id = checks.node_id(request.target.node_id)
        view = checks.view(list(request.target.view))
        target = f"{node_id}:{','.join(view)}"
        await self._redis.run(scripts.ALIAS, [key], [target, self._room.shortened(self._ttl_ms)])

    async def resolve(self, aliases: Sequence[str]) -> list[pb.AliasEntry]:
        """Return the targets of each alias, newest first."""
        names = checks.node_ids(list(aliases), "aliases")
        replies = await self._redis.commands(
            [("ZREVRANGE", keys.alias(name), 0, -1) for name in names]
        )
        targets = [[_target(found) for found in reply] for reply in replies]
        alive = await self._alive([t.node_id for entry in targets for t in entry])
        return [
            pb.AliasEntry(targets=[t for t in entry if t.node_id in alive]) for entry in targets
        ]

    async def _alive(self, node_ids: list[str]) -> set[str]:
        present = await self._nodes.present(node_ids)
        return {node_id for node_id, there in zip(node_ids, present, strict=True) if there}


def _target(found: bytes) -> pb.AliasTarget:
    node_id, _, view = found.decode().partition(":")
    return pb.AliasTarget(node_id=node_id, view=view.split(",") if view else [])
