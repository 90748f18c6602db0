"""Question answering: a question's paragraphs among other documents (RULER, section 3).

Texts are those of RULER's `qa.py` and `constants.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from criticalkv.services.evaluation.example import Example, Question, Span
from criticalkv.services.evaluation.ruler.corpus import Asked, Corpus, corpus
from criticalkv.services.evaluation.ruler.fitting import most, prompt_tokens
from criticalkv.services.evaluation.ruler.order import Order
from criticalkv.services.evaluation.ruler.sources import Sources
from criticalkv.shared.errors import ConfigError

ASK = (
    "Answer the question based on the given documents. Only give me the answer and do not "
    "output any other words."
)
INSTRUCTION = f"{ASK}\n\nThe following are given documents.\n\n"
QUESTION = f"\n\n{ASK}\n\nQuestion: {{query}}"
PREFIX = " Answer:"
METRIC = "string_match_part"
MAX_TOKENS = 32
DOCUMENT = "Document {number}:\n{text}"
BETWEEN = "\n\n"
MOST_PASSED = 20  # documents too long for the room that is left, before filling ends
USUAL = 150  # tokens of a document
SWAY = 4  # tokens that a document may have more or less at another place


def qa(sources: Sources, order: Order) -> Example:
    """Make an example of `qa_1` or `qa_2`.

    Raises:
        ConfigError: if the file is missing or malformed, has too few questions that fit
            into the length, or too few documents to fill it.
    """
    text = _choice(sources, order.task, order.length, order.seed).text(order.number)
    room = order.length - prompt_tokens(sources.chat, text.example(order, 0))
    text = text.filling(room, lambda document: _size(document, sources.counts(BETWEEN)))
    sizes = (_size(document, sources.counts(BETWEEN)) for document in text.others)
    made = most(partial(text.example, order), sources.chat, order.length, sizes, 0)
    if made.units == len(text.others) and made.left >= USUAL:
        what = f"{text.file} has too few documents for {order.length} tokens"
        raise ConfigError(what, param="lengths")
    return made.example


@dataclass(frozen=True)
class Text:
    """A question, and documents in an order drawn.

    Attributes:
        file: that they are from.
        others: documents without the answer, in the order in which they are added.
        shuffle: seed of the order in which documents stand in the text.
    """

    file: str
    asked: Asked
    others: tuple[str, ...]
    shuffle: int

    @classmethod
    def draw(cls, corpus: Corpus, asked: Asked, seed: str) -> Text:
        """Draw the orders: of the others, those that go with the question come first."""
        rng = random.Random(f"{seed}-{asked.query}")
        near = [document for document in asked.near if document not in asked.gold]
        known = {*asked.gold, *near}
        far = [document for document in corpus.documents if document not in known]
        others = (*rng.sample(near, len(near)), *rng.sample(far, len(far)))
        return cls(corpus.name, asked, others, rng.getrandbits(64))

    def filling(self, room: int, size: Callable[[str], int]) -> Text:
        """Put off documents that are too long for what room is left: shorter ones come first.

        Args:
            room: tokens.
            size: of a document, in tokens.
        """
        chosen: list[str] = []
        passed: list[str] = []
        for document in self.others:
            if len(passed) == MOST_PASSED:
                break
            fits = size(document) <= room
            (chosen if fits else passed).append(document)
            room -= size(document) if fits else 0
        rest = self.others[len(chosen) + len(passed) :]
        return replace(self, others=(*chosen, *passed, *rest))

    def example(self, order: Order, others: int) -> Example:
        """Return the example with so many documents that are not gold."""
        documents = [*self.asked.gold, *self.others[:others]]
        random.Random(self.shuffle).shuffle(documents)
        return _example(order, self.asked, documents)


class Choice:
    """A file's questions in an order drawn, those left out that do not fit.

    Remembers which they are and no texts: the others' orders of many questions take gigabytes.
    """

    def __init__(self, sources: Sources, order: Order) -> None:
        """Read the file.

        Args:
            order: the first of a task, length and seed.
        """
        self._chat, self._order = sources.chat, order
        self._corpus = corpus(order.task, sources.data)
        count = len(self._corpus.asked)
        numbers = random.Random(f"{order.seed}-{order.task}").sample(range(count), count)
        self._left = iter(numbers)
        self._fitting: list[Asked] = []
        self._least: int | None = None

    def text(self, number: int) -> Text:
        """Return a text that fits: each number another question."""
        while len(self._fitting) <= number:
            self._fitting.append(self._next())
        return self._drawn(self._fitting[number])

    def _next(self) -> Asked:
        for asked in (self._corpus.asked[number] for number in self._left):
            tokens = self._tokens(asked)
            if tokens <= self._order.length:
                return asked
            self._least = min(tokens, self._least or tokens)
        raise ConfigError(self._exhausted(), param="lengths")

    def _tokens(self, asked: Asked) -> int:
        """Return the tokens of a question and its own documents."""
        example = _example(self._order, asked, asked.gold)
        tokens = prompt_tokens(self._chat, example)
        if abs(tokens - self._order.length) > SWAY * len(asked.gold):
            return tokens
        # So near, the order of its documents decides, which is drawn after all others.
        return prompt_tokens(self._chat, self._drawn(asked).example(self._order, 0))

    def _drawn(self, asked: Asked) -> Text:
        order = self._order
        return Text.draw(self._corpus, asked, f"{order.seed}-{order.task}-{order.length}")

    def _exhausted(self) -> str:
        fitting, order = len(self._fitting), self._order
        what = f"{order.task}: {fitting} questions of {self._corpus.name} fit into {order.length}"
        others = f"; the shortest other takes {self._least}" if self._least else ""
        return f"{what} tokens{others}"


@lru_cache(maxsize=64)
def _choice(sources: Sources, task: str, length: int, seed: int) -> Choice:
    """Remember which questions fit: examples are made one after the other."""
    return Choice(sources, Order(task, length, seed, 0))


def _size(document: str, count: Callable[[str], int]) -> int:
    return count(DOCUMENT.format(number=10, text=document))


def _example(order: Order, asked: Asked, documents: Sequence[str]) -> Example:
    context, spans = _context(documents, asked.gold)
    text = QUESTION.format(query=asked.query)
    question = Question(text, asked.answers, METRIC, MAX_TOKENS, PREFIX)
    return Example(
        order.task,
        order.name,
        context,
        (question,),
        order.length,
        needles=spans,
        haystack=(len(INSTRUCTION), len(context)),
    )


def _context(documents: Sequence[str], gold: Sequence[str]) -> tuple[str, tuple[Span, ...]]:
    """Return the numbered documents, and where the gold ones' texts are."""
    text, spans = INSTRUCTION, []
    for number, document in enumerate(documents, 1):
        text += (BETWEEN if number > 1 else "") + DOCUMENT.format(number=number, text=document)
        if document in gold:
            spans.append((len(text) - len(document), len(text)))
    return text, tuple(spans)
