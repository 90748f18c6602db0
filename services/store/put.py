"""PutNode: one stream in, one node published, or nothing.

Segments go to Redis as they arrive, under a lease; the manifest is published last, by
the explicit commit frame. The end of the stream is not a commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import checks, keys, scripts
from criticalkv.services.store.books import Books
from criticalkv.services.store.eviction import Evictor
from criticalkv.services.store.metrics import METRICS
from criticalkv.services.store.nodes import Nodes
from criticalkv.services.store.redis_data import RedisData
from criticalkv.services.store.segments import Segments
from criticalkv.services.store.tasks import Background, repeat
from criticalkv.shared import failpoints
from criticalkv.shared.cache.manifest import MAX_SEGMENT_BYTES, MAX_SEGMENTS, Manifest
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import (
    CancelledError,
    CriticalKVError,
    InvalidRequestError,
    NodeTooLargeError,
)
from criticalkv.shared.frames import FrameError, decode_put, segment_head

log = logging.getLogger(__name__)

BATCH = 4
"""Segments written in one round trip while as many are being received."""


class Writer:
    """Serves PutNode."""

    def __init__(
        self,
        redis: RedisData,
        segments: Segments,
        nodes: Nodes,
        books: Books,
        evictor: Evictor,
        background: Background,
        config: StoreConfig,
    ) -> None:
        self.redis = redis
        self.segments = segments
        self.nodes = nodes
        self.books = books
        self.evictor = evictor
        self.background = background
        self.lease_ms = config.lease_ttl_s * 1000
        self.max_node_bytes = config.max_node_mb << 20

    async def put(self, frames: AsyncIterator[bytes]) -> pb.PutResult:
        """Consume a stream and publish its node.

        Raises:
            InvalidRequestError: for frames out of order or a manifest that does not fit.
            StoreFullError: if the node does not fit.
            QuotaExceededError: if it does not fit its tenant's quota.
            LeaseLostError: if the lease was lost.
            NodeMissingError: if the parent was deleted meanwhile.
            CancelledError: if the stream ended without a commit.
        """
        begin = await _begin(frames)
        member = keys.member(begin.node_id, begin.attempt)
        if not await self.books.begin(member, self.lease_ms):
            raise InvalidRequestError("begin.attempt is in use already", param="attempt")
        attempt = _Attempt(self, begin)
        # A task of its own: a cancelled call must not stop between two steps of it.
        try:
            commit = await attempt.receive(frames)
        except BaseException:
            await self.background.whole(attempt.abandon())
            raise
        return await self.background.whole(attempt.commit(commit))


class _Attempt:
    """The state of one put."""

    def __init__(self, writer: Writer, begin: pb.PutBegin) -> None:
        self._writer = writer
        self._begin = begin
        self._member = keys.member(begin.node_id, begin.attempt)
        self._reserved = self._total = 0
        self._lengths: list[int] = []
        self._checksums: list[int] = []
        self._pending: list[tuple[bytes, memoryview]] = []
        self._running: asyncio.Future[list[int]] | None = None
        self._written = 0  # segments handed to a writing thread
        # If renewing keeps failing, the commit finds segments missing and refuses.
        renewing = repeat(writer.lease_ms / 3000, self._renew_once, "renewing a put's lease")
        self._renewer = asyncio.create_task(renewing)

    async def receive(self, frames: AsyncIterator[bytes]) -> pb.PutCommit:
        """Take in all segments; return the commit frame once they are in Redis."""
        await failpoints.passed("store.put.begin")
        await self._hold_ancestors()  # before anything is evicted for this put
        await self._writer.evictor.admit(self._member, self._begin.tenant)
        if self._begin.expected_bytes:
            await self._reserve(self._begin.expected_bytes)
        async for data in frames:
            frame, payload = _decoded(data)
            if frame.HasField("commit"):
                await self._drain()
                return frame.commit
            if not frame.HasField("segment"):
                raise InvalidRequestError("only segments may follow begin", param="kind")
            await self._segment(frame.segment.index, data, payload)
        raise CancelledError("the stream ended without a commit; nothing was published")

    async def commit(self, commit: pb.PutCommit) -> pb.PutResult:
        """Check the manifest against what arrived, and publish."""
        self._renewer.cancel()
        published = False
        try:
            manifest = await asyncio.to_thread(checks.check_commit, self._begin, commit)
            self._check_segments(manifest, commit)
            await self._renew_once()
            await failpoints.passed("store.put.commit")
            result = await self._writer.nodes.publish(
                manifest, commit, self._begin.lease_token, self._begin.tenant
            )
            published = result.published
        finally:
            if published:
                await self._let_go()
            else:
                await self.abandon()
        METRICS.puts.labels("published" if published else "present").inc()
        METRICS.bytes_in.inc(self._total)
        return result

    async def abandon(self) -> None:
        """Free everything that this attempt has written or reserved.

        Nothing if it was published: then a later step failed, and the janitor mends it.
        """
        self._renewer.cancel()
        METRICS.puts.labels("abandoned").inc()
        if self._running is not None:
            await asyncio.wait([self._running])  # or it would write after the unlink
            self._running.exception()
        await self._let_go()
        nodes, node_id = self._writer.nodes, self._begin.node_id
        try:
            if await nodes.names(node_id, self._begin.attempt):
                return
            await nodes.unlink_segments(node_id, self._begin.attempt, range(self._written))
            await self._writer.books.release(self._member)
        except CriticalKVError as error:
            # The caller gets the error that came first; the leases expire by themselves.
            log.warning("segments of a failed put stay until their lease ends: %s", error)

    async def _segment(self, index: int, data: bytes, payload: memoryview) -> None:
        if index != len(self._lengths) or index >= MAX_SEGMENTS:
            raise InvalidRequestError(
                f"segment.index is {index}, expected {len(self._lengths)} (below {MAX_SEGMENTS})",
                param="index",
            )
        if not 1 <= len(payload) <= MAX_SEGMENT_BYTES:
            raise InvalidRequestError(
                f"payload has {len(payload)} bytes, allowed are 1 to {MAX_SEGMENT_BYTES}",
                param="payload",
            )
        self._total += len(payload)
        if self._total > self._writer.max_node_bytes:
            raise NodeTooLargeError(
                f"the node exceeds store.max_node_mb ({self._writer.max_node_bytes} bytes)",
                param="payload",
            )
        self._lengths.append(len(payload))
        self._pending.append((_canonical(index, data, payload), payload))
        if self._running is None or self._running.done():
            await self._flush()
        elif len(self._pending) >= BATCH:
            await self._drain_running()
            await self._flush()

    async def _flush(self) -> None:
        await self._drain_running()
        if not self._pending:
            return
        if self._total > self._reserved:
            await self._reserve(self._total)
        batch, self._pending = self._pending, []
        first, self._written = self._written, self._written + len(batch)
        self._running = self._writer.segments.write(
            self._begin.node_id, self._begin.attempt, first, batch, self._writer.lease_ms
        )

    async def _drain_running(self) -> None:
        if self._running is not None:
            # Shielded: cancelling an executor's future would lose sight of its thread.
            self._checksums += await asyncio.shield(self._running)
            self._running = None

    async def _drain(self) -> None:
        await self._flush()
        await self._drain_running()

    async def _reserve(self, nbytes: int) -> None:
        await self._writer.evictor.reserve(self._member, nbytes, self._begin.tenant)
        self._reserved = nbytes

    def _check_segments(self, manifest: Manifest, commit: pb.PutCommit) -> None:
        if not commit.segment_count == len(self._lengths) == len(manifest.segments):
            raise InvalidRequestError(
                f"commit.segment_count is {commit.segment_count}, the manifest has "
                f"{len(manifest.segments)} segments, {len(self._lengths)} arrived",
                param="segment_count",
            )
        for i, segment in enumerate(manifest.segments):
            if self._lengths[i] != manifest.segment_bytes(i):
                raise InvalidRequestError(f"segment {i} has a wrong length", param="payload")
            if self._checksums[i] != segment.checksum:
                raise InvalidRequestError(f"segment {i} has a wrong checksum", param="payload")

    async def _renew_once(self) -> None:
        prefix = keys.segments(self._begin.node_id, self._begin.attempt)
        await self._hold_ancestors()
        await self._writer.books.renew(self._member, self._writer.lease_ms)
        await self._writer.redis.run(
            scripts.RENEW, [prefix + "0"], [prefix, 0, self._written, self._writer.lease_ms]
        )

    async def _hold_ancestors(self) -> None:
        await self._writer.nodes.hold(self._member, self._begin.ancestors, self._writer.lease_ms)

    async def _let_go(self) -> None:
        try:
            await self._writer.nodes.let_go(self._member, self._begin.ancestors)
        except CriticalKVError as error:
            log.warning("ancestors of a put stay until its lease ends: %s", error)


async def _begin(frames: AsyncIterator[bytes]) -> pb.PutBegin:
    async for data in frames:
        frame, _ = _decoded(data)
        if not frame.HasField("begin"):
            raise InvalidRequestError("the first frame must be begin", param="kind")
        checks.node_id(frame.begin.node_id)
        checks.attempt(frame.begin.attempt)
        if frame.begin.tenant:
            checks.tenant(frame.begin.tenant)
        checks.node_ids(list(frame.begin.ancestors), "ancestors", checks.MAX_ANCESTORS)
        return frame.begin
    raise CancelledError("the stream ended before its first frame")


def _decoded(data: bytes) -> tuple[pb.PutFrame, memoryview]:
    try:
        return decode_put(data)
    except FrameError as error:
        raise InvalidRequestError(f"frame refused: {error}", param="frame") from error


def _canonical(index: int, data: bytes, payload: memoryview) -> bytes:
    # What is kept is what readers get: usually the very bytes that arrived.
    head = segment_head(index, len(payload))
    if len(data) == len(head) + len(payload) and data.startswith(head):
        return data
    return head + payload
