"""Turns as nodes: published when they end, swapped out and read back when room is short."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence

from criticalkv.services.decode.pages import Pages
from criticalkv.services.decode.resident import ResidentNode, Residents
from criticalkv.services.decode.sequence import Sequence as Turn
from criticalkv.services.decode.turn_kv import TurnKV
from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.cache.wire import cache_of
from criticalkv.shared.chain import open_at, read_layers
from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.identity import POLICY_DENSE, Identity, NodeId, tokens_digest
from criticalkv.shared.model.spec import ModelSpec
from criticalkv.shared.node_store import NodeStore
from criticalkv.shared.publish import Published, publish_cache

log = logging.getLogger(__name__)

OWN_TIER = "1"


class Publication:
    """Writes the own KV of turns to the store, and reads it back.

    Args:
        timeout_s: of one publication.
    """

    def __init__(
        self,
        store: NodeStore,
        spec: ModelSpec,
        pages: Pages,
        residents: Residents,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._spec = spec
        self._pages = pages
        self._residents = residents
        self._timeout_s = timeout_s

    def publish(self, turn: Turn, check: Callable[[], None]) -> tuple[NodeId, int]:
        """Publish a finished turn and keep it in the pool.

        Returns:
            (node id, bytes stored by this writer).

        Raises:
            CriticalKVError: nothing is published.
        """
        kv, tokens = turn.kv, turn.published_tokens
        assert kv is not None
        cache = kv.own(len(tokens)) if isinstance(kv, TurnKV) else kv.own(tokens, check)
        identity = self._identity(turn, tokens, turn.request.salt, turn.pending_ids)
        request = turn.request
        published = self._put(
            turn, identity, cache, tokens, turn.pending_ids, request.ttl_ms, tenant=request.tenant
        )
        if isinstance(kv, TurnKV):
            self._keep(kv, published.manifest, len(tokens))
        return published.manifest.node_id, published.stored_bytes

    def swap(self, turn: Turn) -> Callable[[], NodeId | None]:
        """Copy what a running turn has; return what stores it.

        That returns the node, or None if there is nothing to store or the store fails: the
        turn's tokens then have to run once more.
        """
        assert isinstance(turn.kv, TurnKV)
        tokens = turn.tokens[: turn.forwarded]
        cache = turn.kv.own(len(tokens)) if tokens else None
        return lambda: None if cache is None else self._swapped(turn, cache, tokens)

    def read_back(self, node_id: NodeId, check: Callable[[], None]) -> RaggedCache | None:
        """Return what `swap` stored; None if it is lost."""
        try:
            with open_at(self._store, node_id, OWN_TIER) as reader:
                layers = []
                for layer in read_layers(reader):
                    check()
                    layers.append(layer)
                return cache_of(reader.manifest, OWN_TIER, layers)
        except CriticalKVError as error:
            check()  # given up or late: that is no loss of the node
            log.warning("turn %s was swapped out and is lost: %s", node_id[:16], error)
            return None

    def _swapped(self, turn: Turn, cache: RaggedCache, tokens: Sequence[int]) -> NodeId | None:
        left_ms = 1e3 * max(0.0, turn.deadline - time.monotonic())
        # A salt of its own: the turn that ends at these tokens is another node, with
        # pending tokens and a life of its own.
        identity = self._identity(turn, tokens, secrets.token_hex(32))
        try:
            # Nobody's quota: that the pool is short is not the tenant's doing.
            ttl_ms = int(left_ms) + 1000
            published = self._put(turn, identity, cache, tokens, (), ttl_ms, tenant="")
        except CriticalKVError as error:
            log.warning("a turn could not be swapped out and runs again: %s", error)
            return None
        return published.manifest.node_id

    def _put(
        self,
        turn: Turn,
        identity: Identity,
        cache: RaggedCache,
        tokens: Sequence[int],
        pending_ids: Sequence[int],
        ttl_ms: int,
        *,
        tenant: str,
    ) -> Published:
        return publish_cache(
            self._store,
            identity,
            cache,
            token_ids=tokens,
            ancestors=turn.chain.ids,
            nested=turn.policy is None,
            pending_ids=pending_ids,
            attempt=secrets.token_hex(16),
            prefill_ms=1e3 * (time.perf_counter() - turn.started),
            ttl_ms=ttl_ms,
            tenant=tenant,
            timeout_s=self._timeout_s,
        )

    def _identity(
        self, turn: Turn, tokens: Sequence[int], salt: str, pending_ids: Sequence[int] = ()
    ) -> Identity:
        spec, chain = self._spec, turn.chain
        return Identity(
            model_digest=spec.model_digest,
            tokenizer_digest=spec.tokenizer_digest,
            dtype=spec.dtype,
            policy=POLICY_DENSE if turn.policy is None else turn.policy.canonical(),
            salt=salt,
            parent=chain.ids[-1] if chain.ids else None,
            view=chain.view,
            tokens=tokens_digest(tokens, pending_ids),
        )

    def _keep(self, kv: TurnKV, manifest: Manifest, num_tokens: int) -> None:
        pages = kv.keep_own(num_tokens)
        if pages is None:
            return
        node = ResidentNode(manifest, OWN_TIER, self._pages.page_size, pages.ravel())
        node.arrived(manifest.num_layers)
        self._residents.add(node)
        self._residents.leave(node)
