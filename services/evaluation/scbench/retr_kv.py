"""Retr.KV: values of a JSON object, asked for by their keys (SCBench, section 3; InfiniteBench)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from criticalkv.services.evaluation.example import Example, Question, Span
from criticalkv.services.evaluation.ruler.fitting import fit
from criticalkv.services.evaluation.ruler.order import Order
from criticalkv.services.evaluation.ruler.sources import Sources

TASK = "retr_kv"
INSTRUCTION = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
OPENING, JOINER = "JSON data:\n{", ", "
MAX_TOKENS = 150
LEAST_PAIR_TOKENS = 12
"""No tokenizer makes less of two UUIDs."""


@dataclass(frozen=True)
class Pair:
    """A key of the JSON object and its value."""

    key: str
    value: str

    def __str__(self) -> str:
        return f'"{self.key}": "{self.value}"'

    def question(self) -> Question:
        """Ask for the value."""
        return ask(
            f'Key: "{self.key}"\nThe value associated with the specified key is: ', self.value
        )


def ask(text: str, value: str) -> Question:
    """Return a question for a value, as the benchmark judges it."""
    return Question(text, (value,), "kv_match", MAX_TOKENS)


def retr_kv(sources: Sources, order: Order, turns: int) -> Example:
    """Make an example of random UUIDs; its context is the same for any number of turns.

    Context, first question and answer take the order's length: at most, and less than a
    pair less.

    Args:
        sources: count the tokens.
        order: which example.
        turns: different keys that are asked for, one after another.

    Raises:
        ConfigError: if not even the pairs that are asked for fit.
    """
    rng = order.rng()
    pool = [_pair(rng) for _ in range(max(turns, order.length // LEAST_PAIR_TOKENS))]
    places = rng.getrandbits(64)

    def build(count: int) -> Example:
        pairs = random.Random(places).sample(pool[:count], count)
        return about(TASK, order.name, pairs, pool[:turns], order.length)

    each = sources.counts(JOINER)(str(pool[0]))
    sizes = itertools.repeat(each, len(pool) - turns)
    return fit(build, sources.chat, order.length, sizes, least=turns)


def about(
    task: str, name: str, pairs: Sequence[Pair], asked: Sequence[Pair], length: int | None = None
) -> Example:
    """Return the example that asks for some of the pairs, in the order given."""
    context, spans = _written(pairs)
    places = [pairs.index(pair) for pair in asked]
    return Example(
        task,
        name,
        context,
        tuple(pair.question() for pair in asked),
        length=length,
        depth=places[0] / max(1, len(pairs) - 1) if len(places) == 1 else None,
        needles=tuple(spans[place] for place in places),
        haystack=(spans[0][0], spans[-1][1]),
    )


def _pair(rng: random.Random) -> Pair:
    key, value = (UUID(int=rng.getrandbits(128), version=4) for _ in range(2))
    return Pair(str(key), str(value))


def _written(pairs: Sequence[Pair]) -> tuple[str, list[Span]]:
    """Return the context, and where in it each pair is."""
    spans, end = [], len(INSTRUCTION + OPENING)
    for text in map(str, pairs):
        spans.append((end, end + len(text)))
        end += len(text) + len(JOINER)
    return f"{INSTRUCTION}{OPENING}{JOINER.join(map(str, pairs))}}}\n\n", spans
