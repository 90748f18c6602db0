"""What a decode replica tells Serve, for scaling and for routing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from criticalkv.services.decode.deployment import RESIDENT_IDS, Decode
from criticalkv.services.decode.load import DecodeLoad

LOAD = DecodeLoad(
    pool_bytes=1,
    used_bytes=2,
    kept_bytes=3,
    queued_bytes=4,
    waiting=5,
    waiting_tokens=6,
    running=7,
    tokens_per_s=8.0,
)


def replica() -> Decode:
    made = Decode.__new__(Decode)
    engine: Any = SimpleNamespace(
        load=lambda: LOAD, resident_ids=lambda limit: tuple(map(str, range(9999)))[:limit]
    )
    made._engine = engine
    return made


async def test_scaling_gets_the_whole_load_as_plain_numbers() -> None:
    assert await replica().record_autoscaling_stats() == {
        "pool_bytes": 1,
        "used_bytes": 2,
        "kept_bytes": 3,
        "queued_bytes": 4,
        "waiting": 5,
        "waiting_tokens": 6,
        "running": 7,
        "tokens_per_s": 8.0,
    }


async def test_routing_gets_a_bounded_list() -> None:
    stats = await replica().record_routing_stats()
    assert stats == {"nodes": [str(number) for number in range(RESIDENT_IDS)]}
