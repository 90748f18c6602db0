"""How likely a text's continuation was after one cache."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict


@dataclass(frozen=True)
class Likelihood:
    """What became of a continuation; also its form in a journal.

    Attributes:
        nll: negative log likelihood, nats per token, mean; perplexity is its exp.
        kl: KL(full ‖ compressed), nats per token, mean.
        agreement: share of tokens whose likeliest prediction is the full cache's.
        tokens: that were judged.
        kept: entries read ÷ entries of the full cache, of the context.
        kept_bytes: stored bytes of the context up to the tier.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    nll: float
    kl: float
    agreement: float
    tokens: int
    kept: float
    kept_bytes: int
