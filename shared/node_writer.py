"""Writing one node to the store, frame by frame."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.shared import failpoints
from criticalkv.shared.breaker import Passage
from criticalkv.shared.cache.manifest import Manifest, encode_manifest
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.closing import Closing
from criticalkv.shared.errors import CancelledError, StoreUnavailableError
from criticalkv.shared.frames import Buffer, encode_segment
from criticalkv.shared.store_channel import typed_error

QUEUED_FRAMES = 4
"""Frames that a writer may be ahead of the network, 1 MiB each."""
CHECK_S = 0.1
"""How often a waiting writer looks whether it should go on."""


class NodeWriter(Closing):
    """Writes one node. Leaving the context without `commit` publishes nothing.

    Not for several threads at once.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        metadata: list[tuple[str, str]],
        begin: pb.PutBegin,
        timeout_s: float,
        passage: Passage,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._node_id = begin.node_id
        self._check = check
        self._passage = passage
        # Two queues in C, frames and places for them, cost a fraction of one bounded queue.
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for _ in range(QUEUED_FRAMES):
            self._places.put(None)
        self._ended = threading.Event()
        self._count = 0
        self._committed = False
        self._queue.put(pb.PutFrame(begin=begin).SerializeToString())
        self._future = call.future(self._frames(), timeout=timeout_s, metadata=metadata)  # type: ignore[attr-defined]
        self._future.add_done_callback(lambda _: self._end())

    def send(self, payload: Buffer) -> None:
        """Send the next segment; the buffer may be reused afterwards.

        Blocks while the network is more than a few frames behind.

        Raises:
            CriticalKVError: the typed error of the stream, if it has failed.
            Exception: whatever `check` raised; the put is aborted.
        """
        frame = encode_segment(self._count, payload)
        self._enqueue(failpoints.through("client.put.frame", frame))
        self._count += 1

    def commit(
        self, manifest: Manifest, token_record: TokenRecord, *, ttl_ms: int = 0
    ) -> pb.PutResult:
        """Publish the node and wait for the store's answer.

        Args:
            manifest: names exactly the segments that were sent.
            token_record: the node's tokens and identity.
            ttl_ms: life of the node; 0 = the store's default.

        Raises:
            LeaseLostError: if another holds the node's lease by now.
            StoreFullError: if the node does not fit.
            InvalidRequestError: if manifest and segments differ.
            NodeMissingError: if the parent was deleted meanwhile.
            Exception: whatever `check` raised. The put is aborted, but the node may have
                been published at that moment.
        """
        commit = pb.PutCommit(
            segment_count=self._count,
            manifest_parts=encode_manifest(manifest),
            token_record=token_record.encode(),
            ttl_ms=ttl_ms,
        )
        self._enqueue(pb.PutFrame(commit=commit).SerializeToString())
        self._committed = True
        self._enqueue(None)
        return self._result()

    def close(self) -> None:
        """Cancel the put unless it was committed. Idempotent."""
        if not self._committed:
            self._future.cancel()
        self._end()

    def _enqueue(self, frame: bytes | None) -> None:
        while not self._ended.is_set():
            try:
                self._places.get(timeout=CHECK_S)
            except queue.Empty:
                self._look()
            else:
                self._queue.put(frame)
                return
        if frame is not None:
            self._result()
            raise StoreUnavailableError("the put has ended already")

    def _result(self) -> pb.PutResult:
        while True:
            try:
                result: pb.PutResult = self._future.result(CHECK_S)
            except grpc.FutureTimeoutError:
                self._look()
            except grpc.FutureCancelledError as error:
                raise CancelledError("the put was cancelled") from error
            except grpc.RpcError as error:
                raise typed_error(error, self._node_id) from error
            else:
                return result

    def _look(self) -> None:
        try:
            if self._check is not None:
                self._check()
        except BaseException:
            self._future.cancel()
            self._end()
            raise

    def _frames(self) -> Iterator[bytes]:
        # Runs in a thread of gRPC. Nothing but the end of the call stops it early.
        while not self._ended.is_set():
            try:
                frame = self._queue.get(timeout=0.5)
            except queue.Empty:
                continue
            if frame is None:
                return
            yield frame
            self._places.put(None)

    def _end(self) -> None:
        self._ended.set()
        self._judge()

    def _judge(self) -> None:
        if not self._future.done() or self._future.cancelled():
            self._passage.close()
        elif (error := self._future.exception()) is None:
            self._passage.answered()
        else:
            self._passage.failed(typed_error(error))
