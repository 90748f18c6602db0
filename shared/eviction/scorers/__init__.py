"""One scorer per file: a policy and a layer of a context in, LayerScores out.

`replay` is not in the table: its scores come from a second pass over the context.
"""

from __future__ import annotations

from collections.abc import Callable

from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy, Scorer
from criticalkv.shared.eviction.scorers.window import window
from criticalkv.shared.eviction.scores import LayerScores

ScorerFn = Callable[[Policy, ContextLayer], LayerScores]

SCORERS: dict[Scorer, ScorerFn] = {
    "window": window,
}
