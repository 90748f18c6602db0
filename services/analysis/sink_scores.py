"""Attention sinks, by mass alone and with their values.

A sink draws attention from all queries; by mass alone it is the strongest token there is.
What a head reads from it is its mass times ‖𝓥_i‖, 𝓥 = V·W_O, and the values of sinks tend
to be small: a sink that parks attention scores low here, one that writes scores high.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from criticalkv.services.analysis.attended import Attended


@dataclass(frozen=True)
class SinkScores:
    """Scores of every token and head, fp64 [num_layers, num_q_heads, n].

    Attributes:
        mass: the mean of A_{q,i} over the queries that see i.
        value_aware: mass · ‖𝓥_i‖.
    """

    mass: Tensor
    value_aware: Tensor


def sink_scores(found: Attended) -> SinkScores:
    """Score the tokens of a sequence; one that no query sees scores 0."""
    mass = found.mass / found.seen.clamp_min(1)[:, None]
    return SinkScores(mass, mass * found.norms)


def shares(scores: Tensor) -> Tensor:
    """Divide each head's scores by their sum, so that both kinds compare; 0 where it is 0."""
    total = scores.sum(-1, keepdim=True)
    return scores / total.where(total > 0, 1)
