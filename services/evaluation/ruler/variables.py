"""Variable tracking: one chain of assignments, scattered over noise (RULER, section 3).

Numbers and texts are those of RULER's `variable_tracking.py` and `constants.py`.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, repeat

from criticalkv.services.evaluation.example import Example, Question, Span
from criticalkv.services.evaluation.ruler.fitting import fit
from criticalkv.services.evaluation.ruler.haystack import NOISE
from criticalkv.services.evaluation.ruler.order import Order
from criticalkv.services.evaluation.ruler.sources import Sources
from criticalkv.shared.model.chat import ChatTemplate

TASK = "vt"
LINE = NOISE + "\n"
INSTRUCTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
)
QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assgined the value {value}, they are: "
)
METRIC = "string_match_all"
MAX_TOKENS = 30
HOPS = 4
LETTERS = 5
SHOWN_LETTERS = 3  # of the names in the solved example
SHOWN_TOKENS = 500  # of the solved example, its answer's room included
SHOWN_STEP = 5  # noises: what the solved example grows by

_FRAME = (LINE + INSTRUCTION + QUESTION + PREFIX).lower()


@dataclass(frozen=True)
class Chain:
    """Names that all have one value.

    Attributes:
        value: five digits.
        names: the first is assigned the value, each other one the name before it.
    """

    value: str
    names: tuple[str, ...]

    def statements(self) -> list[str]:
        """Return the assignments in order."""
        hops = [f"VAR {name} = VAR {before} " for before, name in pairwise(self.names)]
        return [f"VAR {self.names[0]} = {self.value}", *hops]


def variables(sources: Sources, order: Order) -> Example:
    """Make an example of the task.

    Raises:
        ConfigError: if the length is too short, naming the least.
    """
    rng = order.rng()
    shown, asked = _chains(rng)
    head = _solved(sources.chat, shown, order.length, rng.getrandbits(64))
    build = partial(_example, order, head, asked, rng.getrandbits(64))
    return fit(build, sources.chat, order.length, repeat(sources.counts(" ")(LINE)))


def _solved(chat: ChatTemplate, chain: Chain, length: int, places: int) -> str:
    """Return an example with its answer: 500 tokens as in RULER, or half of a short length."""
    room = min(SHOWN_TOKENS, length // 2) - MAX_TOKENS
    best = _answered(chain, SHOWN_STEP, places)
    for noises in range(2 * SHOWN_STEP, SHOWN_TOKENS, SHOWN_STEP):
        longer = _answered(chain, noises, places)
        if len(chat.encode_content(longer)) > room:
            break
        best = longer
    return best


def question(chain: Chain) -> Question:
    """Ask for all names of a chain."""
    prefix = PREFIX.format(count=len(chain.names), value=chain.value)
    text = QUESTION.format(value=chain.value)
    return Question(text, chain.names, METRIC, MAX_TOKENS, prefix)


def hide(chain: Chain, noises: int, places: int) -> str:
    """Scatter a chain's statements, in order, over noise.

    Noises that are no more than the statements are parted into sentences: as in RULER.

    Args:
        chain: hidden.
        noises: lines of it, at least 1.
        places: seed of the statements' places.
    """
    statements = chain.statements()
    pieces = [LINE] * noises
    if noises <= len(statements):
        pieces = [s for _ in range(noises) for s in _sentences()]
    chosen = sorted(random.Random(places).sample(range(len(pieces)), len(statements)))
    for moved, (place, statement) in enumerate(zip(chosen, statements, strict=True)):
        pieces.insert(place + moved, statement)
    return " ".join(pieces)


def _chains(rng: random.Random) -> tuple[Chain, Chain]:
    """Draw the solved example's chain and the one that is asked for: nothing in common."""
    first, second = rng.sample(range(10_000, 99_999), 2)
    shown, asked = _names(rng, SHOWN_LETTERS), _names(rng, LETTERS)
    return Chain(str(first), shown), Chain(str(second), asked)


def _names(rng: random.Random, letters: int) -> tuple[str, ...]:
    """Draw different names; none is part of the text around them, such as THERE or VAR."""
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name.lower() not in _FRAME:
            names[name] = None
    return tuple(names)


def _example(order: Order, head: str, chain: Chain, places: int, noises: int) -> Example:
    before = head + INSTRUCTION
    context = before + hide(chain, noises, places)
    return Example(
        TASK,
        order.name,
        context,
        (question(chain),),
        order.length,
        needles=tuple(_spans(context, chain)),
        haystack=(len(before), len(context)),
    )


def _answered(chain: Chain, noises: int, places: int) -> str:
    asked = question(chain)
    text = INSTRUCTION + hide(chain, noises, places) + asked.text + asked.answer_prefix
    return f"{text} {' '.join(chain.names)}\n\n\n\n"


def _sentences() -> list[str]:
    *first, last = LINE.split(". ")
    return [*(f"{sentence}." for sentence in first), last]


def _spans(context: str, chain: Chain) -> Iterator[Span]:
    for statement in map(str.strip, chain.statements()):
        start = context.index(statement)
        yield start, start + len(statement)
