"""Put a better node in an old one's place: compute it, then lead handles to it.

The old node stays: whoever reads it, or went on from it, can go on. What is computed in its
place is linked to it: when it is removed, so is that, unless something refers to it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.async_store import AsyncStore
from criticalkv.services.gateway.background import Background, Job, Outcome
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.nodes import Node, Want
from criticalkv.services.gateway.plan import Made, Planner, Provisional
from criticalkv.shared.errors import ContextNotFoundError, CriticalKVError, NodeMissingError
from criticalkv.shared.identity import NodeId

Moved = pb.MoveHandleResponse.Outcome | None
MOVED = pb.MoveHandleResponse.MOVED

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bound:
    """A handle on the old node.

    Attributes:
        metadata: what it carries on the new one; None = the same.
        alias: digest of the transcript that should lead where it leads; None = none.
    """

    tenant: str
    handle: str
    metadata: bytes | None = None
    alias: str | None = None


@dataclass
class Swap:
    """A job: one better node.

    Attributes:
        old: the node that it is better than.
        policy: what it is computed under.
        store_tier: highest tier that is stored of it.
        compute: publishes it, and notes what it computes.
        handles: those to lead to it.
        replaced: older nodes whose swaps this one makes pointless.
        ttl_ms: how long it is to live at least; 0 = the store's default.
    """

    kind: Literal["refine", "fold"]
    old: NodeId
    policy: str
    store_tier: str
    store: AsyncStore
    compute: Callable[[Deadline, Made], Awaitable[Node]]
    handles: list[Bound] = field(default_factory=list)
    replaced: frozenset[NodeId] = frozenset()
    ttl_ms: int = 0

    @property
    def key(self) -> str:
        """Old node, policy and tier: they say what is computed."""
        return key_of(self.kind, self.old, self.policy, self.store_tier)

    def join(self, other: Job) -> None:
        """Also lead another job's handles."""
        assert isinstance(other, Swap)
        self.handles += [bound for bound in other.handles if bound not in self.handles]
        self.ttl_ms = max(self.ttl_ms, other.ttl_ms)

    def replaces(self, other: Job) -> bool:
        """Whether the other's conversation has gone on to this one's."""
        return isinstance(other, Swap) and other.kind == self.kind and other.old in self.replaced

    async def run(self, deadline: Deadline) -> Outcome:
        """Compute, then move; have what nobody needs removed, however it ends."""
        made, outcomes = Made(self.store, self.old), list[Moved]()
        kept = False
        try:
            new = await self.compute(deadline, made)
            await self._lead_all(new.id, outcomes)
            # A whole conversation that no handle was led to helps nobody.
            kept = self.kind == "refine" or MOVED in outcomes
        except NodeMissingError:
            if await self._deleted():
                raise _gone() from None
            raise
        finally:
            if not kept:
                await self._clean_up(made)
        return "done" if MOVED in outcomes or not outcomes else "unused"

    async def _lead_all(self, new: NodeId, outcomes: list[Moved]) -> None:
        """Lead the handles to the new node, those of jobs that join meanwhile, too."""
        while True:
            for bound in self.handles[len(outcomes) :]:
                outcomes.append(await self._move(bound, new))
                if bound.alias is not None and outcomes[-1] == MOVED:
                    await self.store.put_alias(bound.alias, new, ())
            if self.ttl_ms:
                await self.store.touch(new, self.ttl_ms)
            if MOVED not in outcomes and await self._deleted():
                raise _gone()
            if len(outcomes) == len(self.handles):  # none has joined meanwhile
                return

    async def _clean_up(self, made: Made) -> None:
        """Have what was computed removed, unless it is there for a context that still is."""
        try:
            if made.ids and (self.kind == "fold" or await self._deleted()):
                self.store.leftovers.add(made.ids)
        except CriticalKVError as error:
            log.warning("what was computed for %s stays: %s", self.old[:16], error.code)

    async def _move(self, bound: Bound, to: NodeId) -> Moved:
        """Return what became of a handle; None if it is gone."""
        try:
            return await self.store.move_handle(
                bound.tenant, bound.handle, self.old, to, bound.metadata
            )
        except ContextNotFoundError:
            return None

    async def _deleted(self) -> bool:
        return (await self.store.token_records([self.old]))[0] is None


class Swapper:
    """Starts swaps in the background. No method waits, and no request needs its success."""

    def __init__(
        self, store: AsyncStore, planner: Planner, background: Background, fold_after: int
    ) -> None:
        self._store = store
        self._planner = planner
        self._background = background
        self._fold_after = fold_after

    def refine(self, cheap: Provisional | None, handles: Iterable[Bound] = ()) -> None:
        """Have a chain's end computed under the policy that it is wanted under."""
        if cheap is None:
            return
        self._background.submit(
            Swap(
                kind="refine",
                old=cheap.leaf,
                policy=cheap.want.policy,
                store_tier=cheap.want.store_tier,
                store=self._store,
                compute=lambda deadline, made: self._planner.refine(cheap, deadline, made),
                handles=list(handles),
                ttl_ms=cheap.want.ttl_ms,
            )
        )

    def refines(self, node_id: NodeId, policy: str, store_tier: str) -> bool:
        """Whether a node waits here for its better version."""
        return self._background.has(key_of("refine", node_id, policy, store_tier))

    def fold(
        self,
        leaf: NodeId,
        ancestors: tuple[NodeId, ...],
        want: Want,
        handle: Bound,
    ) -> None:
        """Have a chain computed as one node, if it is long."""
        if not self._fold_after or len(ancestors) + 1 <= self._fold_after:
            return
        self._background.submit(
            Swap(
                kind="fold",
                old=leaf,
                policy=want.policy,
                store_tier=want.store_tier,
                store=self._store,
                compute=lambda deadline, made: self._planner.fold(leaf, want, deadline, made),
                handles=[handle],
                replaced=frozenset(ancestors),
                ttl_ms=want.ttl_ms,
            )
        )


def key_of(kind: str, old: NodeId, policy: str, store_tier: str) -> str:
    """Return a swap's key."""
    return f"{kind}:{old}:{policy}:{store_tier}"


def _gone() -> ContextNotFoundError:
    return ContextNotFoundError("the context was deleted meanwhile")
