"""One scorer per file: a policy and a layer of a context in, LayerScores out.

`replay` is not in the table: its scores come from a second pass over the context.
"""

from __future__ import annotations

from collections.abc import Callable

from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy, Scorer
from criticalkv.shared.eviction.scorers.defensive import defensive
from criticalkv.shared.eviction.scorers.echo import echo
from criticalkv.shared.eviction.scorers.expected import expected
from criticalkv.shared.eviction.scorers.h2o import h2o
from criticalkv.shared.eviction.scorers.keydiff import keydiff
from criticalkv.shared.eviction.scorers.knorm import knorm
from criticalkv.shared.eviction.scorers.obcache import obcache
from criticalkv.shared.eviction.scorers.own import own
from criticalkv.shared.eviction.scorers.streaming import streaming
from criticalkv.shared.eviction.scorers.tova import tova
from criticalkv.shared.eviction.scorers.window import window
from criticalkv.shared.eviction.scores import LayerScores

ScorerFn = Callable[[Policy, ContextLayer], LayerScores]

SCORERS: dict[Scorer, ScorerFn] = {
    "window": window,
    "h2o": h2o,
    "tova": tova,
    "streaming": streaming,
    "knorm": knorm,
    "keydiff": keydiff,
    "expected": expected,
    "obcache": obcache,
    "defensive": defensive,
    "echo": echo,
    "self": own,
}
