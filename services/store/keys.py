"""Names of Redis keys. They hold digests only, never a user's text.

Keys of one node share the hash tag `{node_id}`, so that one script may touch them all,
on a cluster too; the books of the whole store share the tag `{books}`.
"""

from __future__ import annotations

import hashlib

PREFIX = "ckv:"

SIZES = "ckv:{books}:sizes"
"""Hash: `node:attempt` → payload bytes that this attempt holds or has reserved."""
COUNTS = "ckv:{books}:counts"
"""Hash: `node:attempt` → its number of segments, once published."""
TOTAL = "ckv:{books}:total"
"""Sum of SIZES, bytes."""
WRITING = "ckv:{books}:writing"
"""Sorted set: `node:attempt` of unpublished puts, by the end of their lease, ms."""
TRASH = "ckv:{books}:trash"
"""Sorted set: `node:attempt` of replaced generations, by when to unlink them, ms."""
INDEX = "ckv:{books}:index"
"""Sorted set: node ids by value, the least valuable first."""
USED = "ckv:{books}:used"
"""Sorted set: node ids by last use, ms."""


def manifest(node_id: str) -> str:
    """Hash of the published manifest and what is derived from it."""
    return f"ckv:{{{node_id}}}:m"


def segment(node_id: str, attempt: str, index: int) -> str:
    """String: the frame of one segment."""
    return f"ckv:{{{node_id}}}:s:{attempt}:{index}"


def segments(node_id: str, attempt: str) -> str:
    """What the keys of all segments of an attempt start with."""
    return f"ckv:{{{node_id}}}:s:{attempt}:"


def record(node_id: str) -> str:
    """String: the token record."""
    return f"ckv:{{{node_id}}}:t"


def pins(node_id: str) -> str:
    """Set of tenants that pinned the node."""
    return f"ckv:{{{node_id}}}:p"


def pinned_below(node_id: str) -> str:
    """Set of pinned descendants."""
    return f"ckv:{{{node_id}}}:q"


def children(node_id: str) -> str:
    """Sorted set of child nodes, by when a child without manifest may be forgotten, ms."""
    return f"ckv:{{{node_id}}}:c"


def holds(node_id: str) -> str:
    """Sorted set of running puts of descendants, by the end of their lease, ms."""
    return f"ckv:{{{node_id}}}:w"


def betters(node_id: str) -> str:
    """Set of nodes that go when this one is removed, unless something refers to them."""
    return f"ckv:{{{node_id}}}:b"


def bindings(node_id: str) -> str:
    """Sorted set of handle digests that point at the node, by their expiry, ms."""
    return f"ckv:{{{node_id}}}:h"


def lease(node_id: str) -> str:
    """String: the fencing token of who may prefill the node."""
    return f"ckv:{{{node_id}}}:l"


def handle(digest: str) -> str:
    """Hash of one handle; see `digest`."""
    return f"ckv:h:{digest}"


def tenant_handles(tenant: str) -> str:
    """Sorted set of a tenant's handles, by creation, ms."""
    return f"ckv:o:{digest(tenant)}"


def request(tenant: str, key_digest: str) -> str:
    """Hash of one idempotency key."""
    return f"ckv:i:{digest(tenant, key_digest)}"


def alias(name: str) -> str:
    """Sorted set of an alias's targets, by when they were put, ms."""
    return f"ckv:a:{name}"


def member(node_id: str, attempt: str) -> str:
    """Name of an attempt in the books."""
    return f"{node_id}:{attempt}"


def digest(*parts: str) -> str:
    """Return the sha256 of length-delimited texts, hex."""
    out = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        out.update(len(data).to_bytes(8, "little") + data)
    return out.hexdigest()
