"""Requests to a decode engine with a small pool, and what comes back."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable
from typing import Any

from criticalkv.services.decode.engine import DecodeEngine
from criticalkv.services.local import LocalNode
from criticalkv.shared.config import DecodeConfig
from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.identity import tenant_salt
from criticalkv.shared.model.spec import ModelSpec
from criticalkv.shared.requests import DecodeDelta, DecodeEnd, DecodeRequest, Sampling

SALT = tenant_salt("local")
PAGE = 16


def ids(count: int, seed: int) -> list[int]:
    """Random tokens."""
    return random.Random(seed).choices(range(30, 200), k=count)


def config(**fields: Any) -> DecodeConfig:
    """A pool of one MiB, in which a few turns fit."""
    base = {"pool_mb": 1, "page_size": PAGE, "max_num_seqs": 8, "max_queued": 256}
    return DecodeConfig(**{**base, "node_cache_mb": 1, "max_num_batched_tokens": 24, **fields})


def request(context: LocalNode | None, view: tuple[str, ...], **fields: Any) -> DecodeRequest:
    """A turn of one token in and eight out."""
    sampling = {"max_tokens": 8, "ignore_eos": True, **fields.pop("sampling", {})}
    base: dict[str, Any] = {
        "request_id": "r",
        "parent": context.node_id if context else None,
        "view": view,
        "token_ids": (65,),
        "salt": SALT,
        "sampling": Sampling(**sampling),
    }
    return DecodeRequest(**{**base, **fields})


def tokens_of(events: list[Any], choice: int = 0) -> tuple[int, ...]:
    """The tokens of a choice."""
    deltas = [e for e in events if isinstance(e, DecodeDelta) and e.choice == choice]
    return tuple(t for d in deltas for t in d.token_ids)


def is_end(event: Any) -> bool:
    """Whether a choice has ended, well or with an error."""
    return isinstance(event, (DecodeEnd, CriticalKVError))


def until_end(events: queue.SimpleQueue[Any]) -> list[Any]:
    """Take events up to the first end, which comes last."""
    taken = [events.get(timeout=20)]
    while not is_end(taken[-1]):
        taken.append(events.get(timeout=20))
    return taken


def capacity(engine: DecodeEngine, spec: ModelSpec) -> int:
    """Tokens of one dense turn that fill the pool."""
    return engine.pages.total // (spec.num_layers * spec.num_kv_heads) * PAGE


def wait_until(holds: Callable[[], object]) -> None:
    """Wait for what other threads bring about."""
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.005)


def assert_empty(engine: DecodeEngine) -> None:
    """Nothing runs, and every page can be had."""
    wait_until(lambda: not engine.in_flight and not engine.load().running)

    def is_free() -> bool:
        engine.drop_unused()  # what was used a moment ago, too
        return engine.pages.free == engine.pages.total

    wait_until(is_free)
    pages = engine.pages.take(engine.pages.total)
    assert pages is not None
    assert sorted(pages.tolist()) == list(range(engine.pages.total))  # none twice
    engine.pages.give_back(pages)
