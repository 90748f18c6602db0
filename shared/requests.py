"""What gateway, prefill and decode say to one another through Ray handles.

Requests and tokens only: KV never travels here.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from criticalkv.shared.cache.quality import Quality
from criticalkv.shared.identity import HEX64, POLICY_DENSE

MAX_ANCESTORS_HINT = 16


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PrefillRequest(_Message):
    """Compute, compress and publish one node.

    `policy` is a canonical policy or "dense". `view` is the tier at which each
    ancestor is read, root first; `ancestors` are their ids.
    """

    node_id: str = Field(pattern=HEX64, description="expected id; the worker recomputes it")
    token_ids: tuple[int, ...] = Field(min_length=1)
    policy: str = Field(max_length=512)
    store_tier: str = Field(description="highest tier to store")
    salt: str = Field(pattern=HEX64)
    ancestors: tuple[str, ...] = ()
    view: tuple[str, ...] = ()
    pending_ids: tuple[int, ...] = ()
    lease_token: str = ""
    ttl_ms: int = Field(default=0, ge=0, description="0 = the store's default")
    deadline_s: float = Field(default=600.0, gt=0)
    tenant: str = Field(default="", description="digest of whose quota the node counts against")
    background: bool = Field(
        default=False, description="nobody waits for it: it stands back while others run"
    )


class PrefillResult(_Message):
    """What a prefill published."""

    node_id: str
    tiers: tuple[str, ...]
    tier_bytes: tuple[int, ...]
    tier_entries: tuple[int, ...]
    full_entries: int
    num_tokens: int
    next_position: int
    prefill_ms: float = Field(description="model forward over the context")
    scoring_ms: float = Field(description="scoring, ranking, packing (and replay)")
    total_ms: float
    stored_bytes: int
    published: bool = Field(description="False if another writer was first")
    replica: str
    quality: Quality | None = Field(default=None, description="what was measured on the way")


class Sampling(_Message):
    """How tokens are chosen. temperature 0 = greedy."""

    temperature: float = Field(default=0.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0 = off")
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    max_tokens: int = Field(ge=1)
    stop: tuple[str, ...] = ()
    logprobs: int | None = Field(
        default=None, ge=0, le=20, description="None = off, else the number of alternatives"
    )
    ignore_eos: bool = False


class DecodeRequest(_Message):
    """Run `token_ids` after the chain that ends in `parent`, then generate.

    The new node's ids are `token_ids` plus what is generated; it is published under
    `parent` at `view`. The caller fixes the view, so that it does not depend on what a
    replica happens to hold.
    """

    request_id: str
    parent: str | None = Field(default=None, pattern=HEX64)
    view: tuple[str, ...] = Field(
        default=(), description="tier to read each node of the chain at, root first, parent last"
    )
    token_ids: tuple[int, ...] = Field(min_length=1, description="pending ids included")
    salt: str = Field(pattern=HEX64)
    sampling: Sampling
    policy: str = Field(
        default=POLICY_DENSE, max_length=512, description="of the turn: dense, or a stepwise one"
    )
    publish: bool = True
    ttl_ms: int = Field(default=0, ge=0)
    deadline_s: float = Field(default=600.0, gt=0)
    tenant: str = Field(default="", description="whose share of a full replica it takes")
    min_tier: str | None = Field(
        default=None,
        description="if the pool is full, nodes may be read down to this tier; None = never",
    )
    ancestors_hint: tuple[str, ...] = Field(
        default=(),
        max_length=MAX_ANCESTORS_HINT,
        description="ancestors of `parent`, root first, of a long chain only some: routing "
        "prefers who holds them",
    )
    branch_seeds: tuple[int, ...] = Field(
        default=(),
        max_length=63,
        description="one more choice per seed, from the same prompt, which runs once",
    )
    begun: int = Field(
        default=0,
        ge=0,
        description="how many of the last `token_ids` begin the answer: its text goes on after "
        "theirs",
    )
    emitted: tuple[int, ...] = Field(
        default=(),
        description="what `sampled` of its deltas has told, by a worker that was lost: the "
        "answer goes on after it, and only what follows is told. Of one choice only",
    )

    @model_validator(mode="after")
    def _continues_one_choice(self) -> DecodeRequest:
        if self.emitted and self.branch_seeds:
            raise ValueError("a choice is continued by itself, without branch_seeds")
        if len(self.emitted) > self.sampling.max_tokens:
            raise ValueError("more tokens were emitted than max_tokens")
        if self.begun > len(self.token_ids):
            raise ValueError("more tokens begin the answer than there are")
        return self


class TokenLogprob(_Message):
    """Log probability of one token, and of the likeliest alternatives."""

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class DecodeStart(_Message):
    """The chain is loaded, or begins to be; one for each choice."""

    type: Literal["start"] = "start"
    choice: int = Field(default=0, description="0, then one for each of `branch_seeds`")
    replica: str
    bytes_pulled: int = Field(description="bytes that came from the store for this request")
    cached_tokens: int = Field(description="original tokens that needed no forward")
    tier: str = Field(description="lowest tier in the chain's view; '1' without ancestors")
    view: tuple[str, ...] = Field(
        default=(), description="the chain's view: the request's, or a lower one if room was short"
    )
    retained_fraction: float
    kept_bytes: int = Field(default=0, description="of the chain's nodes at its view, as stored")
    store_ms: float = Field(description="spent in the store before the first forward")
    queue_ms: float = Field(default=0.0, description="waited for a slot and for room")


class DecodeDelta(_Message):
    """What came of a token. Without text while characters or stop strings are incomplete.

    `sampled` is ahead of `token_ids`: it names every token as soon as it is drawn, one that
    ends the answer or that a stop string cuts off included.
    """

    type: Literal["delta"] = "delta"
    choice: int = 0
    text: str
    token_ids: tuple[int, ...] = Field(default=(), description="whose text is told now, whole")
    sampled: tuple[int, ...] = Field(default=(), description="drawn since the last delta")
    logprobs: tuple[TokenLogprob, ...] = ()


class DecodeEnd(_Message):
    """The turn is over, and published unless `publish_error` says why not."""

    type: Literal["end"] = "end"
    choice: int = 0
    finish_reason: Literal["stop", "length", "cancelled"]
    prompt_tokens: int
    completion_tokens: int
    node_id: str | None
    ancestors: tuple[str, ...] = ()
    view: tuple[str, ...] = ()
    stored_bytes: int = 0
    publish_error: str | None = None
    publish_code: str | None = Field(default=None, description="the error's code, if it has one")
    decode_ms: float = Field(default=0.0, description="submission to the end")
    question_ms: float = Field(default=0.0, description="first forward to first token's logits")
    batch_size: float = Field(default=0.0, description="sequences per step, mean over its steps")
    pool_used: float = Field(default=0.0, description="bytes in use ÷ pool, at the end")
    preemptions: int = Field(default=0, description="times it made room for others")
