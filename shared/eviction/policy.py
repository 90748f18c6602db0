"""The name of an eviction policy: `scorer+allocator+selector[:key=value,…]`.

Parsing only; no torch, so that gateway and store can read policies. Which parameters a
part uses, and its defaults under each preset: `parameters`.
"""

from __future__ import annotations

import functools
from decimal import Decimal
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from criticalkv.shared.cache.codec import Codec
from criticalkv.shared.errors import PolicyError
from criticalkv.shared.eviction import official
from criticalkv.shared.eviction.kvpress.combinations import refusal
from criticalkv.shared.eviction.parameters import ALIASES, used_parameters
from criticalkv.shared.identity import CODEC_RAW, POLICY_DENSE

Scorer = Literal[
    "window",
    "h2o",
    "tova",
    "streaming",
    "knorm",
    "keydiff",
    "expected",
    "obcache",
    "defensive",
    "replay",
    "echo",
    "self",
]
Allocator = Literal["uniform", "adakv", "headkv", "pyramidkv", "duo", "model"]
Selector = Literal["plain", "twostage", "critical", "relative"]
Preset = Literal["paper", "official", "kvpress"]

PARTS = ("scorer", "allocator", "selector")
MAY_BE_RELATIVE = ("window", "h2o", "replay", "echo", "self")
"""Scorers that see single queries, whose share of the layer's output can be told."""
STEPWISE = ("window", "h2o", "tova", "streaming", "knorm", "keydiff")
"""Scorers that can look again at what an earlier step left."""


class Policy(BaseModel):
    """An eviction policy with all its parameters. Part of a node's identity.

    Scorer: what an entry's attention is. Allocator: how a tier's budget is spread
    over heads. Selector: which entries of a head fill its budget.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scorer: Scorer
    allocator: Allocator = Field(
        description="uniform; per layer: adakv; over all layers: model, pyramidkv, and by a "
        "model's profile headkv, duo"
    )
    selector: Selector = Field(
        description="plain: by score; twostage: CriticalKV, Algorithm 1; "
        "critical: by (A+eps)·norm; relative: by share of the layer's output"
    )
    preset: Preset = Field(
        default="paper", description="whose rules: the paper's, its official code's, kvpress'"
    )
    # Scorers.
    window: int = Field(
        default=32, ge=1, le=4096, description="observation window, tokens; always kept"
    )
    kernel: int = Field(default=7, ge=1, le=63, description="pooling width, odd")
    pooling: Literal["max", "avg"] = Field(default="max", description="pooling over neighbours")
    span: int = Field(default=256, ge=1, le=8192, description="queries that are summed (h2o)")
    sinks: int = Field(default=4, ge=0, le=1024, description="first entries, always kept")
    recent: int = Field(default=8, ge=0, le=4096, description="last entries, always kept")
    future: int = Field(
        default=512, ge=1, le=8192, description="positions to come that are averaged (expected)"
    )
    covariance: bool = Field(default=True, description="use the queries' covariance (expected)")
    vnorm: bool = Field(default=True, description="multiply by ‖v‖₂ (expected)")
    offset: Decimal = Field(
        default=Decimal(0), ge=0, le=1, description="added before ‖v‖₂ (expected under kvpress)"
    )
    distance: int = Field(
        default=64, ge=1, le=8192, description="a query scores keys at least so far back (self)"
    )
    stride: int = Field(
        default=4, ge=1, le=1024, description="each so-many-th query asks (self, self_weight)"
    )
    chunk: int = Field(default=512, ge=16, le=8192, description="replayed tokens per chunk")
    share: Decimal = Field(
        default=Decimal(1), gt=0, le=1, description="replayed part of each chunk, its beginning"
    )
    echo_chunk: int = Field(
        default=128, ge=16, le=8192, description="tokens that are echoed together"
    )
    echo_reach: int = Field(
        default=0, ge=0, le=1 << 20, description="tokens around a chunk that it sees; 0 = all"
    )
    echo_weight: Decimal = Field(
        default=Decimal(0), ge=0, le=16, description="weight of echo scores (replay)"
    )
    self_weight: Decimal = Field(
        default=Decimal(0), ge=0, le=16, description="weight of self scores (replay, echo)"
    )
    # Allocators.
    safeguard: Decimal = Field(
        default=Decimal("0.2"), ge=0, le=1, description="share every head keeps (adakv)"
    )
    beta: Decimal = Field(
        default=Decimal(20), gt=1, le=1000, description="steepness (pyramidkv, headkv)"
    )
    profile: str = Field(
        default="", pattern=r"^([0-9a-f]{64})?$", description="digest of a profile (headkv, duo)"
    )
    # Selectors.
    alpha: Decimal = Field(
        default=Decimal("0.5"), ge=0, le=1, description="first-stage ratio (twostage)"
    )
    eps: Decimal = Field(
        default=Decimal("0.0001"), ge=0, le=1, description="added to attention (twostage, critical)"
    )
    eps_per_token: bool = Field(default=False, description="use eps/n, which scales with length")
    norm: Literal["l1", "l2"] = Field(
        default="l1", description="norm of v·W_O (twostage, critical); relative always uses l2"
    )
    second: Literal["critical", "relative"] = Field(
        default="critical", description="score of the second stage (twostage)"
    )
    # Stepwise eviction: in chunks of a long prefill, or while generating.
    interval: int = Field(
        default=0, ge=0, le=1 << 20, description="evict after every so many own tokens; 0 = off"
    )
    keep: Decimal = Field(
        default=Decimal(0), ge=0, le=1, description="kept fraction of the tokens so far (stepwise)"
    )
    target: int = Field(
        default=0, ge=0, le=1 << 20, description="kept entries per head, instead of keep (stepwise)"
    )
    codec: Codec = Field(
        default="raw", description="bits of the kept entries: raw = the model's own, int8, int4"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        """Add the parts' own defaults; refuse parameters that no part uses."""
        if not isinstance(data, dict):
            return data
        used = used_parameters(data)
        surplus = set(data) - set(PARTS) - set(used)
        if surplus & set(cls.model_fields):
            name = min(surplus & set(cls.model_fields))
            parts = "+".join(str(data.get(part)) for part in PARTS)
            raise ValueError(
                f"{parts} with these options does not use {name}; it uses "
                f"{', '.join(sorted(used)) or 'none'}"
            )
        return {**{k: v for k, v in used.items() if v is not None}, **data}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kernel % 2 == 0:
            raise ValueError("kernel must be odd")
        if self.allocator in ("headkv", "duo") and not self.profile:
            raise ValueError(f"{self.allocator} needs profile=DIGEST, made by `criticalkv profile`")
        if self.allocator == "duo" and self.scorer != "streaming":
            raise ValueError("duo goes with the scorer streaming: its heads keep sinks and recent")
        if self.reads_relative and self.scorer not in MAY_BE_RELATIVE:
            raise ValueError(f"relative scores need a scorer of {', '.join(MAY_BE_RELATIVE)}")
        if self.scorer == "streaming" and self.selector != "plain":
            raise ValueError("streaming has no attention to multiply; it goes with plain")
        if (self.self_weight or self.echo_weight) and not self.reads_relative:
            raise ValueError("self_weight and echo_weight belong to relative scores")
        if why := self._refusal():
            raise ValueError(why)
        self._check_stepwise()
        return self

    def _refusal(self) -> str | None:
        """Why the preset has no such policy."""
        if self.preset == "official":
            parts = (self.scorer, self.allocator, self.selector)
            return official.refusal(*parts, reads_relative=self.reads_relative)
        return refusal(dict(self)) if self.preset == "kvpress" else None

    def _check_stepwise(self) -> None:
        if not self.interval:
            if self.keep or self.target:
                raise ValueError("keep and target belong to interval")
            return
        if bool(self.keep) == bool(self.target):
            raise ValueError("interval needs exactly one of keep and target")
        if self.scorer not in STEPWISE or self.allocator not in ("uniform", "adakv"):
            raise ValueError(
                f"interval goes with a scorer of {', '.join(STEPWISE)} and uniform or adakv"
            )
        if self.preset != "paper" or self.reads_relative:
            raise ValueError("interval goes with preset=paper and without relative scores")

    @property
    def reads_critical(self) -> bool:
        """Whether the selector reads `LayerScores.critical`."""
        return self.selector == "critical" or (
            self.selector == "twostage" and self.second == "critical"
        )

    @property
    def reads_relative(self) -> bool:
        """Whether the selector reads `LayerScores.relative`."""
        return self.selector == "relative" or (
            self.selector == "twostage" and self.second == "relative"
        )

    @property
    def streams_layers(self) -> bool:
        """Whether a layer can be ranked and freed before the next one is computed."""
        # Under kvpress some layers' tiers may be nested and others' not: a node has one answer.
        return self.scorer != "replay" and self.allocator != "model" and self.preset != "kvpress"

    @property
    def is_stepwise(self) -> bool:
        """Whether entries are evicted while the node's tokens are still coming."""
        return self.interval > 0

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Parse the textual form or an alias, options may follow either.

        Raises:
            PolicyError: naming the part that does not fit.
        """
        if not text.isascii():
            raise PolicyError("policy has a character that is not ASCII", param="policy")
        head, _, tail = text.partition(":")
        aliased, _, defaults = ALIASES.get(head, head).partition(":")
        parts = aliased.split("+")
        if len(parts) != len(PARTS):
            raise PolicyError(
                f"policy {text[:100]!r} must be scorer+allocator+selector or one of "
                f"{', '.join(sorted(ALIASES))}",
                param="policy",
            )
        named, given = dict(zip(PARTS, parts, strict=True)), _options(tail)
        aliased_options = _options(defaults)
        used = used_parameters(aliased_options | given | named)
        # What the options switch off is no longer the alias' business.
        kept = {key: value for key, value in aliased_options.items() if key in used}
        try:
            return cls.model_validate(kept | given | named)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(x) for x in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise PolicyError(
                f"policy {where + ': ' if where else ''}{message}", param="policy"
            ) from None

    def canonical(self) -> str:
        """The full textual form, every parameter in use spelled out, for identities.

        Of codecs only a quantized one: names are older than codecs.
        """
        used = used_parameters(dict(self))
        if self.codec == CODEC_RAW:
            del used["codec"]
        options = ",".join(f"{key}={_plain(getattr(self, key))}" for key in sorted(used))
        return f"{self.scorer}+{self.allocator}+{self.selector}:{options}"


def with_codec(text: str, codec: Codec | None) -> str:
    """Return a policy's full textual form with another codec; None: as it is.

    Raises:
        PolicyError: as Policy.parse does.
    """
    if codec is None:
        return text
    return Policy.parse(text).model_copy(update={"codec": codec}).canonical()


@functools.lru_cache(maxsize=256)
def codec_of(text: str) -> Codec:
    """Return the codec of a policy's nodes, by its textual form or "dense".

    Raises:
        PolicyError: as Policy.parse does.
    """
    return CODEC_RAW if text == POLICY_DENSE else Policy.parse(text).codec


def parse_turn_policy(text: str) -> Policy | None:
    """Parse the policy of a turn: a stepwise one, or "dense" (None), which keeps all.

    Raises:
        PolicyError: for any other, and as Policy.parse does.
    """
    if text == POLICY_DENSE:
        return None
    policy = Policy.parse(text)
    if not policy.is_stepwise:
        raise PolicyError(
            "a turn's policy must be stepwise (interval=…, and keep=… or target=…) or dense",
            param="turn_policy",
        )
    if policy.codec != CODEC_RAW:
        raise PolicyError("turns are not quantized: leave codec out", param="turn_policy")
    return policy


def canonical_turn_policy(text: str) -> str:
    """Return the full textual form of a turn's policy, as identities have it.

    Raises:
        PolicyError: as parse_turn_policy does.
    """
    policy = parse_turn_policy(text)
    return POLICY_DENSE if policy is None else policy.canonical()


def _options(text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals or key in options or key in PARTS or key not in Policy.model_fields:
            raise PolicyError(
                f"policy option {item[:100]!r} is not key=value of a known key", param="policy"
            )
        options[key] = value
    return options


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # + 0: a negative zero is zero.
    return format(value.normalize() + 0, "f") if isinstance(value, Decimal) else str(value)


DEFAULT_POLICY = ALIASES["default"]
