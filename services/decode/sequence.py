"""One turn being decoded: its tokens, its text, and where it stands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from criticalkv.services.decode.pool import SequenceKV
from criticalkv.services.decode.sampling import Sampler, top_logprobs
from criticalkv.services.decode.text import StopMatch, TextStream
from criticalkv.services.decode.token_bytes import TokenBytes
from criticalkv.shared.chain import Chain
from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import (
    DecodeDelta,
    DecodeEnd,
    DecodeRequest,
    DecodeStart,
    TokenLogprob,
)

FinishReason = Literal["stop", "length", "cancelled"]
Emit = Callable[[DecodeStart | DecodeDelta | DecodeEnd | CriticalKVError], None]


@dataclass(eq=False)
class Sequence:
    """State of one request between submission and its terminal event.

    `generated` never holds an end-of-sequence token: that one is the template's to
    place, and comes back through the pending ids.
    """

    request: DecodeRequest
    emit: Emit
    model: LoadedModel
    deadline: float
    policy: Policy | None = None
    chain: Chain = field(default_factory=Chain)
    kv: SequenceKV | None = None
    generated: list[int] = field(default_factory=list)
    forwarded: int = 0
    finish_reason: FinishReason | None = None
    has_slot: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._sampler = Sampler(self.request.sampling)
        self._tokens = TokenBytes(self.model.tokenizer)
        self._text = TextStream(self.model.tokenizer, self.request.sampling.stop)
        self._logprobs: list[TokenLogprob] = []
        self._told = 0
        self._leftover = ""
        self._kept: int | None = None
        self._ended_by_eos = False

    @property
    def tokens(self) -> list[int]:
        """All tokens of the turn so far: the request's, then the generated."""
        return [*self.request.token_ids, *self.generated]

    @property
    def next_tokens(self) -> list[int]:
        """Tokens whose KV is missing: what the next forward runs.

        Under a stepwise policy no further than the piece's end: the tokens after it see
        what is left then.
        """
        if self.policy is None:
            return self.tokens[self.forwarded :]
        interval = self.policy.interval
        end = (self.forwarded // interval + 1) * interval
        return self.tokens[self.forwarded : end]

    @property
    def first_position(self) -> int:
        """Original position of the first of `next_tokens`."""
        return self.chain.next_position + self.forwarded

    def accept(self, logits: Tensor) -> None:
        """Choose the next token from fp32 logits [vocab] and tell what can be told.

        While the prompt runs in pieces, only the last one's logits choose.
        """
        self.forwarded += len(self.next_tokens)
        if self.next_tokens:
            return None
        token = self._sampler.choose(logits)
        if token in self.model.spec.eos_token_ids and not self.request.sampling.ignore_eos:
            self._ended_by_eos = True
            return self.finish("stop")
        self.generated.append(token)
        self._note_logprob(token, logits)
        match = self._text.push(token)
        if match:
            return self._cut(match)
        if len(self.generated) >= self.request.sampling.max_tokens:
            return self.finish("length")
        self._tell(final=False)
        return None

    def finish(self, reason: FinishReason) -> None:
        """End the turn; the first reason wins."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._tell(final=True)

    @property
    def published_tokens(self) -> list[int]:
        """The turn's tokens that have KV and were not cut off by a stop string."""
        prompt = len(self.request.token_ids)
        kept = len(self.generated) if self._kept is None else self._kept
        return self.tokens[: min(self.forwarded, prompt + kept)]

    @property
    def pending_ids(self) -> list[int]:
        """What the next turn runs first: kept tokens without KV, then closing tokens."""
        prompt = len(self.request.token_ids)
        kept = len(self.generated) if self._kept is None else self._kept
        without_kv = self.tokens[len(self.published_tokens) : prompt + kept]
        leftover = self.model.chat.encode_content(self._leftover) if self._leftover else []
        return [*without_kv, *leftover, *self.model.chat.closing_ids]

    def _cut(self, match: StopMatch) -> None:
        self._kept, self._leftover = match.kept_tokens, match.leftover
        self._logprobs = self._logprobs[: max(0, match.kept_tokens - self._told)]
        self.finish("stop")

    def _tell(self, *, final: bool) -> None:
        text = self._text.take(final=final)
        kept = len(self.generated) if self._kept is None else self._kept
        end = kept if final else min(kept, self._text.settled_tokens)
        ids = tuple(self.generated[self._told : end])
        count = max(0, end - self._told)
        if text or ids:
            logprobs = tuple(self._logprobs[:count])
            self.emit(DecodeDelta(text=text, token_ids=ids, logprobs=logprobs))
        self._logprobs = self._logprobs[count:]
        self._told = max(self._told, end)

    def _note_logprob(self, token: int, logits: Tensor) -> None:
        count = self.request.sampling.logprobs
        if count is None:
            return
        logprob, top = top_logprobs(logits, token, count)
        show = self._tokens.show
        self._logprobs.append(
            TokenLogprob(
                token_id=token,
                token=show(token),
                logprob=logprob,
                top=tuple((show(i), p) for i, p in top),
            )
        )
