"""What the gateway remembers of a conversation: roles and a digest; text only of responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from criticalkv.shared.cache.manifest import unpack_small
from criticalkv.shared.errors import ContextExpiredError
from criticalkv.shared.identity import HEX64, canonical_digest
from criticalkv.shared.model.chat import JOINER, Message


@dataclass(frozen=True)
class Transcript:
    """A chain of digests over (role, text parts), as far as the conversation goes.

    Attributes:
        digest: of everything so far; of a closed one, the alias of its node.
        roles: of the messages, in order.
        is_open: whether the last message may still get more parts.
    """

    digest: str
    roles: tuple[str, ...] = ()
    is_open: bool = False

    @classmethod
    def start(cls, *scope: str) -> Transcript:
        """Begin, within a scope: model, tokenizer, policy, salt."""
        return cls(canonical_digest([("scope", item) for item in scope]))

    def say(self, message: Message) -> Transcript:
        """Add a message, left open. User text after open user text joins it."""
        texts = [part.text for part in message.parts]
        if self.is_open and self.roles[-1] == message.role == "user":
            return self._texts([JOINER, *texts])
        closed = self.close()
        digest = canonical_digest([("before", closed.digest), ("role", message.role)])
        return Transcript(digest, (*self.roles, message.role), True)._texts(texts)

    def close(self) -> Transcript:
        """End the last message."""
        if not self.is_open:
            return self
        digest = canonical_digest([("before", self.digest), ("end", "")])
        return replace(self, digest=digest, is_open=False)

    def say_all(self, messages: Sequence[Message]) -> list[Transcript]:
        """Return the transcript after each of the messages, closed."""
        out, now = [], self
        for message in messages:
            now = now.say(message).close()
            out.append(now)
        return out

    def _texts(self, texts: Sequence[str]) -> Transcript:
        digest = self.digest
        for text in texts:
            digest = canonical_digest([("before", digest), ("part", text)])
        return replace(self, digest=digest)


class Metadata(BaseModel):
    """What a handle carries besides its node. Opaque to the store; no text but a response's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["context", "turn"]
    model: str
    model_digest: str = Field(pattern=HEX64)
    tokenizer_digest: str = Field(pattern=HEX64)
    policy: str
    salt: str = Field(pattern=HEX64)
    roles: list[str]
    is_open: bool
    digest: str = Field(pattern=HEX64)
    prefill_ms: float = 0.0
    scoring_ms: float = 0.0
    cached: bool = False
    store_tier: str = ""
    # A missing node is computed under `first_policy` (if any), and then under `policy`.
    # `node_policy` is that of the handle's own node, as long as it is another than `policy`.
    first_policy: str = ""
    node_policy: str = ""
    # Of a response only: the digest of its instructions ("" = none), and what is kept of it.
    instructions: str = ""
    response: bytes = b""

    @property
    def transcript(self) -> Transcript:
        """The conversation up to the handle's node."""
        return Transcript(self.digest, tuple(self.roles), self.is_open)

    def encode(self) -> bytes:
        """Return it as msgpack."""
        packed: bytes = msgpack.packb(self.model_dump())
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Metadata:
        """Parse a handle's metadata.

        Raises:
            ContextExpiredError: if this version cannot read it.
        """
        try:
            fields: Any = unpack_small(data)
            return cls.model_validate(fields)
        except (ValueError, ValidationError, msgpack.UnpackException) as error:
            raise ContextExpiredError("the context was stored by another version") from error
