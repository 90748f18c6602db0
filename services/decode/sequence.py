"""One choice of a turn being decoded: its tokens, its text, and where it stands."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from criticalkv.services.decode.batch import SequenceKV
from criticalkv.services.decode.opening import MeasuredChain, OpenedChain
from criticalkv.services.decode.sampling import Sampler
from criticalkv.services.decode.text import StopMatch, TextStream
from criticalkv.services.decode.token_bytes import TokenBytes
from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import NodeId
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import (
    DecodeDelta,
    DecodeEnd,
    DecodeRequest,
    DecodeStart,
    TokenLogprob,
)

log = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "cancelled"]
Emit = Callable[[DecodeStart | DecodeDelta | DecodeEnd | CriticalKVError], None]
Logprob = tuple[float, list[tuple[int, float]]]


@dataclass
class Spent:
    """Where a sequence's time went, in seconds, and what it shared."""

    store_s: float = 0.0
    queue_s: float = 0.0
    waiting_since: float = 0.0
    first_forward: float = 0.0
    question_s: float = 0.0
    steps: int = 0
    members: int = 0
    preemptions: int = 0


@dataclass(eq=False)
class Sequence:
    """State of one choice between submission and its terminal event.

    `generated` never holds an end-of-sequence token: that one is the template's to
    place, and comes back through the pending ids.

    Attributes:
        arrival: number of the submission; branches have their own.
        chain: what it reads; empty until it has been measured.
        kv: its KV while it has a slot.
        forwarded: tokens of the turn that have KV.
        swapped: node in the store that holds the KV of the first `forwarded` tokens.
        start: what was told when it began.
        opened: what it has taken; None before, and after it runs.
        cancelled: shared by all choices of a request.
        failed: shared, too: the request has ended with an error.
        filling: a job beside the step thread writes to its KV.
    """

    request: DecodeRequest
    listener: Emit
    model: LoadedModel
    deadline: float
    arrival: int
    policy: Policy | None = None
    choice: int = 0
    chain: MeasuredChain = field(default_factory=MeasuredChain)
    kv: SequenceKV | None = None
    generated: list[int] = field(default_factory=list)
    forwarded: int = 0
    swapped: NodeId | None = None
    start: DecodeStart | None = None
    opened: OpenedChain | None = None
    filling: bool = False
    finish_reason: FinishReason | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    failed: threading.Event = field(default_factory=threading.Event)
    started: float = field(default_factory=time.perf_counter)
    spent: Spent = field(default_factory=Spent)

    def __post_init__(self) -> None:
        seeds = (self.request.sampling.seed, *self.request.branch_seeds)
        self.sampler = Sampler(self.request.sampling, seeds[self.choice])
        self._tokens = TokenBytes(self.model.tokenizer)
        self._text = self._fresh_text()
        # Of the tokens that are not told yet; None for those that need none.
        self._logprobs: list[TokenLogprob | None] = []
        self._told = 0
        self._leftover = ""
        self._kept: int | None = None
        self._known: deque[int] = deque()
        if self.request.emitted:
            self._resume(self.request.emitted)

    @property
    def tenant(self) -> str:
        """Whose share of the replica it takes."""
        return self.request.tenant

    @property
    def unborn(self) -> int:
        """Branches that begin once the prompt has run."""
        return len(self.request.branch_seeds) if not self.choice and not self.generated else 0

    def branch(self, choice: int, arrival: int) -> Sequence:
        """Return another choice of the same prompt, which has just run."""
        return Sequence(
            self.request,
            self.listener,
            self.model,
            self.deadline,
            arrival,
            self.policy,
            choice,
            chain=self.chain,
            forwarded=self.forwarded,
            start=self.start,
            cancelled=self.cancelled,
            failed=self.failed,
            started=self.started,
            spent=replace(self.spent),
        )

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

    def asks(self, tokens: int) -> bool:
        """Whether, after so many of `next_tokens`, the next one can be chosen."""
        return self.forwarded + tokens == len(self.tokens)

    def emit(self, event: DecodeStart | DecodeDelta | DecodeEnd | CriticalKVError) -> None:
        """Tell the listener. One that fails ends its own request, and nothing else."""
        try:
            self.listener(event)
        except Exception:
            if not self.cancelled.is_set():
                log.exception("nobody takes a request's events; it is cancelled")
            self.cancelled.set()

    def ran(self, tokens: int, members: int) -> None:
        """Note a step that ran `tokens` of this sequence beside `members` in all."""
        self.forwarded += tokens
        self.spent.steps += 1
        self.spent.members += members

    def chosen(self, drawn: int) -> int:
        """Return the next token: the drawn one, unless a lost worker has told another.

        Over one batch and the next, low bits may differ: at a near tie so may the choice.
        """
        return self._known[0] if self._known else drawn

    def take(self, token: int, logprob: Logprob | None) -> None:
        """Add the chosen token and tell what can be told, unless it was told before."""
        if not self.spent.question_s:
            self.spent.question_s = time.perf_counter() - self.spent.first_forward
        self._add(token, logprob, silent=bool(self._known))
        if self._known:
            self._known.popleft()

    def finish(self, reason: FinishReason) -> None:
        """End the turn; the first reason wins."""
        if self.finish_reason is None:
            self.finish_reason = reason

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

    def _resume(self, emitted: tuple[int, ...]) -> None:
        """Go on after tokens that a lost worker has told.

        All but the latest run at once, with the prompt. The last one is chosen again, by a
        step: it may have ended the turn, and is then the one without KV. So are those whose
        text was held back, if their log probabilities are still to be told.
        """
        at = len(emitted) - 1
        if self.request.sampling.logprobs is not None:
            at = min(at, _settled(self._fresh_text(), emitted[:at]))
        self.generated += emitted[:at]
        self._logprobs = [None] * at  # told, or made anew by a step
        _settled(self._text, emitted[:at])
        self._known.extend(emitted[at:])
        self.sampler.skip(at)

    def _fresh_text(self) -> TextStream:
        prompt = self.request.token_ids
        begun = prompt[len(prompt) - self.request.begun :]
        return TextStream(self.model.tokenizer, self.request.sampling.stop, begun)

    def _add(self, token: int, logprob: Logprob | None, *, silent: bool) -> None:
        if token in self.model.spec.eos_token_ids and not self.request.sampling.ignore_eos:
            self.finish("stop")
        else:
            self.generated.append(token)
            self._note_logprob(token, logprob)
            match = self._text.push(token)
            if match:
                self._cut(match)
            elif len(self.generated) >= self.request.sampling.max_tokens:
                self.finish("length")
        self._tell(token, silent=silent)

    def _cut(self, match: StopMatch) -> None:
        self._kept, self._leftover = match.kept_tokens, match.leftover
        self._logprobs = self._logprobs[: max(0, match.kept_tokens - self._told)]
        self.finish("stop")

    def _tell(self, token: int, *, silent: bool) -> None:
        final = self.finish_reason is not None
        text = self._text.take(final=final)
        kept = len(self.generated) if self._kept is None else self._kept
        end = max(self._told, kept if final else min(kept, self._text.settled_tokens))
        ids = tuple(self.generated[self._told : end])
        logprobs = self._logprobs[: len(ids)]
        self._logprobs = self._logprobs[len(ids) :]
        self._told = end
        if silent:
            return
        self.emit(
            DecodeDelta(
                choice=self.choice,
                text=text,
                token_ids=ids,
                sampled=(token,),
                logprobs=tuple(item for item in logprobs if item is not None),
            )
        )

    def _note_logprob(self, token: int, logprob: Logprob | None) -> None:
        if logprob is None:
            return
        show = self._tokens.show
        self._logprobs.append(
            TokenLogprob(
                token_id=token,
                token=show(token),
                logprob=logprob[0],
                top=tuple((show(i), p) for i, p in logprob[1]),
            )
        )


def _settled(text: TextStream, tokens: Iterable[int]) -> int:
    """Add tokens; return how many of all have been told, whole."""
    for token in tokens:
        text.push(token)
    text.take()
    return text.settled_tokens
