"""Names of nodes: what a node is computed from, encoded so that nothing collides.

This module knows no tensors, no store and no tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

FORMAT_VERSION = 3
CODEC_RAW: Final = "raw"
"""Codec of nodes that keep the model's own dtype."""
POLICY_DENSE = "dense"
"""Policy of nodes that keep every entry, such as a turn: one tier, 1."""

NodeId = str
PENDING = -1  # no token has this number
HEX64 = r"^[0-9a-f]{64}$"


def canonical_tier(value: float | str | Decimal) -> str:
    """Return a kept fraction in (0, 1] as its shortest decimal string ("0.1", "1").

    Raises:
        ValueError: if the value is not a number in (0, 1].
    """
    try:
        tier = Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"tier must be a number in (0, 1], got {value!r}") from None
    if not tier.is_finite() or not 0 < tier <= 1:
        raise ValueError(f"tier must be in (0, 1], got {value!r}")
    return format(tier.normalize(), "f")


def resolve_tier(stored: Sequence[str], wanted: str | None) -> str:
    """Return the stored tier that a read of `wanted` gets.

    The highest stored tier ≤ `wanted`; below all of them the lowest; without a wish
    the highest. `stored` is ascending and not empty.
    """
    if wanted is None:
        return stored[-1]
    fitting = [tier for tier in stored if Decimal(tier) <= Decimal(wanted)]
    return fitting[-1] if fitting else stored[0]


def tokens_digest(token_ids: Iterable[int], pending_ids: Sequence[int] = ()) -> str:
    """Return the sha256 of a node's tokens as little-endian int32, hex.

    Two turns may run the same tokens and leave others pending, their last words: they are
    two nodes. A separator that is no token stands before what is pending.
    """
    ids = [*token_ids, *((PENDING, *pending_ids) if pending_ids else ())]
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()


def canonical_digest(fields: Iterable[tuple[str, str]]) -> str:
    """Return the sha256 over tagged, length-delimited fields, hex.

    Each name and each value is preceded by its length, so no two different lists
    of fields have the same encoding.
    """
    digest = hashlib.sha256()
    for name, value in fields:
        for part in (name.encode(), value.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def tenant_digest(tenant: str) -> str:
    """Return the name of a tenant in the store, hex; it owns handles, nodes and pins."""
    return canonical_digest([("tenant", tenant)])


def tenant_salt(tenant: str, cache_salt: str | None = None) -> str:
    """Return the salt of a tenant's nodes, narrowed by the client's own salt."""
    return canonical_digest([("tenant", tenant), ("cache_salt", cache_salt or "")])


class Identity(BaseModel):
    """Everything that a node's KV depends on. Two equal identities are one node.

    `view` is the tier at which each ancestor was read, root first; what the node is
    stored up to is not part of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    model_digest: str = Field(pattern=HEX64)
    tokenizer_digest: str = Field(pattern=HEX64)
    dtype: str = Field(max_length=16)
    codec: str = Field(default=CODEC_RAW, max_length=64, description="as the policy says")
    policy: str = Field(max_length=512)
    salt: str = Field(pattern=HEX64)
    parent: str | None = Field(default=None, pattern=HEX64)
    view: tuple[str, ...] = Field(default=(), max_length=1024)
    tokens: str = Field(
        pattern=HEX64, description="digest of the node's own token ids, and of those it leaves"
    )

    @property
    def node_id(self) -> NodeId:
        """The node's content address, sha256 hex."""
        return canonical_digest(
            [
                ("format", str(self.format_version)),
                ("model", self.model_digest),
                ("tokenizer", self.tokenizer_digest),
                ("dtype", self.dtype),
                ("codec", self.codec),
                ("policy", self.policy),
                ("salt", self.salt),
                ("parent", self.parent or ""),
                ("view", ",".join(self.view)),
                ("tokens", self.tokens),
            ]
        )
