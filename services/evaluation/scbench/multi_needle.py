"""Several needles in one essay, asked for one after another: RULER's niah_multikey in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.ruler.fitting import fit
from criticalkv.services.evaluation.ruler.needle import Needle, Needles
from criticalkv.services.evaluation.ruler.needle_text import NeedleText
from criticalkv.services.evaluation.ruler.niah import DEPTHS
from criticalkv.services.evaluation.ruler.order import Order
from criticalkv.services.evaluation.ruler.passage import Passage
from criticalkv.services.evaluation.ruler.sources import Sources
from criticalkv.shared.errors import ConfigError

TASK = "multi_needle"


def multi_needle(sources: Sources, order: Order, turns: int) -> Example:
    """Hide a needle for each turn; the turns ask in another order than the text has.

    Context, first question and answer take the order's length: at most, and less than a
    word less.

    Args:
        sources: count the tokens; have the essays.
        order: which example.
        turns: how many, all with different keys and numbers.

    Raises:
        ConfigError: if there are not so many depths, or not even the needles fit.
    """
    if turns > len(DEPTHS):
        raise ConfigError(f"{TASK} has no more than {len(DEPTHS)} turns", param="turns")
    text, asked = _drawn(sources, order, turns)

    def build(words: int) -> Example:
        return _in_turns([replace(text, asked=(needle.key,)).example(words) for needle in asked])

    sizes = text.passage.sizes(sources.counts(text.joiner), 1)
    return fit(build, sources.chat, order.length, sizes)


def _drawn(sources: Sources, order: Order, turns: int) -> tuple[NeedleText, list[Needle]]:
    """Draw needles, places and essay; return the needles in the order of the turns too."""
    rng, haystack = order.rng(), sources.haystack("essay")
    drawn = Needles(rng, "words", "numbers", haystack.mentions)
    asked = [needle for _ in range(turns) for needle in drawn.hide(1)]
    text = NeedleText(
        task=TASK,
        name=order.name,
        length=order.length,
        needles=tuple(rng.sample(asked, turns)),
        depths=tuple(sorted(rng.sample(DEPTHS, turns))),
        asked=(asked[0].key,),
        passage=Passage(haystack.pieces(rng), by_words=True),
        joiner=haystack.joiner,
    )
    return text, asked


def _in_turns(each: Sequence[Example]) -> Example:
    """Join examples of one context that ask for different needles."""
    first = each[0]
    return replace(
        first,
        context=f"{first.context}\n\n",
        questions=tuple(_alone(example.questions[0]) for example in each),
        depth=first.depth if len(each) == 1 else None,
        needles=tuple(example.needles[0] for example in each),
        decoys=(),
    )


def _alone(question: Question) -> Question:
    """Leave out the line end before a question: it is the context's, or a later turn's."""
    return replace(question, text=question.text.removeprefix("\n"))
