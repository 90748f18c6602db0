"""Hit rate at equal bytes: shrink before evict, against plain LRU.

The Mooncake conversation trace is replayed against a real store server. Every block of
512 tokens that a request names is one node, chained to the block before it. A request
reads its blocks from the first on, and from the first miss on puts the rest. Lengths
are scaled by one factor, so that a block has few tokens; how many bytes an entry has
follows from the share of all blocks that shall fit at the highest tier.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import xxhash

from criticalkv.services.bench.store_path import identity_of
from criticalkv.services.bench.trace import BLOCK_TOKENS
from criticalkv.services.store.order import Order, RecencyOrder, ValueOrder
from criticalkv.services.store.process import child_environment
from criticalkv.services.store.server import running
from criticalkv.shared.cache.manifest import (
    MAX_HEAD_DIM,
    MAX_SEGMENT_BYTES,
    Manifest,
    Segment,
)
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import CriticalKVError, NodeMissingError
from criticalkv.shared.malloc import tune_malloc
from criticalkv.shared.store_client import StoreClient

FACTOR = 16
"""A block of 512 tokens becomes one of 32."""
TOKENS = BLOCK_TOKENS // FACTOR
TIERS = ("0.05", "0.1", "0.2", "0.4")
GOOD = Decimal("0.2")
"""A read below this tier is a miss."""
MEMORY_MB = 16
MAX_TOKEN_BYTES = MAX_SEGMENT_BYTES // TOKENS
"""More, and a tier would not fit one segment."""
ORDERS: dict[str, Callable[[], Order]] = {"value": ValueOrder, "lru": RecencyOrder}


@dataclass
class Outcome:
    """What one order made of the trace.

    Attributes:
        wanted: blocks that requests named.
        hits: of them, read at a tier that is good enough, with all blocks before them.
        tiers: reads by the tier that was served.
        refused: puts that the store refused.
    """

    wanted: int = 0
    hits: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    refused: int = 0

    @property
    def rate(self) -> float:
        """Hits per block wanted."""
        return self.hits / max(self.wanted, 1)


def measure(trace: Sequence[Sequence[int]], share: float) -> dict[str, Any]:
    """Replay a trace under both orders.

    Args:
        share: of all distinct blocks that fit at the highest tier.

    Returns:
        `ratio` (hit rate by value ÷ by LRU), and both outcomes.
    """
    distinct = len({block for blocks in trace for block in blocks})
    shape = _Shape.of(distinct * share)
    out: dict[str, Any] = {
        "requests": len(trace),
        "distinct_blocks": distinct,
        "memory_share": share,
        "length_factor": f"1/{FACTOR}",
        "bytes_per_block": shape.nbytes(_rows(TIERS[-1])),
    }
    for name in ORDERS:
        with _store(name) as client:
            outcome = _replay(client, trace, shape)
        out[name] = {
            "hit_rate": outcome.rate,
            "hits": outcome.hits,
            "wanted": outcome.wanted,
            "tiers_served": dict(outcome.tiers),
            "puts_refused": outcome.refused,
        }
    out["ratio"] = out["value"]["hit_rate"] / out["lru"]["hit_rate"] if out["lru"]["hits"] else None
    return out


def _replay(client: StoreClient, trace: Sequence[Sequence[int]], shape: _Shape) -> Outcome:
    outcome = Outcome()
    blocks = _Blocks()
    for wanted in trace:
        outcome.wanted += len(wanted)
        chain = blocks.chain(wanted)
        missing = next((at for at, b in enumerate(chain) if not _hit(client, b, outcome)), None)
        for block in chain[missing:] if missing is not None else ():
            if not _put(client, block, shape):
                outcome.refused += 1
                break  # nothing can be put below it
    return outcome


def _hit(client: StoreClient, block: _Block, outcome: Outcome) -> bool:
    try:
        with client.open_get(block.node_id) as reader:
            for _ in reader:
                pass
    except NodeMissingError:
        return False
    outcome.tiers[reader.tier] += 1
    good = Decimal(reader.tier) >= GOOD
    outcome.hits += good
    return good


def _put(client: StoreClient, block: _Block, shape: _Shape) -> bool:
    manifest, record, payloads = block.made(shape)
    try:
        # Its ancestors have just been read or put: nothing has to hold them meanwhile.
        with client.open_put(
            block.node_id, manifest.attempt, expected_bytes=sum(map(len, payloads))
        ) as writer:
            for payload in payloads:
                writer.send(payload)
            writer.commit(manifest, record)
    except CriticalKVError:
        return False
    return True


@dataclass(frozen=True)
class _Shape:
    """KV heads and head dimension: what makes a token as many bytes as it shall have."""

    heads: int
    head_dim: int

    @classmethod
    def of(cls, blocks: float) -> _Shape:
        """Return the shape with which `blocks` fill the memory at the highest tier."""
        per_token = (MEMORY_MB << 20) / max(blocks, 1) / _rows(TIERS[-1])
        per_token = min(per_token, MAX_TOKEN_BYTES)
        heads = math.ceil(per_token / (8 * MAX_HEAD_DIM + 4))
        return cls(heads, max(1, round((per_token / heads - 4) / 8)))

    def nbytes(self, tokens: int) -> int:
        """Bytes of so many kept tokens."""
        return tokens * self.heads * (8 * self.head_dim + 4)


@dataclass(frozen=True)
class _Block:
    """One block of the trace as a node."""

    node_id: str
    ids: tuple[int, ...]
    ancestors: tuple[str, ...]

    def made(self, shape: _Shape) -> tuple[Manifest, TokenRecord, list[bytes]]:
        """Make its manifest, record and payloads, one per tier."""
        rows = [_rows(tier) for tier in TIERS]
        added = [high - low for low, high in zip([0, *rows], rows, strict=False)]
        payloads = [secrets.token_bytes(shape.nbytes(n)) for n in added]
        sums = [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
        parent = self.ancestors[-1] if self.ancestors else None
        identity = identity_of(self.ids, parent, (TIERS[-1],) * len(self.ancestors))
        manifest = Manifest(
            identity=identity,
            attempt=secrets.token_hex(8),
            ancestors=self.ancestors,
            num_tokens=TOKENS,
            next_position=TOKENS * (len(self.ancestors) + 1),
            num_layers=1,
            num_kv_heads=shape.heads,
            head_dim=shape.head_dim,
            tiers=TIERS,
            tier_lens=tuple(((n,) * shape.heads,) for n in rows),
            segments=tuple(
                Segment(layer=0, tier=at, rows=n * shape.heads, checksum=sums[at])
                for at, n in enumerate(added)
            ),
        )
        record = TokenRecord(identity=identity, token_ids=self.ids, ancestors=self.ancestors)
        return manifest, record, payloads


class _Blocks:
    """Remembers the nodes of chains, since names cost a hash each."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, int], str] = {}

    def chain(self, blocks: Sequence[int]) -> list[_Block]:
        """Return the nodes of a request's blocks, root first."""
        out: list[_Block] = []
        ancestors: tuple[str, ...] = ()
        for block in blocks:
            ids = _tokens(block)
            parent = ancestors[-1] if ancestors else None
            node_id = self._known.get((parent, block))
            if node_id is None:
                view = (TIERS[-1],) * len(ancestors)
                node_id = identity_of(ids, parent, view).node_id
                self._known[parent, block] = node_id
            out.append(_Block(node_id, ids, ancestors))
            ancestors = (*ancestors, node_id)
        return out


def _tokens(block: int) -> tuple[int, ...]:
    digest = hashlib.shake_128(str(block).encode()).digest(2 * TOKENS)
    return tuple(int.from_bytes(digest[at : at + 2], "little") for at in range(0, 2 * TOKENS, 2))


def _rows(tier: str) -> int:
    return max(1, round(float(tier) * TOKENS))


@contextmanager
def _store(order: str) -> Iterator[StoreClient]:
    # A process of its own, since StoreProcess knows no other order than the store's own.
    config = StoreConfig(address="127.0.0.1:0", memory_limit_mb=MEMORY_MB, read_path="direct")
    with subprocess.Popen(
        [sys.executable, "-m", __name__, order],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(config.model_dump_json().encode() + b"\n")
        process.stdin.flush()
        try:
            address = process.stdout.readline().decode().strip()
            with StoreClient.of(config.model_copy(update={"address": address})) as client:
                yield client
        finally:
            process.send_signal(signal.SIGTERM)


async def _serve(order: str) -> None:
    config = StoreConfig.model_validate_json(sys.stdin.buffer.readline())
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with running(config, order=ORDERS[order]()) as store:
        print(store.address, flush=True)
        await stop.wait()


if __name__ == "__main__":  # the store under one order
    tune_malloc()
    asyncio.run(_serve(sys.argv[1]))
