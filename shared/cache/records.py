"""The token record: what a node was computed from, kept longer than its KV."""

from __future__ import annotations

from typing import Annotated

import msgpack
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from criticalkv.shared.cache.manifest import MAX_TOKENS
from criticalkv.shared.errors import CorruptNodeError
from criticalkv.shared.identity import HEX64, Identity, tokens_digest

MAX_RECORD_BYTES = 4 * MAX_TOKENS + 64 * 1024


class TokenRecord(BaseModel):
    """Enough to rebuild a node bit-compatibly: its identity and its token ids."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    identity: Identity
    token_ids: tuple[int, ...]
    ancestors: tuple[Annotated[str, Field(pattern=HEX64)], ...] = Field(default=(), max_length=1024)
    pending_ids: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] = Field(
        default=(), max_length=4096
    )
    store_tier: str = Field(default="1", max_length=32)

    def encode(self) -> bytes:
        """Return the record as msgpack; the ids as raw little-endian int32."""
        fields = self.model_dump(exclude={"token_ids"})
        fields["token_ids"] = np.asarray(self.token_ids, dtype="<i4").tobytes()
        packed: bytes = msgpack.packb(fields)
        return packed

    @classmethod
    def decode(cls, data: bytes) -> TokenRecord:
        """Parse an untrusted record and check that the ids match the identity.

        Raises:
            CorruptNodeError: if anything is off.
        """
        try:
            if len(data) > MAX_RECORD_BYTES:
                raise ValueError("record too large")
            fields = msgpack.unpackb(
                data, raw=False, max_ext_len=0, max_map_len=64, max_array_len=8192
            )
            ids = fields.pop("token_ids")
            if not isinstance(ids, bytes) or len(ids) % 4:
                raise ValueError("token ids are not int32")
            record = cls(token_ids=tuple(np.frombuffer(ids, "<i4").tolist()), **fields)
            if tokens_digest(record.token_ids, record.pending_ids) != record.identity.tokens:
                raise ValueError("token ids do not match the identity")
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            ValidationError,
            msgpack.UnpackException,
        ) as error:
            raise CorruptNodeError(f"token record refused: {str(error)[:200]}") from error
        return record
