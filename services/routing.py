"""Which decode replica gets a turn: one that holds its context, while that is fair.

A hint, never needed for correctness: a replica that does not hold a node pulls it from
the store. Runs in the processes that hold Serve handles, pickled by value: imports
nothing of ours.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from ray.serve._private.common import ReplicaID, RequestMetadata
from ray.serve._private.replica_result import ReplicaResult
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.replica_wrapper import RunningReplica

# A request, and the replicas that are meant for it and for no other.
Choice = tuple[PendingRequest, list[ReplicaID]]
REMEMBERED = 4096  # nodes whose last replica is remembered here


class ResidentRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's own router, with a preference in front.

    A request's nodes are `parent` and `ancestors_hint` of its first argument, a replica's
    are `nodes` in its routing stats. Stats lag behind, so where a node was last sent counts
    too. Without either this is Serve's own router.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the settings; called once by Serve.

        Args:
            slack: by how many requests a preferred replica may exceed the least loaded.
        """
        self._slack: int = kwargs["slack"]
        self._resident: dict[ReplicaID, frozenset[str]] = {}
        self._sent: OrderedDict[str, ReplicaID] = OrderedDict()
        self._choices: WeakKeyDictionary[asyncio.Task[Any], Choice] = WeakKeyDictionary()
        # Calls end in other threads, hence the lock.
        self._lock = threading.Lock()
        self._given: Counter[ReplicaID] = Counter()
        self._promised: Counter[ReplicaID] = Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note what each replica says it holds."""
        super().update_replicas(replicas)
        self._resident = {r.replica_id: _resident(r.routing_stats) for r in replicas}
        with self._lock:
            self._given = Counter({k: n for k, n in self._given.items() if k in self._replicas})

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the preferred replicas, if any, and then those of Serve's own choice."""
        preferred = await self._preferred(pending_request)
        ranks: list[list[RunningReplica]] = await super().choose_replicas(
            candidate_replicas, pending_request
        )
        task = asyncio.current_task()
        if task is not None:
            self._choices.pop(task, None)
            if preferred and pending_request is not None:
                self._choices[task] = (pending_request, [r.replica_id for r in preferred])
        return [preferred, *ranks] if preferred else ranks

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        replica: RunningReplica = await super()._choose_replica_for_request(
            pending_request, is_retry=is_retry
        )
        self._count(replica.replica_id, 1)
        return replica

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Correct Serve's count, but keep what is on its way: the replica cannot know it."""
        with self._lock:
            given = self._given[replica_id]
        super().on_new_queue_len_info(replica_id, max(num_ongoing_requests, given))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count down; Serve calls it once for each choice, however it ended."""
        super().on_request_completed(replica_id, internal_request_id)
        self._count(replica_id, -1)

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        """Count down in Serve's count, too, and do not trust what is left of it.

        A replica's answer includes requests whose end was counted before it came. Without
        another request nothing would correct that: better ask.
        """
        super().decrement_queue_len_cache(replica_id)
        if not self._given[replica_id] and self._replica_queue_len_cache.get(replica_id):
            self._replica_queue_len_cache.invalidate_key(replica_id)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Remember who got these nodes."""
        super().on_request_routed(pending_request, replica_id, result)
        for node in _nodes(pending_request):
            self._sent[node] = replica_id
            self._sent.move_to_end(node)
        while len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: RequestMetadata | None = None
    ) -> None:
        """Give a preferred replica to the request that prefers it, else to the oldest."""
        task = asyncio.current_task()
        own, meant = self._choices.get(task, (None, [])) if task is not None else (None, [])
        if own is None or own.future.done() or replica.replica_id not in meant:
            super()._fulfill_next_pending_request(replica, request_metadata)
            return
        self._record_queue_wait_time(own)
        own.future.set_result(replica)
        self._remove_pending_request_from_indices(own)
        # Counted here until the one who waits has woken up, and counts it as given.
        self._promised[replica.replica_id] += 1
        self._event_loop.call_soon(self._promised.subtract, [replica.replica_id])

    def _count(self, replica_id: ReplicaID, change: int) -> None:
        with self._lock:
            self._given[replica_id] = max(0, self._given[replica_id] + change)

    async def _preferred(self, request: PendingRequest | None) -> list[RunningReplica]:
        """Return the holders that are not too busy, or else the least busy replicas."""
        holders = self._holders(request)
        if not holders or len(self._replicas) < 2:
            return []
        lengths = await self._lengths()
        least = min(lengths.values(), default=0)
        fair = [key for key in holders if lengths.get(key, 0) <= least + self._slack]
        # Not left to Serve: of many that come at once it sends all to one replica.
        chosen = fair or [key for key, length in lengths.items() if length == least]
        replicas = [self._replicas[key] for key in chosen if key in self._replicas]
        return [r for r in replicas if lengths.get(r.replica_id, 0) < r.max_ongoing_requests]

    def _holders(self, request: PendingRequest | None) -> list[ReplicaID]:
        """Return the replicas that hold the node nearest to the request's end."""
        for node in _nodes(request) if request is not None else ():
            sent = self._sent.get(node)
            holders = [
                key
                for key in self._replicas
                if key == sent or node in self._resident.get(key, frozenset())
            ]
            if holders:
                return holders
        return []

    async def _lengths(self) -> dict[ReplicaID, int]:
        """Return how many requests each replica has; ask those that are not known.

        Other handles' requests are in Serve's count only. Of a replica that does not answer
        in time this handle's own count.
        """
        cache = self._replica_queue_len_cache
        unknown = [r for key, r in self._replicas.items() if cache.get(key) is None]
        if unknown:
            await self._probe_queue_lens(unknown, 0)
        with self._lock:
            given = dict(self._given)
        return {
            key: max(cache.get(key) or 0, given.get(key, 0)) + self._promised[key]
            for key in self._replicas
        }


def _nodes(request: PendingRequest) -> Iterator[str]:
    """Yield the request's nodes, from its end to the root."""
    asked = request.args[0] if request.args else None
    parent = getattr(asked, "parent", None)
    if isinstance(parent, str):
        yield parent
        yield from reversed(getattr(asked, "ancestors_hint", ()))


def _resident(stats: Any) -> frozenset[str]:
    nodes = stats.get("nodes") if isinstance(stats, dict) else None
    return frozenset(nodes) if isinstance(nodes, list | tuple) else frozenset()
