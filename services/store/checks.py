"""Checks of what clients send. Each names the field and the limit."""

from __future__ import annotations

import re

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.shared.cache.manifest import MAX_PART_BYTES, Manifest, decode_manifest
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.errors import CorruptNodeError, InvalidRequestError
from criticalkv.shared.identity import canonical_tier

MAX_IDS = 256
MAX_ANCESTORS = 1024
MAX_TTL_MS = 10 * 365 * 24 * 3600 * 1000
MAX_LEASE_MS = 3600 * 1000
MAX_ANSWER_BYTES = 1 << 20
_HEX64 = re.compile(r"[0-9a-f]{64}")
_ATTEMPT = re.compile(r"[0-9a-f]{16,64}")
_TENANT = re.compile(r"[0-9a-f]{1,64}")
_HANDLE = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def node_id(value: str, field: str = "node_id") -> str:
    """Return a valid node id or other sha256 digest.

    Raises:
        InvalidRequestError: as all functions here.
    """
    return _match(_HEX64, value, field, "64 lower-case hex digits")


def node_ids(values: list[str], field: str = "node_ids", limit: int = MAX_IDS) -> list[str]:
    """Return at most `limit` valid ids."""
    if len(values) > limit:
        raise InvalidRequestError(f"{field} has {len(values)} ids, at most {limit}", param=field)
    return [node_id(value, field) for value in values]


def attempt(value: str) -> str:
    """Return a valid attempt id."""
    return _match(_ATTEMPT, value, "attempt", "16 to 64 hex digits")


def tenant(value: str) -> str:
    """Return a valid tenant digest."""
    return _match(_TENANT, value, "tenant", "1 to 64 hex digits")


def handle(value: str) -> str:
    """Return a well-formed handle."""
    return _match(_HANDLE, value, "handle", "1 to 128 letters, digits, '_', '.' or '-'")


def ttl(value: int, default_ms: int, field: str = "ttl_ms", limit_ms: int = MAX_TTL_MS) -> int:
    """Return a time to live in ms; 0 means the default."""
    if value > limit_ms:
        raise InvalidRequestError(f"{field} is {value}, at most {limit_ms}", param=field)
    return value or default_ms


def size(value: bytes, limit: int, field: str) -> bytes:
    """Return bytes that are not longer than the limit."""
    if len(value) > limit:
        raise InvalidRequestError(f"{field} has {len(value)} bytes, at most {limit}", param=field)
    return value


def tier(value: str) -> str | None:
    """Return a canonical tier; None for the empty string."""
    if not value:
        return None
    try:
        return canonical_tier(value)
    except ValueError as error:
        raise InvalidRequestError(f"tier: {error}", param="tier") from None


def view(values: list[str]) -> list[str]:
    """Return a view: canonical tiers, at most 1,024."""
    if len(values) > 1024:
        raise InvalidRequestError(f"view has {len(values)} tiers, at most 1024", param="view")
    return [tier(value) or "" for value in values]


def check_commit(begin: pb.PutBegin, commit: pb.PutCommit) -> Manifest:
    """Return the manifest of a commit, which must be of the node that was begun."""
    ttl(commit.ttl_ms, 0)
    ttl(commit.record_ttl_ms, 0, "record_ttl_ms")
    try:
        manifest = decode_manifest(commit.manifest_parts)
        limit = 4 * manifest.num_tokens + MAX_PART_BYTES
        record = TokenRecord.decode(size(commit.token_record, limit, "token_record"))
    except CorruptNodeError as error:
        raise InvalidRequestError(f"commit: {error.message}", param="manifest_parts") from error
    if manifest.dropped_tiers:
        raise InvalidRequestError("a new node has no dropped_tiers", param="manifest_parts")
    if manifest.node_id != begin.node_id:
        raise InvalidRequestError("the manifest is of another node", param="manifest_parts")
    if manifest.attempt != begin.attempt:
        raise InvalidRequestError("the manifest is of another attempt", param="manifest_parts")
    if begin.ancestors and tuple(begin.ancestors) != manifest.ancestors:
        raise InvalidRequestError("the manifest has other ancestors than begin", param="ancestors")
    if record.identity != manifest.identity or record.ancestors != manifest.ancestors:
        raise InvalidRequestError("the token record is of another node", param="token_record")
    if len(record.token_ids) != manifest.num_tokens:
        raise InvalidRequestError(
            f"the token record has {len(record.token_ids)} ids, not {manifest.num_tokens}",
            param="token_record",
        )
    return manifest


def _match(pattern: re.Pattern[str], value: str, field: str, wanted: str) -> str:
    if not pattern.fullmatch(value):
        raise InvalidRequestError(f"{field} must be {wanted}", param=field)
    return value
