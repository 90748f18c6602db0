"""Warm turns on a replica that holds nothing: time to first token, and where it goes."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from criticalkv.services.bench.copies import SALT, store_copies
from criticalkv.services.decode.engine import DecodeEngine
from criticalkv.services.store.process import StoreProcess, start_store
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.config import Config, DecodeConfig
from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.identity import NodeId
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.report import median
from criticalkv.shared.requests import (
    DecodeDelta,
    DecodeEnd,
    DecodeRequest,
    DecodeStart,
    Sampling,
)

CONCURRENCIES = (1, 4, 16)
TIERS = ("0.1", "0.2", "0.4")
QUESTION = "\n\nWhat is this text about? Answer in one sentence."
STORE_MB = 4096
TIMEOUT_S = 600.0


@dataclass
class WarmTurn:
    """What one turn told, and when its first token came."""

    submitted: float
    first_token: float = 0.0
    start: DecodeStart | None = None
    end: DecodeEnd | None = None

    def note(self, event: Any) -> None:
        """Take an event."""
        if isinstance(event, DecodeStart):
            self.start = event
        elif isinstance(event, DecodeDelta):
            self.first_token = self.first_token or time.perf_counter()
        elif isinstance(event, DecodeEnd):
            self.end = event

    @property
    def milliseconds(self) -> dict[str, float]:
        """Time to first token, and its parts: waiting, the store, the question's forward.

        The question's forward includes the part of the pull that it overlaps.
        """
        assert self.start is not None
        assert self.end is not None
        return {
            "ttft": 1e3 * (self.first_token - self.submitted),
            "queue": self.start.queue_ms,
            "pull": self.start.store_ms,
            "question": self.end.question_ms,
        }


def measure(
    config: Config, model: LoadedModel, cache: RaggedCache, *, quick: bool
) -> dict[str, Any]:
    """Measure turns over as many contexts as turns, from a real store.

    Args:
        config: of the store.
        model: that decodes.
        cache: a context at tier 1.
        quick: few turns.

    Returns:
        by number of simultaneous turns, by tier: medians of milliseconds over all turns.
    """
    concurrencies, rounds = ((1, 2), 1) if quick else (CONCURRENCIES, 3)
    update = {"address": "127.0.0.1:0", "memory_limit_mb": STORE_MB}
    with start_store(config.store.model_copy(update=update)) as process:
        with process.client() as client:
            stored = cache.at_tier(TIERS[-1])
            nodes = store_copies(client, model.spec, stored, max(concurrencies))
        samples = {
            (count, tier): [
                turn.milliseconds
                for _ in range(rounds)
                for turn in _turns(process, model, nodes[:count], tier)
            ]
            for count in concurrencies
            for tier in TIERS
        }
    out: dict[str, Any] = {}
    for (count, tier), found in samples.items():
        parts = {part: median([turn[part] for turn in found]) for part in found[0]}
        out.setdefault(str(count), {})[tier] = parts
    return out


def _turns(
    process: StoreProcess, model: LoadedModel, nodes: Sequence[NodeId], tier: str
) -> list[WarmTurn]:
    """Ask every context a question at once, on a fresh engine."""
    with process.client() as store:
        engine = DecodeEngine(model, store, DecodeConfig(node_cache_mb=0))
        try:
            engine.warm_up()  # as a replica does before it says ready
            return _ask(engine, model, nodes, tier)
        finally:
            engine.close()


def _ask(
    engine: DecodeEngine, model: LoadedModel, nodes: Sequence[NodeId], tier: str
) -> list[WarmTurn]:
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    turns = []
    for node_id in nodes:
        turn = WarmTurn(time.perf_counter())
        turns.append(turn)

        def emit(event: Any, turn: WarmTurn = turn) -> None:
            turn.note(event)
            if isinstance(event, (DecodeEnd, CriticalKVError)):
                ended.put(event)

        engine.submit(_question(model, node_id, tier), emit)
    for _ in turns:
        event = ended.get(timeout=TIMEOUT_S)
        if isinstance(event, CriticalKVError):
            raise event
    if any(turn.start is None or not turn.start.bytes_pulled for turn in turns):
        raise RuntimeError("a turn did not come from the store")
    return turns


def _question(model: LoadedModel, node_id: NodeId, tier: str) -> DecodeRequest:
    return DecodeRequest(
        request_id="bench",
        parent=node_id,
        view=(tier,),
        token_ids=tuple(model.chat.encode_content(QUESTION)),
        salt=SALT,
        sampling=Sampling(max_tokens=2, ignore_eos=True),
        publish=False,
    )
