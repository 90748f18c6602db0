"""The name of an eviction policy: `scorer+allocator+selector[:key=value,…]`.

Parsing only; no torch, so that gateway and store can read policies.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from criticalkv.shared.errors import PolicyError

Scorer = Literal["window", "replay"]
Allocator = Literal["uniform", "adakv", "model"]
Selector = Literal["plain", "twostage", "critical", "relative"]


class Policy(BaseModel):
    """An eviction policy with all its parameters. Part of a node's identity.

    Scorer: what an entry's attention is. Allocator: how a tier's budget is spread
    over heads. Selector: which entries of a head fill its budget.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scorer: Scorer = Field(description="window (SnapKV) or replay (KVzip)")
    allocator: Allocator = Field(description="uniform, adakv (per layer), model (all layers)")
    selector: Selector = Field(
        description="plain: by attention; twostage: CriticalKV, Algorithm 1; "
        "critical: by (A+eps)·norm; relative: by share of the layer's output"
    )
    window: int = Field(
        default=32, ge=1, le=4096, description="observation window, tokens; always kept (window)"
    )
    kernel: int = Field(default=7, ge=1, le=63, description="max-pooling width, odd (window)")
    sinks: int = Field(default=4, ge=0, le=1024, description="first entries always kept (replay)")
    recent: int = Field(default=8, ge=0, le=4096, description="last entries always kept (replay)")
    chunk: int = Field(default=512, ge=16, le=8192, description="replayed tokens per chunk")
    alpha: Decimal = Field(
        default=Decimal("0.5"), ge=0, le=1, description="first-stage ratio (twostage)"
    )
    eps: Decimal = Field(
        default=Decimal("0.0001"), ge=0, le=1, description="added to attention (twostage, critical)"
    )
    norm: Literal["l1", "l2"] = Field(
        default="l1", description="norm of v·W_O (twostage, critical); relative always uses l2"
    )
    safeguard: Decimal = Field(
        default=Decimal("0.2"), ge=0, le=1, description="share every head keeps (adakv)"
    )

    @property
    def streams_layers(self) -> bool:
        """Whether a layer can be ranked and freed before the next one is computed."""
        return self.scorer != "replay" and self.allocator != "model"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Parse the textual form or a preset's name.

        Raises:
            PolicyError: naming the part that does not fit.
        """
        head, _, tail = PRESETS.get(text, text).partition(":")
        parts = head.split("+")
        if len(parts) != 3:
            raise PolicyError(
                f"policy {text[:100]!r} must be scorer+allocator+selector or one of "
                f"{', '.join(sorted(PRESETS))}",
                param="policy",
            )
        fields: dict[str, str] = dict(zip(("scorer", "allocator", "selector"), parts, strict=True))
        for item in filter(None, tail.split(",")):
            key, equals, value = item.partition("=")
            if not equals or key in fields or key not in cls.model_fields:
                raise PolicyError(
                    f"policy option {item[:100]!r} is not key=value of a known key", param="policy"
                )
            fields[key] = value
        try:
            policy = cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(x) for x in first["loc"])
            raise PolicyError(f"policy {where}: {first['msg']}", param="policy") from None
        if policy.kernel % 2 == 0:
            raise PolicyError("policy kernel must be odd", param="policy")
        return policy

    def canonical(self) -> str:
        """The full textual form, every parameter spelled out, for identities."""
        fields = self.model_dump(exclude={"scorer", "allocator", "selector"})
        options = ",".join(f"{key}={_plain(value)}" for key, value in sorted(fields.items()))
        return f"{self.scorer}+{self.allocator}+{self.selector}:{options}"


def _plain(value: object) -> str:
    return format(value.normalize(), "f") if isinstance(value, Decimal) else str(value)


DEFAULT_POLICY = "replay+model+relative"
PRESETS = {
    "default": DEFAULT_POLICY,
    "snapkv": "window+uniform+plain",
    "adakv": "window+adakv+plain",
    "criticalkv": "window+uniform+twostage",
    "criticaladakv": "window+adakv+twostage",
    "kvzip": "replay+model+plain",
}
