"""Put a better node in an old one's place: compute it, then lead handles to it.

The old node stays: whoever reads it, or went on from it, can go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.async_store import AsyncStore
from criticalkv.services.gateway.background import Background, Job, Outcome
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.nodes import Node, Want
from criticalkv.services.gateway.plan import Planner, Provisional
from criticalkv.shared.errors import ContextNotFoundError
from criticalkv.shared.identity import NodeId

Moved = pb.MoveHandleResponse.Outcome | None
MOVED = pb.MoveHandleResponse.MOVED


@dataclass(frozen=True)
class Bound:
    """A handle on the old node; what it carries on the new one (None = the same)."""

    tenant: str
    handle: str
    metadata: bytes | None = None


@dataclass
class Swap:
    """A job: one better node.

    Attributes:
        old: the node that it is better than.
        policy: what it is computed under.
        compute: publishes it.
        handles: those to lead to it.
        replaced: older nodes whose swaps this one makes pointless.
        alias: digest of the transcript that should lead to it; None = no alias.
    """

    kind: Literal["refine", "fold"]
    old: NodeId
    policy: str
    store: AsyncStore
    compute: Callable[[Deadline], Awaitable[Node]]
    handles: list[Bound] = field(default_factory=list)
    replaced: frozenset[NodeId] = frozenset()
    alias: str | None = None

    @property
    def key(self) -> str:
        """Old node and policy: they say which node is computed."""
        return key_of(self.kind, self.old, self.policy)

    def join(self, other: Job) -> None:
        """Also lead another job's handles."""
        assert isinstance(other, Swap)
        self.handles += [bound for bound in other.handles if bound not in self.handles]

    def replaces(self, other: Job) -> bool:
        """Whether the other's conversation has gone on to this one's."""
        return isinstance(other, Swap) and other.kind == self.kind and other.old in self.replaced

    async def run(self, deadline: Deadline) -> Outcome:
        """Compute, then move; remove what was computed for a context that is gone."""
        new = await self.compute(deadline)
        outcomes: list[Moved] = []
        while True:
            for bound in self.handles[len(outcomes) :]:
                outcomes.append(await self._move(bound, new.id))
            await self._conclude(new.id, outcomes)
            if len(outcomes) == len(self.handles):  # none has joined meanwhile
                return "done" if MOVED in outcomes or not outcomes else "unused"

    async def _conclude(self, new: NodeId, outcomes: Sequence[Moved]) -> None:
        if MOVED not in outcomes and await self._deleted():
            await self.store.delete_unreferenced(new)
            raise ContextNotFoundError("the context was deleted meanwhile")
        if self.alias is not None and set(outcomes) - {None}:
            await self.store.put_alias(self.alias, new, ())

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
                store=self._store,
                compute=lambda deadline: self._planner.refine(cheap, deadline),
                handles=list(handles),
            )
        )

    def refines(self, node_id: NodeId, policy: str) -> bool:
        """Whether a node waits here for its better version."""
        return self._background.has(key_of("refine", node_id, policy))

    def fold(
        self,
        leaf: NodeId,
        ancestors: tuple[NodeId, ...],
        want: Want,
        handle: Bound,
        alias: str | None,
    ) -> None:
        """Have a chain computed as one node, if it is long."""
        if not self._fold_after or len(ancestors) + 1 <= self._fold_after:
            return
        self._background.submit(
            Swap(
                kind="fold",
                old=leaf,
                policy=want.policy,
                store=self._store,
                compute=lambda deadline: self._planner.fold(leaf, want, deadline),
                handles=[handle],
                replaced=frozenset(ancestors),
                alias=alias,
            )
        )


def key_of(kind: str, old: NodeId, policy: str) -> str:
    """Return a swap's key."""
    return f"{kind}:{old}:{policy}"
