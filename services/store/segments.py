"""Segments in Redis: the payload frames, moved by blocking sockets in a few threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

from criticalkv.services.store import keys
from criticalkv.shared import failpoints
from criticalkv.shared.frames import segment_head
from criticalkv.shared.resp import DataClient

THREADS = 8
_T = TypeVar("_T")


class Segments:
    """Reads and writes frames of segments without blocking the event loop."""

    def __init__(self, pool: DataClient) -> None:
        self._pool = pool
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store-data")

    def close(self) -> None:
        """Wait for running operations and close the connections."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._pool.close()

    def write(
        self,
        node_id: str,
        attempt: str,
        first: int,
        frames: Sequence[tuple[bytes, memoryview]],
        ttl_ms: int,
    ) -> asyncio.Future[list[int]]:
        """Store consecutive segments and return the checksums of their payloads.

        Args:
            first: index of the first frame.
            frames: (frame as kept, view of its payload) each.
            ttl_ms: lease of the segments.
        """
        items = [
            (keys.segment(node_id, attempt, first + i), frame)
            for i, (frame, _) in enumerate(frames)
        ]

        def work() -> list[int]:
            kept = [(key, failpoints.through("store.segment.write", frame)) for key, frame in items]
            self._pool.set_many(kept, ttl_ms)
            return [xxhash.xxh3_64_intdigest(payload) for _, payload in frames]

        return self._run(work)

    def read(
        self, node_id: str, attempt: str, wanted: Sequence[tuple[int, int]]
    ) -> asyncio.Future[list[bytes | None]]:
        """Read segments, as frames; None where one is gone or is not what was asked.

        Args:
            wanted: (index, payload bytes) each.
        """
        heads = [segment_head(index, nbytes) for index, nbytes in wanted]
        items = [
            (keys.segment(node_id, attempt, index), len(head) + nbytes)
            for (index, nbytes), head in zip(wanted, heads, strict=True)
        ]

        def work() -> list[bytes | None]:
            frames = map(_read, self._pool.get_many(items))
            return [
                frame if frame is not None and frame.startswith(head) else None
                for frame, head in zip(frames, heads, strict=True)
            ]

        return self._run(work)

    def _run(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)


def _read(frame: bytes | None) -> bytes | None:
    return frame if frame is None else failpoints.through("store.segment.read", frame)
