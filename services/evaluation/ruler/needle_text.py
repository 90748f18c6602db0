"""The text of a needle task: instruction, haystack with needles, question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from criticalkv.services.evaluation.example import Example, Question, Span
from criticalkv.services.evaluation.ruler.fitting import TokenCounts, fit
from criticalkv.services.evaluation.ruler.needle import Needle
from criticalkv.services.evaluation.ruler.passage import Passage
from criticalkv.shared.model.chat import ChatTemplate

INSTRUCTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
QUESTION = "\nWhat are all the special magic {kind} for {keys} mentioned in the provided text?"
PREFIX = " The special magic {kind} for {keys} mentioned in the provided text are"
# RULER's own way to the singular.
_SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"))
METRIC = "string_match_all"
MAX_TOKENS = 128

Place = Callable[[Sequence[str], float], int]
"""(sentences, depth) → before which of them a needle stands."""


def by_sentences(sentences: Sequence[str], depth: float) -> int:
    """Return the place that RULER takes: depth is the share of the sentences before."""
    return int(len(sentences) * depth)


@dataclass(frozen=True)
class NeedleText:
    """Everything of an example but how much haystack there is.

    Attributes:
        task, name, length: the example's.
        needles: in the order of their places.
        depths: of each, from 0 to 1, ascending.
        asked: keys, in the order of the question.
        passage: where they are hidden.
        joiner: between sentences.
        place: finds a depth among sentences.
    """

    task: str
    name: str
    length: int
    needles: tuple[Needle, ...]
    depths: tuple[float, ...]
    asked: tuple[str, ...]
    passage: Passage
    joiner: str
    place: Place = by_sentences

    def fitted(self, chat: ChatTemplate, counts: TokenCounts) -> Example:
        """Return the example with as much haystack as fits.

        Raises:
            ConfigError: if the length is too short, naming the least.
        """
        return fit(self.example, chat, self.length, self.passage.sizes(counts, 1))

    def example(self, units: int) -> Example:
        """Return the example with so many units of haystack."""
        instruction, answers = self._frame(INSTRUCTION), self._answers()
        context = instruction + self._hide(self.passage.cut(units))
        return Example(
            task=self.task,
            name=self.name,
            context=context,
            questions=(self._question(),),
            length=self.length,
            depth=self._depth(),
            needles=_spans(context, answers),
            decoys=_spans(context, [n for n in self.needles if n not in answers]),
            haystack=(len(instruction), len(context)),
        )

    def _hide(self, sentences: list[str]) -> str:
        places = [self.place(sentences, depth) for depth in self.depths]
        pieces = list(sentences)
        # From the end, so that the places before stay where they are.
        for place, needle in reversed(list(zip(places, self.needles, strict=True))):
            pieces.insert(place, needle.sentence)
        return self.joiner.join(pieces)

    def _question(self) -> Question:
        return Question(
            text=self._frame(QUESTION),
            references=tuple(needle.value for needle in self._answers()),
            metric=METRIC,
            max_tokens=MAX_TOKENS,
            answer_prefix=self._frame(PREFIX),
        )

    def _answers(self) -> list[Needle]:
        return [needle for key in self.asked for needle in self.needles if needle.key == key]

    def _depth(self) -> float | None:
        depths = [d for d, n in zip(self.depths, self.needles, strict=True) if n.key in self.asked]
        return depths[0] if len(depths) == 1 else None

    def _frame(self, template: str) -> str:
        kind: str = self.needles[0].kind
        if len(self._answers()) == 1:
            kind, template = kind.removesuffix("s"), singular(template)
        return template.format(kind=kind, keys=_listed(self.asked))


def singular(template: str) -> str:
    """Return a template as it speaks of one value."""
    return reduce(lambda text, pair: text.replace(*pair), _SINGULAR, template)


def _listed(keys: Sequence[str]) -> str:
    *first, last = keys
    return f"{', '.join(first)}, and {last}" if first else last


def _spans(context: str, needles: Sequence[Needle]) -> tuple[Span, ...]:
    found = [(context.index(needle.sentence), needle) for needle in needles]
    return tuple((start, start + len(needle.sentence)) for start, needle in found)
