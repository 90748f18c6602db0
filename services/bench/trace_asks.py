"""A trace as requests to the service: lengths and times scaled, prefixes shared as it says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count, pairwise

from criticalkv.services.bench.load_client import Ask, Asker
from criticalkv.services.bench.shared_prefixes import PrefixTree
from criticalkv.services.bench.trace import BLOCK_TOKENS, TraceRequest
from criticalkv.services.bench.words import Words
from criticalkv.shared.errors import ConfigError

MAX_MARKS = 4
"""As many as the service takes in a request."""
Block = tuple[int, int]
"""Hash id and tokens, scaled."""


@dataclass(frozen=True)
class Arrival:
    """A request of a trace.

    Attributes:
        at_s: when it is due, seconds since the run began.
        input_tokens: of its text, without the chat template's.
    """

    at_s: float
    ask: Ask
    input_tokens: int


@dataclass(frozen=True)
class Scale:
    """Factors of a replay.

    Attributes:
        length: of tokens: prompts, answers and blocks alike.
        time: of the time between requests.
    """

    length: float = 1.0
    time: float = 1.0

    def tokens(self, count: int) -> int:
        """Return a scaled length, at least 1."""
        return max(1, round(count * self.length))

    def blocks(self, request: TraceRequest) -> list[Block]:
        """Return the request's blocks; their ends are scaled, so that rounding adds nothing up."""
        total, names = self.tokens(request.input_tokens), request.hash_ids
        whole = (round(BLOCK_TOKENS * at * self.length) for at in range(1, len(names)))
        ends = [0, *(min(total, end) for end in whole), *([total] if names else [])]
        sizes = (end - start for start, end in pairwise(ends))
        return [block for block in zip(names, sizes, strict=True) if block[1]]


def arrivals(requests: Sequence[TraceRequest], scale: Scale, asker: Asker) -> list[Arrival]:
    """Return a trace's requests, in order.

    Where a request parts from others with which it shared everything before, there is a
    breakpoint, the first four of them: so the service can find there what another one
    left, and in no other place.

    Raises:
        ConfigError: if blocks are so short that their texts are equal.
    """
    blocks = [scale.blocks(request) for request in requests]
    tree = PrefixTree(blocks)
    _tell_apart({block for own in blocks for block in own}, asker.words)
    cuts = [tree.partings(path, MAX_MARKS) for path in tree.paths]
    asks = map(partial(_ask, scale, asker), count(), requests, blocks, cuts)
    return [
        Arrival(request.at_s * scale.time, ask, scale.tokens(request.input_tokens))
        for request, ask in zip(requests, asks, strict=True)
    ]


def _ask(
    scale: Scale,
    asker: Asker,
    number: int,
    request: TraceRequest,
    blocks: Sequence[Block],
    cuts: Sequence[int],
) -> Ask:
    words, shared = asker.words, blocks[: cuts[-1] if cuts else 0]
    parts = _parts(blocks, cuts, words) if blocks else ()
    return asker.ask(
        parts or [words.text(f"request {number}", scale.tokens(request.input_tokens))],
        marks=len(cuts),
        context_tokens=sum(size for _, size in shared),
        output_tokens=scale.tokens(request.output_tokens),
    )


def poisson(plan: Sequence[Arrival], per_s: float, seed: int) -> list[Arrival]:
    """Return the same requests at random times.

    Args:
        per_s: requests per second in the mean; infinite = all at once.
        seed: of the times.
    """
    draw = random.Random(f"{seed}/arrivals")
    times = accumulate(draw.expovariate(1.0) / per_s for _ in plan)
    return [
        Arrival(at, arrival.ask, arrival.input_tokens)
        for at, arrival in zip(times, plan, strict=True)
    ]


def known_share(requests: Sequence[TraceRequest]) -> float | None:
    """Return the share of all blocks that an endless cache of blocks would have had.

    None if the trace says nothing about blocks.
    """
    tree = PrefixTree([request.hash_ids for request in requests])
    total = sum(len(path) for path in tree.paths)
    return sum(tree.known()) / total if total else None


def _parts(blocks: Sequence[Block], cuts: Sequence[int], words: Words) -> list[str]:
    """Return the text of the blocks, cut after so many of them."""
    texts = [words.text(f"block {name}", size) for name, size in blocks]
    ends = [0, *cuts] + ([len(texts)] if len(texts) not in cuts else [])
    return ["".join(texts[start:end]) for start, end in pairwise(ends)]


def _tell_apart(blocks: set[Block], words: Words) -> None:
    texts = {words.text(f"block {name}", size) for name, size in blocks}
    if len(texts) < len(blocks):
        shortest = min(size for _, size in blocks)
        raise ConfigError(
            f"blocks of {shortest} tokens cannot tell {len(blocks)} texts apart: raise "
            "--length-scale",
            param="length_scale",
        )
