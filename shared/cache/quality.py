"""What is known of a node's quality: cheap figures, measured when it was made.

No tensors here: the store reads manifests without torch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
MAX_ERROR = 1e6
"""Larger errors count as this one."""
Error = Annotated[float, Field(ge=0, le=MAX_ERROR, allow_inf_nan=False)]


class TierQuality(BaseModel):
    """How the context's last queries see what a tier keeps, over all evictable layers.

    σ is the share of a query's unpooled attention that the kept entries hold, ancestors'
    among them; θ bounds the change of its output (CriticalKV, arXiv 2502.03805, Theorem
    3.3), here with L2 norms and as a share of C = Σ A_i‖𝓥_i‖₂. Of a query head's few
    queries the mean σ counts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    retained_mass: Share = Field(description="mean σ")
    lowest_mass: Share = Field(description="lowest mean σ of one query head of one layer")
    low_mass_share: Share = Field(description="share of query heads with mean σ ≤ 0.5")
    theta: Error = Field(description="mean θ ÷ C")


class CodecQuality(BaseModel):
    """What quantizing the kept entries changed.

    Errors are ‖x̂ − x‖₂ ÷ ‖x‖₂ over all kept entries of a layer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key_error: tuple[Error, ...] = Field(max_length=512, description="per layer")
    value_error: tuple[Error, ...] = Field(max_length=512, description="per layer")
    kl: Error | None = Field(
        default=None,
        description="mean KL, nats per token, from the unquantized kept cache to the quantized "
        "one, over the context's last tokens; None: not measured",
    )


class Quality(BaseModel):
    """Figures of one node; `tiers` are those of its manifest, empty: not measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tiers: tuple[TierQuality, ...] = Field(default=(), max_length=32)
    codec: CodecQuality | None = None
