"""Rebuild lost KV from token records, down the chain, at the recorded views."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.async_store import AsyncStore
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.nodes import Model, Node, enough, read_node
from criticalkv.services.gateway.prefill_once import Prefiller
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.errors import ContextExpiredError, NodeMissingError
from criticalkv.shared.identity import NodeId
from criticalkv.shared.requests import PrefillRequest, PrefillResult


class Restorer:
    """Recomputes the missing nodes of a chain."""

    def __init__(self, store: AsyncStore, prefiller: Prefiller, model: Model) -> None:
        self._store = store
        self._prefiller = prefiller
        self._model = model

    async def length(self, node_id: NodeId) -> int:
        """Return the original length of a chain, from the records if its KV is gone.

        Raises:
            ContextExpiredError: if neither is there.
        """
        stat = (await self._store.stat([node_id]))[0]
        if stat.present:
            return int(stat.next_position)
        return sum(len(record.token_ids) for record in await self._records(node_id))

    async def restore(
        self, node_id: NodeId, deadline: Deadline, at_least: str | None = None
    ) -> tuple[Node, list[PrefillResult]]:
        """Return the node with its whole chain present; and what had to be computed.

        Args:
            node_id: end of the chain.
            deadline: for all of it.
            at_least: tier that every compressed node must be stored at; None = any.

        Raises:
            ContextExpiredError: if a token record that is needed is gone, too.
        """
        node = await self._intact(node_id, at_least)
        if node is not None:
            return node, []
        records = await self._records(node_id)
        stats = await self._store.stat([r.identity.node_id for r in records])
        done = []
        for i, needed in enumerate(_needed_tiers(records, stats, at_least)):
            if _is_usable(stats[i], needed):
                continue
            request = _request(records[i], needed)
            _, result = await self._prefiller.ensure(request, needed, deadline)
            done += [result] if result else []
        return await read_node(self._store, node_id), done

    async def _intact(self, node_id: NodeId, at_least: str | None) -> Node | None:
        try:
            node = await read_node(self._store, node_id)
        except NodeMissingError:
            return None
        return node if all(enough(tiers, at_least) for tiers in node.chain_tiers) else None

    async def _records(self, node_id: NodeId) -> list[TokenRecord]:
        """Return the records of a chain, root first."""
        leaf = (await self._store.token_records([node_id]))[0]
        above = await self._store.token_records(leaf.ancestors) if leaf else [None]
        chain = [*above, leaf]
        ids = [*leaf.ancestors, node_id] if leaf else [node_id]
        records = [r for r, name in zip(chain, ids, strict=False) if r and self._is_ours(r, name)]
        if len(records) != len(ids):
            raise ContextExpiredError("the context is no longer stored; send it again")
        return records

    def _is_ours(self, record: TokenRecord, name: NodeId) -> bool:
        identity, model = record.identity, self._model
        return identity.node_id == name and (
            (identity.model_digest, identity.tokenizer_digest, identity.dtype)
            == (model.model_digest, model.tokenizer_digest, model.dtype)
        )


def _needed_tiers(
    records: Sequence[TokenRecord], stats: Sequence[pb.NodeStat], at_least: str | None
) -> list[str | None]:
    """Return the tier each node must hold: the highest that a lost descendant read."""
    needed: list[str | None] = [at_least] * len(records)
    for i in reversed(range(len(records))):
        if _is_usable(stats[i], needed[i]):
            continue
        for j, tier in enumerate(records[i].identity.view):
            needed[j] = max(filter(None, (needed[j], tier)), key=Decimal)
    return needed


def _is_usable(stat: pb.NodeStat, needed: str | None) -> bool:
    return stat.present and enough(stat.tiers, needed)


def _request(record: TokenRecord, needed: str | None) -> PrefillRequest:
    store_tier = max(filter(None, (record.store_tier, needed)), key=Decimal)
    return PrefillRequest(
        node_id=record.identity.node_id,
        token_ids=record.token_ids,
        policy=record.identity.policy,
        store_tier=store_tier,
        salt=record.identity.salt,
        ancestors=record.ancestors,
        view=record.identity.view,
        pending_ids=record.pending_ids,
    )
