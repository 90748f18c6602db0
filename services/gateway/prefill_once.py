"""Compute a missing node exactly once, however many requests want it."""

from __future__ import annotations

import asyncio
import logging

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.async_store import AsyncStore
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.lease import keep
from criticalkv.services.gateway.metrics import Metrics
from criticalkv.services.gateway.nodes import enough
from criticalkv.services.gateway.workers import Workers
from criticalkv.shared.errors import (
    LeaseLostError,
    NodeMissingError,
    OverloadedError,
    WorkerLostError,
)
from criticalkv.shared.identity import NodeId
from criticalkv.shared.requests import PrefillRequest, PrefillResult

LEASE_MS = 15_000
RENEW_S = 5.0  # a lease is short, so that a gateway's death blocks nobody for long
POLL_S = (0.02, 0.5)  # first and longest pause of a waiter
ATTEMPTS = 2

log = logging.getLogger(__name__)


class Prefiller:
    """Runs prefills under the store's leases."""

    def __init__(self, store: AsyncStore, workers: Workers, metrics: Metrics) -> None:
        self._store = store
        self._workers = workers
        self._metrics = metrics
        self._background: dict[NodeId, asyncio.Task[PrefillResult]] = {}

    async def ensure(
        self, request: PrefillRequest, at_least: str | None, deadline: Deadline
    ) -> tuple[pb.NodeStat, PrefillResult | None]:
        """Return the node, once it is stored up to `at_least`.

        The result is None if the node was there or somebody else computed it. A node
        that this call computed is taken as it is, even if it stops below `at_least`.
        A background run of the node ends for a request that is waited for: it may be
        standing back for others.

        Raises:
            DeadlineError: if it does not appear in time.
            NodeMissingError: if it vanishes right after it was computed, repeatedly.
            OverloadedError: if a background run made room for others.
        """
        pause, attempts = POLL_S[0], 0
        while True:
            stat = (await self._store.stat([request.node_id]))[0]
            if stat.present and enough(stat.tiers, at_least):
                return stat, None
            lease = await self._store.acquire_lease(request.node_id, LEASE_MS)
            if lease.acquired:
                found = await self._leased(request, lease.lease_token, at_least, deadline)
                if found is not None:
                    return found
                attempts += 1
                if attempts >= ATTEMPTS:
                    raise NodeMissingError.of(request.node_id, "lost right after its prefill")
            elif not request.background and (task := self._background.get(request.node_id)):
                task.cancel()
            await asyncio.sleep(min(pause, deadline.remaining()))
            pause = min(2 * pause, POLL_S[1])

    async def _leased(
        self, request: PrefillRequest, token: str, at_least: str | None, deadline: Deadline
    ) -> tuple[pb.NodeStat, PrefillResult | None] | None:
        renewal = keep(
            lambda: self._store.renew_lease(request.node_id, LEASE_MS, token), RENEW_S, deadline
        )
        try:
            # Its last holder may have published between our look and our lease.
            stat = (await self._store.stat([request.node_id]))[0]
            if stat.present and enough(stat.tiers, at_least):
                return stat, None
            result = await self._run(request, token, deadline)
        except LeaseLostError:
            log.info("lease of %s was lost; looking again", request.node_id[:16])
            return None
        finally:
            renewal.cancel()
            await self._store.release_lease(request.node_id, token)
        stat = (await self._store.stat([request.node_id]))[0]
        return (stat, result) if stat.present else None

    async def _run(self, request: PrefillRequest, token: str, deadline: Deadline) -> PrefillResult:
        """Call the worker; once more if it dies."""
        for last in (False, True):
            leased = request.model_copy(
                update={"lease_token": token, "deadline_s": deadline.remaining()}
            )
            try:
                result = await deadline.bound(self._call(leased))
            except WorkerLostError:
                if last:
                    raise
                continue
            self._metrics.prefilled(len(request.token_ids), result.total_ms)
            if result.quality:
                self._metrics.quality(result.quality)
            return result
        raise AssertionError("unreachable")

    async def _call(self, request: PrefillRequest) -> PrefillResult:
        if not request.background:
            return await self._workers.prefill(request)
        task = asyncio.create_task(self._prefill(request))
        self._background[request.node_id] = task
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            del self._background[request.node_id]
            # Its failure is taken here, or asyncio would log it, text and all.
            await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            raise OverloadedError("a background prefill made room for others", retry_after_s=1.0)
        return task.result()

    async def _prefill(self, request: PrefillRequest) -> PrefillResult:
        return await self._workers.prefill(request)
