"""Many nodes with the entries of one context, so that no two sequences share memory."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.eviction.policy import codec_of
from criticalkv.shared.identity import POLICY_DENSE, Identity, NodeId, tenant_salt, tokens_digest
from criticalkv.shared.model.spec import ModelSpec
from criticalkv.shared.node_store import NodeStore
from criticalkv.shared.publish import publish_cache

SALT = tenant_salt("bench")


def bench_identity(spec: ModelSpec, policy: str, token_ids: Sequence[int]) -> Identity:
    """Return the identity of a root node."""
    return Identity(
        model_digest=spec.model_digest,
        tokenizer_digest=spec.tokenizer_digest,
        dtype=spec.dtype,
        codec=codec_of(policy),
        policy=policy,
        salt=SALT,
        tokens=tokens_digest(token_ids),
    )


def store_copies(store: NodeStore, spec: ModelSpec, cache: RaggedCache, count: int) -> list[NodeId]:
    """Store a root node `count` times under different names; return them."""
    return [_store_copy(store, spec, cache, i) for i in range(count)]


def _store_copy(store: NodeStore, spec: ModelSpec, cache: RaggedCache, i: int) -> NodeId:
    # The tokens are made up: nobody computes anything from them.
    token_ids = (i, *range(cache.num_tokens - 1))
    published = publish_cache(
        store,
        bench_identity(spec, POLICY_DENSE, token_ids),
        cache,
        token_ids=token_ids,
        ancestors=(),
        attempt=secrets.token_hex(16),
    )
    return published.manifest.node_id
