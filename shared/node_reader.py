"""Reading one node from the store: the manifest over gRPC, the segments by either path."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.shared import failpoints
from criticalkv.shared.breaker import Passage
from criticalkv.shared.cache.manifest import Manifest, decode_manifest, verify_segment
from criticalkv.shared.closing import Closing
from criticalkv.shared.direct_read import DirectClosed, DirectReads, Wanted
from criticalkv.shared.errors import (
    CorruptNodeError,
    CriticalKVError,
    DeadlineError,
    NodeMissingError,
    StoreUnavailableError,
)
from criticalkv.shared.frames import FrameError, decode_get
from criticalkv.shared.redis_location import Location
from criticalkv.shared.store_channel import typed_error

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadPaths:
    """How a client reads: what NodeReader needs of it.

    Attributes:
        begin: lets a call with a deadline through, or fails at once.
        stream: starts GetNode with a request and a timeout in seconds.
        drop: has the store drop a node, if attempt and generation are still the same.
        direct: reads from Redis; None = never.
    """

    begin: Callable[[float], Passage]
    stream: Callable[[pb.GetNodeRequest, float], Any]
    drop: Callable[[str, str, int], bool]
    direct: DirectReads | None


class NodeReader(Closing):
    """Reads one node. Leaving the context cancels what was not read.

    Attributes:
        manifest: checked, and of the node that was asked for.
        tier: the tier that is read.
        generation: of the manifest that this read is served from.
    """

    manifest: Manifest
    tier: str
    generation: int

    def __init__(
        self, paths: ReadPaths, request: pb.GetNodeRequest, layers: range | None, timeout_s: float
    ) -> None:
        self._paths = paths
        self._request = request
        self._node_id = request.node_id
        self._deadline = time.monotonic() + timeout_s
        self._attempt, self.generation = "", 0
        self._location: Location | None = None
        self._direct: Iterator[bytes] | None = None
        self._open_stream(request)
        try:
            self._accept(self._header, layers)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[tuple[int, memoryview]]:
        """Yield (segment index, payload) in read order, each verified.

        Raises:
            NodeMissingError: if the node vanished meanwhile.
            CorruptNodeError: if a segment is damaged; the node has then been dropped.
            StoreUnavailableError: if neither path can go on.
        """
        done = 0
        if self._location is not None:
            try:
                for found in self._read_direct(self._location):
                    done += 1
                    yield found
                return
            except CorruptNodeError:
                raise
            except DirectClosed:
                self._reopen(done, _changed(self._node_id))
            except NodeMissingError as error:
                # A replica may lag behind: the store decides, and drops what is gone.
                self._reopen(done, NodeMissingError.of(self._node_id, error.message))
        for expected in self._order[done:]:
            yield expected, self._verified(expected, self._next_frame())
        self._expect_end()

    def close(self) -> None:
        """Cancel what was not read. Idempotent."""
        self._stream.cancel()
        if self._direct is not None:
            self._direct.close()  # type: ignore[attr-defined]

    # --------------------------------------------------------------- header

    def _open_stream(self, request: pb.GetNodeRequest) -> None:
        """Start GetNode and keep its header."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError("the read did not finish before its deadline")
        with self._paths.begin(left):
            self._stream = self._paths.stream(request, left)
            try:
                data = self._next_frame()
            except BaseException:
                self.close()
                raise
        frame, _ = self._decoded(data)
        if not frame.HasField("header"):
            self._refuse("the stream does not begin with a header")
        self._header = frame.header

    def _accept(self, header: pb.GetHeader, layers: range | None) -> None:
        self.tier, self.generation = header.tier, header.generation
        try:
            self.manifest = decode_manifest(header.manifest_parts)
        except CorruptNodeError as error:
            # The store could read it. It may be of a newer version: no reason to drop it.
            raise CorruptNodeError.of(self._node_id, error.message) from error
        self._attempt = self.manifest.attempt
        if self.manifest.node_id != self._node_id:
            self._refuse("the manifest is of another node")
        if self.tier not in self.manifest.tiers:
            self._refuse("the tier served is not stored")
        self._order = self.manifest.read_order(
            self.tier, range(self.manifest.num_layers) if layers is None else layers
        )
        if header.segment_count != len(self._order):
            self._refuse("the stream has a wrong number of segments")
        if self._paths.direct is not None and header.HasField("location"):
            self._locate(self._paths.direct, header.location)

    def _locate(self, direct: DirectReads, offered: pb.RedisLocation) -> None:
        self._location = direct.location(offered)
        if self._location is None:
            self._reopen(0, _changed(self._node_id))

    # --------------------------------------------------------------- direct

    def _read_direct(self, location: Location) -> Iterator[tuple[int, memoryview]]:
        assert self._paths.direct is not None
        wanted = [
            Wanted.of(self._node_id, self._attempt, i, self.manifest.segment_bytes(i))
            for i in self._order
        ]
        self._direct = frames = self._paths.direct.frames(location, wanted, self._deadline)
        for expected, frame in zip(self._order, frames, strict=True):
            yield expected, self._verified(expected, frame)

    def _reopen(self, done: int, changed: CriticalKVError) -> None:
        """Go on through the store: the same generation, from the first segment not yet read.

        Args:
            changed: raised if it has another generation by now.
        """
        request = pb.GetNodeRequest()
        request.CopyFrom(self._request)
        request.direct, request.tier, request.byte_limit = False, self.tier, 0
        self._stream.cancel()
        self._open_stream(request)
        frame = self._header
        if (frame.generation, frame.tier) != (self.generation, self.tier) or (
            frame.segment_count != len(self._order)
        ):
            self.close()
            raise changed
        for _ in range(done):
            self._next_frame()

    # ------------------------------------------------------------- segments

    def _next_frame(self) -> bytes:
        try:
            frame: bytes = next(self._stream)
        except StopIteration:
            self._refuse("the stream ended early")
        except grpc.RpcError as error:
            raise typed_error(error, self._node_id) from error
        return frame

    def _verified(self, expected: int, data: bytes) -> memoryview:
        frame, payload = self._decoded(failpoints.through("client.get.frame", data))
        if not frame.HasField("segment") or frame.segment.index != expected:
            self._refuse(f"segment {expected} is missing from the stream")
        try:
            verify_segment(self.manifest, expected, payload)
        except CorruptNodeError as error:
            self._refuse(error.message)
        return payload

    def _decoded(self, data: bytes) -> tuple[pb.GetFrame, memoryview]:
        try:
            return decode_get(data)
        except FrameError as error:
            self._refuse(str(error))

    def _expect_end(self) -> None:
        try:
            next(self._stream)
        except StopIteration:
            return
        except grpc.RpcError as error:
            raise typed_error(error, self._node_id) from error
        self._refuse("the stream has more segments than announced")

    def _refuse(self, why: str) -> NoReturn:
        # Damaged for us is damaged for all: dropped, unless a newer writer replaced it.
        # Before the header nothing says which attempt it is: then it may be a newer
        # version's, which only we cannot read.
        self.close()
        if self._attempt:
            self._drop()
        raise CorruptNodeError.of(self._node_id, why)

    def _drop(self) -> None:
        try:
            self._paths.drop(self._node_id, self._attempt, self.generation)
        except CriticalKVError as error:
            log.warning("cannot drop the damaged node %s: %s", self._node_id[:16], error)


def _changed(node_id: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        "the node changed while its read went over to another path",
        param=node_id,
        retry_after_s=0.0,
    )
