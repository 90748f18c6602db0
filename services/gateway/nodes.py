"""Nodes as the gateway sees them: names, stored tiers, chain. No KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Protocol

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.async_store import AsyncStore
from criticalkv.shared.errors import NodeMissingError, PolicyError
from criticalkv.shared.eviction.policy import Policy, codec_of
from criticalkv.shared.identity import POLICY_DENSE, Identity, NodeId, resolve_tier, tokens_digest


class Model(Protocol):
    """What the gateway needs to know of the served model."""

    @property
    def name(self) -> str: ...
    @property
    def model_digest(self) -> str: ...
    @property
    def tokenizer_digest(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class Want:
    """How a request wants its nodes.

    Attributes:
        policy: canonical; of the nodes that are wanted.
        first_policy: cheap one under which a missing node is computed for now, and that a
            stored node may have where the wanted one is missing; None = wait for `policy`.
        store_tier: highest tier to store of them.
        read_tier: tier to read every ancestor at; None = the highest stored.
        at_least: lowest top tier with which a stored node will do; None = any.
        turn_policy: canonical; of the turn to come, "dense" or stepwise.
        known: nodes that an earlier attempt of the same request went on from; they are
            taken before any other.
        tenant: digest of whose quota new nodes count against.
    """

    policy: str
    store_tier: str
    salt: str
    read_tier: str | None = None
    at_least: str | None = None
    ttl_ms: int = 0
    turn_policy: str = POLICY_DENSE
    first_policy: str | None = None
    known: frozenset[NodeId] = frozenset()
    tenant: str = ""

    @property
    def settled(self) -> Want:
        """The same without anything provisional."""
        return replace(self, first_policy=None, known=frozenset())

    @property
    def choices(self) -> list[Want]:
        """What will do, the best first."""
        first = self.first_policy
        return [self.settled, *([] if first is None else [replace(self.settled, policy=first)])]


@dataclass(frozen=True)
class Node:
    """A stored node that is the end of a chain.

    Attributes:
        ancestors: ids, root first, without the node itself.
        chain_tiers: stored tiers of each ancestor and, last, of the node.
        pending_ids: tokens that the next turn must run first.
        next_position: original length of the whole chain.
        chain_policies: policy of each ancestor and, last, of the node.
    """

    id: NodeId
    ancestors: tuple[NodeId, ...]
    chain_tiers: tuple[tuple[str, ...], ...]
    pending_ids: tuple[int, ...]
    next_position: int
    chain_policies: tuple[str, ...] = ()

    @property
    def chain(self) -> tuple[NodeId, ...]:
        """Ids from the root to the node itself: a child's ancestors."""
        return (*self.ancestors, self.id)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Stored tiers, ascending."""
        return self.chain_tiers[-1]

    @property
    def policy(self) -> str:
        """Policy of the last compressed context in the chain; "dense" if there is none."""
        contexts = (p for p in reversed(self.chain_policies) if is_context(p))
        return next(contexts, POLICY_DENSE)

    def view(self, read_tier: str | None) -> tuple[str, ...]:
        """Return the tier each node of the chain is read at: a child's view."""
        return tuple(resolve_tier(tiers, read_tier) for tiers in self.chain_tiers)

    def views(self, read_tier: str | None) -> list[tuple[str, ...]]:
        """Return the view of `read_tier`, then the higher ones that the chain can give."""
        found = [self.view(read_tier)]
        if read_tier is not None:
            higher = {
                t for tiers in self.chain_tiers for t in tiers if Decimal(t) > Decimal(read_tier)
            }
            for tier in sorted(higher, key=Decimal):
                if (view := self.view(tier)) not in found:
                    found.append(view)
        return found


def child_identity(
    model: Model, parent: Node | None, view: Sequence[str], token_ids: Sequence[int], want: Want
) -> Identity:
    """Return the identity of a compressed node after `parent`."""
    return Identity(
        model_digest=model.model_digest,
        tokenizer_digest=model.tokenizer_digest,
        dtype=model.dtype,
        codec=codec_of(want.policy),
        policy=want.policy,
        salt=want.salt,
        parent=parent.id if parent else None,
        view=tuple(view),
        tokens=tokens_digest(token_ids),
    )


def is_context(policy: str) -> bool:
    """Whether a policy is one of contexts; turns are dense or stepwise.

    One that this version cannot read any more counts as a context's.
    """
    return policy != POLICY_DENSE and not is_stepwise(policy, otherwise=False)


def is_stepwise(policy: str, *, otherwise: bool) -> bool:
    """Whether a stored policy is stepwise; `otherwise` if another version wrote it."""
    try:
        return Policy.parse(policy).is_stepwise
    except PolicyError:
        return otherwise


def is_ours(policy: str) -> bool:
    """Whether a stored policy means, to the letter, what it meant when it was stored."""
    try:
        return policy == POLICY_DENSE or Policy.parse(policy).canonical() == policy
    except PolicyError:
        return False


def codec_named(policy: str | None) -> str | None:
    """Return the codec of a stored policy; None without one, or if another version wrote it."""
    try:
        return None if policy is None else codec_of(policy)
    except PolicyError:
        return None


def enough(tiers: Sequence[str], at_least: str | None) -> bool:
    """Whether stored tiers reach the wanted one."""
    return at_least is None or Decimal(tiers[-1]) >= Decimal(at_least)


async def read_node(store: AsyncStore, node_id: NodeId) -> Node:
    """Look a node and its ancestors up.

    Raises:
        NodeMissingError: if one of them is not there.
    """
    stat = (await store.stat([node_id]))[0]
    if not stat.present:
        raise NodeMissingError.of(node_id, "absent")
    return await with_ancestors(store, stat)


async def with_ancestors(store: AsyncStore, stat: pb.NodeStat) -> Node:
    """Complete a stat with the tiers of the ancestors.

    Raises:
        NodeMissingError: if an ancestor is not there.
    """
    ancestors = await store.stat(list(stat.ancestors)) if stat.ancestors else []
    for ancestor in ancestors:
        if not ancestor.present:
            raise NodeMissingError.of(ancestor.node_id, "absent")
    return Node(
        id=stat.node_id,
        ancestors=tuple(stat.ancestors),
        chain_tiers=(*(tuple(a.tiers) for a in ancestors), tuple(stat.tiers)),
        pending_ids=tuple(stat.pending_ids),
        next_position=stat.next_position,
        chain_policies=(*(a.policy for a in ancestors), stat.policy),
    )


def length_of(stat: pb.NodeStat) -> int:
    """Return the tokens of a node's whole chain, what its end left pending included."""
    return int(stat.next_position) + len(stat.pending_ids)


def child_node(parent: Node | None, stat: pb.NodeStat) -> Node:
    """Make a node of a stat whose parent is known."""
    return Node(
        id=stat.node_id,
        ancestors=parent.chain if parent else (),
        chain_tiers=(*(parent.chain_tiers if parent else ()), tuple(stat.tiers)),
        pending_ids=tuple(stat.pending_ids),
        next_position=stat.next_position,
        chain_policies=(*(parent.chain_policies if parent else ()), stat.policy),
    )
