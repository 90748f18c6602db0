"""GetNode: one generation at one tier, chosen at the start, streamed in read order."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import NoReturn

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import checks
from criticalkv.services.store.metrics import METRICS
from criticalkv.services.store.nodes import Nodes, Opened, split_parts
from criticalkv.services.store.segments import Segments
from criticalkv.shared.cache.manifest import Manifest, decode_manifest
from criticalkv.shared.errors import CorruptNodeError, InvalidRequestError, NodeMissingError
from criticalkv.shared.identity import resolve_tier

log = logging.getLogger(__name__)

BATCH = 4
"""Segments read in one round trip while as many are being sent."""
AHEAD = 2
"""Batches being read at the same time."""
_CACHED_MANIFESTS = 32


class Reader:
    """Serves GetNode."""

    def __init__(self, segments: Segments, nodes: Nodes) -> None:
        self._segments = segments
        self._nodes = nodes
        self._manifests: OrderedDict[tuple[str, str, int], Manifest] = OrderedDict()

    async def get(
        self, request: pb.GetNodeRequest, offered: pb.RedisLocation | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the header frame, then the segments' frames.

        Args:
            request: what to read.
            offered: where the client can read the segments itself; then only the header
                is sent.

        Raises:
            InvalidRequestError: for a tier, layer range or limit that cannot be.
            NodeMissingError: if the node is absent, or loses a segment meanwhile.
        """
        node_id = checks.node_id(request.node_id)
        wanted = checks.tier(request.tier)
        opened = await self._nodes.open(node_id)
        manifest = await self._manifest(node_id, opened)
        tier = _tier(manifest, wanted, request.byte_limit)
        order = manifest.read_order(tier, _layers(manifest, request))
        header = pb.GetHeader(
            manifest_parts=split_parts(opened.parts),
            generation=opened.generation,
            tier=tier,
            segment_count=len(order),
            location=offered if order else None,
        )
        yield pb.GetFrame(header=header).SerializeToString()
        if not header.HasField("location"):
            async for frame in self._frames(opened, manifest, order):
                yield frame
        METRICS.gets.labels("hit").inc()

    async def _frames(
        self, opened: Opened, manifest: Manifest, order: list[int]
    ) -> AsyncIterator[bytes]:
        node_id = manifest.node_id
        batches = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
        running = deque(self._read(node_id, manifest, batch) for batch in batches[:AHEAD])
        try:
            for at, batch in enumerate(batches):
                frames = await asyncio.shield(running[0])
                running.popleft()
                if at + AHEAD < len(batches):
                    running.append(self._read(node_id, manifest, batches[at + AHEAD]))
                for index, frame in zip(batch, frames, strict=True):
                    if frame is None:
                        await self._lost(node_id, opened, f"segment {index} is gone")
                    else:
                        METRICS.bytes_out.inc(len(frame))
                        yield frame
        finally:
            for late in running:
                late.cancel()  # one that waits for a thread never starts
                late.add_done_callback(_retrieve)

    def _read(
        self, node_id: str, manifest: Manifest, batch: list[int]
    ) -> asyncio.Future[list[bytes | None]]:
        wanted = [(index, manifest.segment_bytes(index)) for index in batch]
        return self._segments.read(node_id, manifest.attempt, wanted)

    async def _manifest(self, node_id: str, opened: Opened) -> Manifest:
        key = (node_id, opened.attempt, opened.generation)
        manifest = self._manifests.get(key)
        if manifest is None:
            manifest = await self._decode(node_id, opened)
            self._manifests[key] = manifest
            if len(self._manifests) > _CACHED_MANIFESTS:
                self._manifests.popitem(last=False)
        self._manifests.move_to_end(key)
        return manifest

    async def _decode(self, node_id: str, opened: Opened) -> Manifest:
        try:
            manifest = await asyncio.to_thread(decode_manifest, split_parts(opened.parts))
            if (manifest.node_id, manifest.attempt) != (node_id, opened.attempt):
                raise CorruptNodeError("the manifest is of another node")
            return manifest
        except CorruptNodeError as error:
            return await self._lost(node_id, opened, error.message)

    async def _lost(self, node_id: str, opened: Opened, why: str) -> NoReturn:
        # One part gone: the node is a miss for everybody, at once. Unless it has shrunk or
        # was replaced since: then only this read is over.
        outcome, _ = await self._nodes.drop(node_id, opened.attempt, generation=opened.generation)
        METRICS.gets.labels("overtaken" if outcome == "other" else "damaged").inc()
        raise NodeMissingError.of(node_id, why)


def _tier(manifest: Manifest, wanted: str | None, byte_limit: int) -> str:
    tiers = manifest.tiers
    if byte_limit:
        sizes = zip(tiers, manifest.tier_bytes(), strict=True)
        tiers = tuple(tier for tier, nbytes in sizes if nbytes <= byte_limit)
        if not tiers:
            raise InvalidRequestError(
                f"byte_limit is {byte_limit}, the lowest tier has {manifest.tier_bytes()[0]} bytes",
                param="byte_limit",
            )
    return resolve_tier(tiers, wanted)


def _layers(manifest: Manifest, request: pb.GetNodeRequest) -> range:
    end = request.layer_end or manifest.num_layers
    if not 0 <= request.layer_begin <= end <= manifest.num_layers:
        raise InvalidRequestError(
            f"layers [{request.layer_begin}, {end}) are not within the node's "
            f"{manifest.num_layers}",
            param="layer_end",
        )
    return range(request.layer_begin, end)


def _retrieve(running: asyncio.Future[list[bytes | None]]) -> None:
    # One that ended before it could be cancelled; its connection is dropped on errors.
    if not running.cancelled() and running.exception() is not None:
        log.info("a read ahead failed: %s", running.exception())
