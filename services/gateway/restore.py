"""Rebuild lost KV from token records, down the chain, at the recorded views."""

from __future__ import annotations

from collections.abc import Sequence, Set
from decimal import Decimal

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.async_store import AsyncStore
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.nodes import (
    Model,
    Node,
    codec_named,
    enough,
    is_ours,
    read_node,
)
from criticalkv.services.gateway.prefill_once import Prefiller
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.errors import ContextExpiredError, NodeMissingError
from criticalkv.shared.identity import FORMAT_VERSION, NodeId
from criticalkv.shared.requests import PrefillRequest, PrefillResult


class Restorer:
    """Recomputes the missing nodes of a chain.

    Args:
        store: where the chain is.
        prefiller: recomputes nodes.
        model: the served one; a record of another is no record.
        tiers: those that a prefill stores below its highest one.
    """

    def __init__(
        self, store: AsyncStore, prefiller: Prefiller, model: Model, tiers: Sequence[str]
    ) -> None:
        self._store = store
        self._prefiller = prefiller
        self._model = model
        self._tiers = tiers

    async def length(self, node_id: NodeId) -> int:
        """Return the original length of a chain, from the records if its KV is gone.

        Raises:
            ContextExpiredError: if neither is there.
        """
        stat = (await self._store.stat([node_id]))[0]
        if stat.present:
            return int(stat.next_position)
        return sum(len(record.token_ids) for record in await self._records(node_id))

    async def knows(self, node_id: NodeId) -> bool:
        """Whether a node could be rebuilt: it was not deleted."""
        return (await self._store.token_records([node_id]))[0] is not None

    async def tokens(self, node_id: NodeId) -> tuple[int, ...]:
        """Return all tokens of a chain, what its end left pending included.

        Raises:
            ContextExpiredError: if a record is gone.
        """
        records = await self._records(node_id)
        ids = [token for record in records for token in record.token_ids]
        return (*ids, *records[-1].pending_ids)

    async def restore(
        self,
        node_id: NodeId,
        deadline: Deadline,
        at_least: str | None = None,
        tenant: str = "",
        view: Sequence[str] = (),
    ) -> tuple[Node, list[PrefillResult]]:
        """Return the node with its whole chain present; and what had to be computed.

        Args:
            node_id: end of the chain.
            deadline: for all of it.
            at_least: tier that every compressed node must be stored at; None = any.
            tenant: digest of whose quota the nodes count against.
            view: exact tier that each node of the chain must have, root first; empty = any.

        Raises:
            ContextExpiredError: if a token record that is needed is gone, too, or no
                prefill brings a tier back that a lost node was computed from.
        """
        node = await self._intact(node_id, at_least, view)
        if node is not None:
            return node, []
        records = await self._records(node_id)
        stats = await self._store.stat([r.identity.node_id for r in records])
        done = []
        for record, stat, read in zip(
            records, stats, _tiers_read(records, stats, at_least, view), strict=True
        ):
            if _is_usable(stat, read, at_least):
                continue
            tier = self._store_tier(record, stat, read, at_least)
            request = _request(record, tier, tenant)
            now, result = await self._prefiller.ensure(request, request.store_tier, deadline)
            if not read <= set(now.tiers):  # somebody else's, published meanwhile
                raise _expired()
            done += [result] if result else []
        return await read_node(self._store, node_id), done

    def _store_tier(
        self, record: TokenRecord, stat: pb.NodeStat, read: Set[str], at_least: str | None
    ) -> str:
        """Return what to prefill a node up to, so that it holds the tiers in `read`.

        What it was stored up to, if possible; else the highest in `read`.
        """
        asked = (at_least, *read)
        for tier in (_highest(record.store_tier, *asked), _highest(*asked)):
            given = {tier, *(t for t in self._tiers if Decimal(t) < Decimal(tier or 0))}
            # The store replaces a present node by a higher one only.
            replaces = not stat.present or not enough(stat.tiers, tier)
            if tier is not None and read <= given and replaces:
                return tier
        raise _expired()

    async def _intact(
        self, node_id: NodeId, at_least: str | None, view: Sequence[str]
    ) -> Node | None:
        try:
            node = await read_node(self._store, node_id)
        except NodeMissingError:
            return None
        has_view = all(tier in tiers for tiers, tier in zip(node.chain_tiers, view, strict=False))
        is_enough = all(enough(tiers, at_least) for tiers in node.chain_tiers)
        return node if has_view and is_enough else None

    async def _records(self, node_id: NodeId) -> list[TokenRecord]:
        """Return the records of a chain, root first."""
        leaf = (await self._store.token_records([node_id]))[0]
        above = await self._store.token_records(leaf.ancestors) if leaf else [None]
        chain = [*above, leaf]
        ids = [*leaf.ancestors, node_id] if leaf else [node_id]
        records = [r for r, name in zip(chain, ids, strict=False) if r and self._is_ours(r, name)]
        if len(records) != len(ids):
            raise _expired()
        return records

    def _is_ours(self, record: TokenRecord, name: NodeId) -> bool:
        """Whether a worker would compute this node again, and not another or none."""
        identity, model = record.identity, self._model
        ours = (FORMAT_VERSION, model.model_digest, model.tokenizer_digest, model.dtype)
        theirs = (
            identity.format_version,
            identity.model_digest,
            identity.tokenizer_digest,
            identity.dtype,
        )
        return (
            identity.node_id == name
            and ours == theirs
            and is_ours(identity.policy)
            and identity.codec == codec_named(identity.policy)
        )


def _tiers_read(
    records: Sequence[TokenRecord],
    stats: Sequence[pb.NodeStat],
    at_least: str | None,
    view: Sequence[str],
) -> list[set[str]]:
    """Return the tiers of each node that are needed.

    By who reads the chain at `view`, and by descendants that are to be recomputed.
    """
    read = [{tier} for tier in view] or [set[str]() for _ in records]
    for i in reversed(range(len(records))):
        if not _is_usable(stats[i], read[i], at_least):
            for tiers, tier in zip(read, records[i].identity.view, strict=False):
                tiers.add(tier)
    return read


def _is_usable(stat: pb.NodeStat, read: Set[str], at_least: str | None) -> bool:
    # A view names exact tiers: a higher one beside them does not do.
    return stat.present and enough(stat.tiers, at_least) and read <= set(stat.tiers)


def _highest(*tiers: str | None) -> str | None:
    return max((t for t in tiers if t is not None), key=Decimal, default=None)


def _expired() -> ContextExpiredError:
    return ContextExpiredError("the context is no longer stored; send it again")


def _request(record: TokenRecord, store_tier: str, tenant: str) -> PrefillRequest:
    return PrefillRequest(
        node_id=record.identity.node_id,
        token_ids=record.token_ids,
        policy=record.identity.policy,
        store_tier=store_tier,
        salt=record.identity.salt,
        ancestors=record.ancestors,
        view=record.identity.view,
        pending_ids=record.pending_ids,
        tenant=tenant,
    )
