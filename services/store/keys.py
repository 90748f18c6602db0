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
CUTS = "ckv:{books}:cuts"
"""Sorted set: `node:attempt:tier` of dropped tiers, by when to unlink them, ms."""
CUT_BYTES = "ckv:{books}:cut-bytes"
"""Hash: the same → payload bytes that the unlinking will free."""
INDEX = "ckv:{books}:index"
"""Sorted set: `used:node` by value, the least valuable first; see `of_tenant`."""
TALL = "ckv:{books}:tall"
"""Sorted set: those of INDEX that can still lose a tier."""
USED = "ckv:{books}:used"
"""Hash: node id → its last use, µs, as it stands in INDEX."""
AGE = "ckv:{books}:age"
"""The value of the last node that was sacrificed."""
OWNERS = "ckv:{books}:owners"
"""Hash: `node:attempt` → the tenant that it counts against."""
TENANTS = "ckv:{books}:tenants"
"""Hash: node id → the tenant that it counts against."""
OWNED_BYTES = "ckv:{books}:owned-bytes"
"""Hash: tenant → sum of its SIZES."""
OWNED_NODES = "ckv:{books}:owned-nodes"
"""Hash: tenant → number of its attempts that are not TRASH."""
PINS = "ckv:{books}:pins"
"""Sorted set: `tenant:node`, by when it was pinned, ms."""
OWNED_PINS = "ckv:{books}:owned-pins"
"""Hash: tenant → number of its PINS."""
COUNTED = "ckv:{books}:counted"
"""Exists while the sums need no new count."""
BEGUN = "ckv:{books}:begun"
"""Hash: `node:attempt` of unpublished puts → who began it."""
FREEING = "ckv:{books}:freeing"
"""Hash: tenant, or "" for all → bytes in TRASH and CUT_BYTES."""
DONE = "ckv:{books}:done"
"""With a word behind it: exists for a while once the call with that word was run."""
BOOKS = (
    SIZES,
    TOTAL,
    WRITING,
    COUNTS,
    TRASH,
    CUTS,
    CUT_BYTES,
    INDEX,
    TALL,
    USED,
    AGE,
    OWNERS,
    TENANTS,
    OWNED_BYTES,
    OWNED_NODES,
    PINS,
    OWNED_PINS,
    COUNTED,
    BEGUN,
    FREEING,
    DONE,
)
"""All of them, in the order in which scripts name them."""


def of_tenant(name: str, tenant: str) -> str:
    """INDEX or TALL of one tenant's nodes; of everybody's for ""."""
    return f"{name}:{tenant}" if tenant else name


def cut(node_id: str, attempt: str, tier: int) -> str:
    """Name of a dropped tier, by its index, in the books."""
    return f"{node_id}:{attempt}:{tier}"


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
    """Sorted set of child nodes, by when a child without manifest may be forgotten, ms.

    0 = it has none, and its record needs this node's.
    """
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


def dropped(node_id: str) -> str:
    """Hash: what the last drop of the node answered, for a while."""
    return f"ckv:{{{node_id}}}:d"


def lease(node_id: str) -> str:
    """String: the fencing token of who may prefill the node."""
    return f"ckv:{{{node_id}}}:l"


def handle(digest: str) -> str:
    """Hash of one handle; see `digest`."""
    return f"ckv:h:{digest}"


def unbound(digest: str) -> str:
    """Hash: what the last removal of a handle answered, for a while; in the handle's slot."""
    return f"ckv:u:{{{handle(digest)}}}"


def tenant_handles(tenant: str) -> str:
    """Sorted set of a tenant's handles, by creation, ms."""
    return f"ckv:o:{digest(tenant)}"


def request(tenant: str, key_digest: str) -> str:
    """Hash of one idempotency key."""
    return f"ckv:i:{digest(tenant, key_digest)}"


def forgotten(request_key: str) -> str:
    """String: token of who forgot a request last, for a while; in the request's slot."""
    return f"ckv:f:{{{request_key}}}"


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
