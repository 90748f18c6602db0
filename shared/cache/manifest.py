"""The manifest: what a stored node consists of, and its hostile-safe encoding.

No tensors here: the store reads manifests without torch.

Encoding: part 0 is a msgpack map of ≤ 64 KiB; the tables (tier lengths, segments)
follow as raw little-endian arrays, cut into parts of ≤ 64 KiB. Their size follows
from the header's counts and is checked before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.dataclasses import dataclass

from criticalkv.kernels.group_layout import ROWS, GroupLayout
from criticalkv.shared.cache.codec import layout_of
from criticalkv.shared.cache.quality import Quality
from criticalkv.shared.errors import CorruptNodeError
from criticalkv.shared.identity import (
    CODEC_RAW,
    FORMAT_VERSION,
    HEX64,
    Identity,
    NodeId,
    canonical_tier,
)

MAX_PART_BYTES = 64 * 1024
MAX_PARTS = 256
MAX_SEGMENT_BYTES = 1024 * 1024
MAX_TIERS = 32
MAX_LAYERS = 512
MAX_KV_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_TOKENS = 1 << 24
MAX_SEGMENTS = 1 << 16
MAX_TABLE = 1 << 20
"""Most entries of a tier table: as Python integers they cost some 40 bytes each."""
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}

Count = TypeVar("Count", int, npt.NDArray[np.int64])

_SEGMENT = np.dtype([("layer", "<u2"), ("tier", "<u2"), ("rows", "<u4"), ("checksum", "<u8")])
_QUANTIZED_SEGMENT = np.dtype([*_SEGMENT.descr, ("groups", "<u4")])


def raw_entry_bytes(head_dim: int, dtype: str) -> int:
    """Stored bytes of one KV entry that is not quantized: key, value and int32 position."""
    return 2 * head_dim * ITEMSIZE[dtype] + 4


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Segment:
    """One stored piece: `rows` KV entries of one (layer, tier), head-major.

    `checksum` is xxh3_64 of the payload. A quantized segment holds whole groups.
    """

    layer: int = Field(ge=0, lt=MAX_LAYERS)
    tier: int = Field(ge=0, lt=MAX_TIERS, description="index into Manifest.tiers, or dropped")
    rows: int = Field(gt=0, lt=1 << 32)
    checksum: int = Field(ge=0, lt=1 << 64)
    groups: int = Field(default=0, ge=0, lt=1 << 32, description="of a quantized codec")


class Manifest(BaseModel):
    """A node as the store publishes it. Immutable; a better one has a new generation.

    A node that was shrunk keeps the places of all its segments, since their keys count
    them; those of dropped tiers are read by nobody and may be gone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    identity: Identity
    attempt: str = Field(pattern=r"^[0-9a-f]{16,64}$")
    ancestors: tuple[Annotated[str, Field(pattern=HEX64)], ...] = Field(default=(), max_length=1024)
    num_tokens: int = Field(ge=1, le=MAX_TOKENS, description="the node's own tokens")
    next_position: int = Field(ge=1, le=MAX_TOKENS, description="cumulative over the chain")
    pending_ids: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] = Field(
        default=(), max_length=4096
    )
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    num_kv_heads: int = Field(ge=1, le=MAX_KV_HEADS)
    head_dim: int = Field(ge=1, le=MAX_HEAD_DIM)
    tiers: tuple[str, ...] = Field(min_length=1, max_length=MAX_TIERS)
    dropped_tiers: int = Field(default=0, ge=0, lt=MAX_TIERS, description="cut off at the top")
    nested: bool = True
    prefill_ms: float = Field(default=0.0, ge=0, le=1e12, allow_inf_nan=False)
    quality: Quality | None = Field(default=None, description="measured when it was made")
    tier_lens: tuple[tuple[tuple[int, ...], ...], ...]
    segments: tuple[Segment, ...] = Field(max_length=MAX_SEGMENTS)

    @field_validator("tiers")
    @classmethod
    def _ascending(cls, tiers: tuple[str, ...]) -> tuple[str, ...]:
        # First the spelling: Decimal raises an ArithmeticError for what is no number.
        if any(canonical_tier(t) != t for t in tiers):
            raise ValueError("tiers must be canonical")
        if list(tiers) != sorted(set(tiers), key=Decimal):
            raise ValueError("tiers must ascend")
        return tiers

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if self.identity.format_version != FORMAT_VERSION:
            raise ValueError(f"format version {self.identity.format_version} is not ours")
        if self.identity.dtype not in ITEMSIZE:
            raise ValueError(f"dtype {self.identity.dtype!r} is unknown")
        if len(self.ancestors) != len(self.identity.view):
            raise ValueError("view and ancestors differ in length")
        if (self.ancestors[-1] if self.ancestors else None) != self.identity.parent:
            raise ValueError("the last ancestor is not the parent")
        if any(canonical_tier(t) != t for t in self.identity.view):
            raise ValueError("view must hold canonical tiers")
        if self.next_position < self.num_tokens:
            raise ValueError("next_position is smaller than num_tokens")
        if self.quality is not None and len(self.quality.tiers) not in (0, len(self.tiers)):
            raise ValueError("quality has another number of tiers than the node")
        layout_of(self.identity.codec, self.head_dim)  # refuses what it does not know
        lens = self.lens
        shape = (len(self.tiers), self.num_layers, self.num_kv_heads)
        if lens.shape != shape:
            raise ValueError(f"tier_lens has shape {lens.shape}, expected {shape}")
        if lens.min() < 0 or lens.max() > self.num_tokens or (np.diff(lens, axis=0) < 0).any():
            raise ValueError("tier lengths must ascend between 0 and num_tokens")
        self._check_rows()
        return self

    def _check_rows(self) -> None:
        given = len(self.tiers) + self.dropped_tiers
        if given > MAX_TIERS:
            raise ValueError(f"more than {MAX_TIERS} tiers, the dropped ones included")
        table = self._segment_table
        if (table["layer"] >= self.num_layers).any() or (table["tier"] >= given).any():
            raise ValueError("a segment names a layer or tier that does not exist")
        if self._sizes.max(initial=0) > max(MAX_SEGMENT_BYTES, self._bytes_of(1, 1)):
            raise ValueError("a segment is larger than its limit")
        kept = table[table["tier"] < len(self.tiers)]
        where = kept["layer"].astype(np.int64) * len(self.tiers) + kept["tier"]
        for name, wanted in (("rows", self._added), ("groups", self.group_counts)):
            # Sums of integers below 2^53: exact.
            found = np.bincount(where, kept[name], len(self.tiers) * self.num_layers)
            if not (found.reshape(self.num_layers, -1) == wanted.sum(axis=2).T).all():
                raise ValueError(f"segment {name} do not add up to the tier table")
        if self.layout:
            self._check_whole_groups(kept[np.argsort(where, kind="stable")])

    def _check_whole_groups(self, segments: npt.NDArray[np.void]) -> None:
        """Refuse segments, by layer and tier, whose rows are not those of their groups."""
        groups, rows = (np.cumsum(segments[name], dtype=np.int64) for name in ("groups", "rows"))
        added, counts = (x.transpose(1, 0, 2).ravel() for x in (self._added, self.group_counts))
        # The cell (layer, tier, head) in which each segment ends, and how far into it.
        ends = counts.cumsum()
        cell = np.searchsorted(ends, groups)
        left = groups - (ends - counts)[cell]
        inside = np.minimum(ROWS * left, added[cell])
        if not (rows == (added.cumsum() - added)[cell] + inside).all():
            raise ValueError("a segment does not hold whole groups")

    def __eq__(self, other: object) -> bool:
        # Not pydantic's: that compares the cached table too, and arrays have no truth value.
        if not isinstance(other, Manifest):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in Manifest.model_fields)

    def __copy__(self) -> Manifest:
        # Without what was derived and cached: `model_copy` goes on to change fields.
        fields = {name: getattr(self, name) for name in Manifest.model_fields}
        return Manifest.model_construct(**fields)

    def __hash__(self) -> int:
        return hash((self.node_id, self.attempt))

    @cached_property
    def lens(self) -> npt.NDArray[np.int64]:
        """Tier table int64 [tiers, layers, kv_heads]: entries kept per head."""
        try:
            return np.asarray(self.tier_lens, dtype=np.int64)
        except ValueError:
            raise ValueError("tier_lens is not rectangular") from None

    @cached_property
    def _added(self) -> npt.NDArray[np.int64]:
        """Entries that each tier adds per head, int64 [tiers, layers, kv_heads]."""
        return np.diff(self.lens, axis=0, prepend=0)

    @cached_property
    def _segment_table(self) -> npt.NDArray[np.void]:
        """The segments as one array of `_QUANTIZED_SEGMENT`."""
        rows = [(s.layer, s.tier, s.rows, s.checksum, s.groups) for s in self.segments]
        return np.array(rows, dtype=_QUANTIZED_SEGMENT)

    @cached_property
    def _sizes(self) -> npt.NDArray[np.int64]:
        """Payload bytes of each segment, int64."""
        rows, groups = (self._segment_table[name].astype(np.int64) for name in ("rows", "groups"))
        return self._bytes_of(rows, groups)

    @property
    def node_id(self) -> NodeId:
        """Content address, derived from the identity."""
        return self.identity.node_id

    @cached_property
    def layout(self) -> GroupLayout | None:
        """Layout of the groups of a quantized node, None for raw."""
        return layout_of(self.identity.codec, self.head_dim)

    @cached_property
    def group_counts(self) -> npt.NDArray[np.int64]:
        """Groups that each tier adds per head, int64 [tiers, layers, kv_heads]; raw: 0."""
        counts: npt.NDArray[np.int64] = -(-self._added // ROWS)
        return counts if self.layout else np.zeros_like(counts)

    @property
    def entry_bytes(self) -> int:
        """Stored bytes of one KV entry: key, value and int32 position; without its group's."""
        if self.layout:
            return self.layout.wire_row_bytes
        return raw_entry_bytes(self.head_dim, self.identity.dtype)

    def _bytes_of(self, rows: Count, groups: Count) -> Count:
        return rows * self.entry_bytes + groups * (
            self.layout.wire_group_bytes if self.layout else 0
        )

    def segment_bytes(self, index: int) -> int:
        """Payload bytes of segment `index`."""
        return int(self._sizes[index])

    def tier_index(self, tier: str) -> int:
        """Index of a stored tier."""
        return self.tiers.index(tier)

    def tier_bytes(self) -> list[int]:
        """Bytes that a read at each tier transfers."""
        groups = self.group_counts.sum(axis=(1, 2)).cumsum().tolist()
        pairs = zip(self.tier_entries(), groups, strict=True)
        return [self._bytes_of(rows, count) for rows, count in pairs]

    def tier_entries(self) -> list[int]:
        """KV entries kept at each tier, over all layers and KV heads."""
        return [int(n) for n in self.lens.sum(axis=(1, 2))]

    @property
    def full_entries(self) -> int:
        """KV entries of the untouched cache of these tokens."""
        return self.num_tokens * self.num_layers * self.num_kv_heads

    def segments_of(self, tier: int) -> list[int]:
        """Indexes of the segments of one tier, given by its index; it may be a dropped one."""
        found: list[int] = np.flatnonzero(self._segment_table["tier"] == tier).tolist()
        return found

    def added_bytes(self, tier: int) -> int:
        """Bytes that one tier, given by its index, adds to those below it."""
        return int(self._sizes[self._segment_table["tier"] == tier].sum())

    def shrunk_to(self, tier: str) -> Manifest:
        """Return the manifest of the same node without the tiers above `tier`."""
        kept = self.tier_index(tier) + 1
        fields = {name: getattr(self, name) for name in Manifest.model_fields}
        fields["tiers"], fields["tier_lens"] = self.tiers[:kept], self.tier_lens[:kept]
        fields["dropped_tiers"] = self.dropped_tiers + len(self.tiers) - kept
        if self.quality is not None:
            left = {"tiers": self.quality.tiers[:kept]}
            fields["quality"] = self.quality.model_copy(update=left)
        return Manifest(**fields)

    def read_order(self, tier: str, layers: range) -> list[int]:
        """Indexes of the segments of a read: by layer, then tier, then piece."""
        table = self._segment_table
        is_wanted = table["tier"] <= self.tier_index(tier)
        is_wanted &= (table["layer"] >= layers.start) & (table["layer"] < layers.stop)
        found = np.flatnonzero(is_wanted)
        order = np.lexsort((found, table["tier"][found], table["layer"][found]))
        wanted: list[int] = found[order].tolist()
        return wanted


def verify_segment(manifest: Manifest, index: int, payload: bytes | bytearray | memoryview) -> None:
    """Check a payload's length, then its checksum.

    Raises:
        CorruptNodeError: if either differs from the manifest.
    """
    if len(payload) != manifest.segment_bytes(index):
        raise CorruptNodeError(
            f"segment {index} has {len(payload)} bytes, not {manifest.segment_bytes(index)}"
        )
    if xxhash.xxh3_64_intdigest(payload) != manifest.segments[index].checksum:
        raise CorruptNodeError(f"segment {index} has a wrong checksum")


def encode_manifest(manifest: Manifest) -> list[bytes]:
    """Return the parts of a manifest, each ≤ 64 KiB."""
    header = manifest.model_dump(exclude={"tier_lens", "segments"})
    if not manifest.dropped_tiers:  # readers of an older version know no such field
        del header["dropped_tiers"]
    if manifest.quality is None:
        del header["quality"]
    header["segments"] = len(manifest.segments)
    segments = np.empty(len(manifest.segments), _segment_kind(manifest.identity.codec))
    for name in segments.dtype.names or ():
        segments[name] = manifest._segment_table[name]
    table = manifest.lens.astype("<i4").tobytes() + segments.tobytes()
    head = msgpack.packb(header)
    if len(head) > MAX_PART_BYTES:
        raise ValueError("manifest header exceeds 64 KiB")
    parts = [head] + [
        table[at : at + MAX_PART_BYTES] for at in range(0, len(table), MAX_PART_BYTES)
    ]
    if len(parts) > MAX_PARTS:
        raise ValueError(f"manifest exceeds {MAX_PARTS} parts")
    return parts


def decode_manifest(parts: Sequence[bytes]) -> Manifest:
    """Parse and check a manifest from untrusted bytes.

    Raises:
        CorruptNodeError: for anything but a well-formed manifest of our version.
    """
    try:
        return _decode(parts)
    except (
        ValueError,
        TypeError,
        KeyError,
        OverflowError,
        ValidationError,
        msgpack.UnpackException,
    ) as error:
        raise CorruptNodeError(f"manifest refused: {str(error)[:200]}") from error


def unpack_small(data: bytes) -> Any:
    """Unpack msgpack of ≤ 64 KiB from an untrusted peer: no ext, bounded sizes.

    Raises:
        ValueError: if the data is too large, malformed or nested deeper than 4.
    """
    if len(data) > MAX_PART_BYTES:
        raise ValueError("msgpack part exceeds 64 KiB")
    value = msgpack.unpackb(
        data,
        raw=False,
        strict_map_key=True,
        ext_hook=_refuse_ext,
        max_str_len=4096,
        max_bin_len=MAX_PART_BYTES,
        max_array_len=16384,
        max_map_len=256,
        max_ext_len=0,
    )
    if _depth(value, 0) > 4:
        raise ValueError("msgpack part is nested too deeply")
    return value


def _refuse_ext(code: int, data: bytes) -> Any:
    raise ValueError(f"msgpack ext type {code} ({len(data)} bytes) is refused")


def _depth(value: Any, depth: int) -> int:
    if depth > 4:
        return depth
    if isinstance(value, dict):
        return max((_depth(v, depth + 1) for v in value.values()), default=depth + 1)
    if isinstance(value, list):
        return max((_depth(v, depth + 1) for v in value), default=depth + 1)
    return depth


def _decode(parts: Sequence[bytes]) -> Manifest:
    if not 1 <= len(parts) <= MAX_PARTS or any(len(p) > MAX_PART_BYTES for p in parts):
        raise ValueError("wrong number or size of parts")
    header = unpack_small(bytes(parts[0]))
    if not isinstance(header, dict):
        raise ValueError("header is not a map")
    shape = _table_shape(header)
    count = header.pop("segments")
    if not isinstance(count, int) or not 0 <= count <= MAX_SEGMENTS:
        raise ValueError("segment count out of range")
    lens_bytes = 4 * shape[0] * shape[1] * shape[2]
    kind = _segment_kind(header["identity"]["codec"])
    expected = lens_bytes + count * kind.itemsize
    if sum(len(p) for p in parts[1:]) != expected:
        raise ValueError("table bytes do not match the header")
    table = b"".join(bytes(p) for p in parts[1:])
    header["tier_lens"] = np.frombuffer(table[:lens_bytes], "<i4").reshape(shape).tolist()
    names = kind.names or ()
    header["segments"] = [
        dict(zip(names, row, strict=True))
        for row in np.frombuffer(table[lens_bytes:], kind).tolist()
    ]
    return Manifest.model_validate(header)


def _segment_kind(codec: object) -> np.dtype[np.void]:
    return _SEGMENT if codec == CODEC_RAW else _QUANTIZED_SEGMENT


def _table_shape(header: dict[str, Any]) -> tuple[int, int, int]:
    tiers, layers, heads = header["tiers"], header["num_layers"], header["num_kv_heads"]
    if not (isinstance(tiers, list) and 1 <= len(tiers) <= MAX_TIERS):
        raise ValueError("tier count out of range")
    for name, value, limit in (
        ("num_layers", layers, MAX_LAYERS),
        ("num_kv_heads", heads, MAX_KV_HEADS),
    ):
        if not (isinstance(value, int) and 1 <= value <= limit):
            raise ValueError(f"{name} out of range")
    if len(tiers) * layers * heads > MAX_TABLE:
        raise ValueError(f"the tier table has more than {MAX_TABLE} entries")
    return len(tiers), layers, heads
