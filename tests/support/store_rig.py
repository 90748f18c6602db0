"""A store server's parts without its timers, on a Valkey that several of them share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import redis

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store.books import Books
from criticalkv.services.store.eviction import Evictor
from criticalkv.services.store.get import Reader
from criticalkv.services.store.handles import Handles
from criticalkv.services.store.janitor import Janitor
from criticalkv.services.store.metadata_room import MetadataRoom
from criticalkv.services.store.nodes import Nodes
from criticalkv.services.store.order import Order
from criticalkv.services.store.put import Writer
from criticalkv.services.store.redis_data import RedisData
from criticalkv.services.store.segments import Segments
from criticalkv.services.store.shrinking import Shrinker
from criticalkv.services.store.tasks import Background
from criticalkv.services.store.topology import data_client
from criticalkv.shared.cache.manifest import encode_manifest
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.frames import decode_get, decode_put, encode_segment
from criticalkv.shared.redis_location import Deployment, Location


class Rig:
    """One server. Its limit is given in bytes."""

    def __init__(
        self,
        location: Location,
        config: StoreConfig,
        limit_bytes: int = 1 << 30,
        order: Order | None = None,
    ) -> None:
        deployment = Deployment.of(location)
        self.redis = RedisData(deployment, 10.0)
        self.segments = Segments(data_client(deployment, 10.0))
        self.books = Books(self.redis, limit_bytes, order)
        self.room = MetadataRoom(config, limit_bytes)
        self.nodes = Nodes(self.redis, self.books, config, self.room)
        self.shrinker = Shrinker(self.redis, self.nodes, self.books, config)
        grace_ms = int(config.read_deadline_s * 1000)
        self.janitor = Janitor(self.redis, self.nodes, self.books, self.shrinker, grace_ms)
        self.evictor = Evictor(self.nodes, self.books, self.janitor, self.shrinker, config)
        self.handles = Handles(self.redis, self.nodes, config, self.room)
        self.background = Background()
        self.writer = Writer(
            self.redis,
            self.segments,
            self.nodes,
            self.books,
            self.evictor,
            self.background,
            config,
        )
        self.reader = Reader(self.segments, self.nodes)

    async def close(self) -> None:
        await self.background.drain(5.0)
        self.segments.close()
        await self.redis.close()

    async def put(self, node: Any, *, tenant: str = "", ttl_ms: int = 0) -> pb.PutResult:
        return await self.writer.put(frames(node, tenant=tenant, ttl_ms=ttl_ms))

    async def get(self, node_id: str, tier: str = "") -> tuple[pb.GetHeader, dict[int, bytes]]:
        """Read a whole node: its header, and payloads by index."""
        stream = self.reader.get(pb.GetNodeRequest(node_id=node_id, tier=tier))
        header = decode_get(await anext(stream))[0].header
        out = {}
        async for data in stream:
            frame, payload = decode_get(data)
            out[frame.segment.index] = bytes(payload)
        return header, out

    async def stat(self, node: Any) -> pb.NodeStat:
        return (await self.nodes.stat([node.node_id]))[0]


async def frames(node: Any, *, tenant: str = "", ttl_ms: int = 0) -> AsyncIterator[bytes]:
    """The stream of a put."""
    begin = pb.PutBegin(
        node_id=node.node_id,
        attempt=node.manifest.attempt,
        ancestors=node.manifest.ancestors,
        expected_bytes=node.nbytes,
        tenant=tenant,
    )
    yield pb.PutFrame(begin=begin).SerializeToString()
    for index, payload in enumerate(node.payloads):
        await asyncio.sleep(0)
        yield encode_segment(index, payload)
    commit = pb.PutCommit(
        segment_count=len(node.payloads),
        manifest_parts=encode_manifest(node.manifest),
        token_record=node.record.encode(),
        ttl_ms=ttl_ms,
    )
    yield pb.PutFrame(commit=commit).SerializeToString()


def held_bytes(valkey: redis.Redis) -> int:
    """Payload bytes that Valkey really holds."""
    values = [valkey.get(key) for key in valkey.scan_iter("ckv:*:s:*", count=1000)]
    return sum(len(decode_put(value)[1]) for value in values if value is not None)


def total(valkey: redis.Redis) -> int:
    """What the books say."""
    return int(valkey.get("ckv:{books}:total") or 0)
