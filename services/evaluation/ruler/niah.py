"""RULER's eight needle tasks, with its official settings (arXiv 2404.06654, section 3)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.ruler.haystack import Haystack
from criticalkv.services.evaluation.ruler.magic import Kind
from criticalkv.services.evaluation.ruler.needle import Needles
from criticalkv.services.evaluation.ruler.needle_text import NeedleText
from criticalkv.services.evaluation.ruler.order import Order
from criticalkv.services.evaluation.ruler.passage import Passage
from criticalkv.services.evaluation.ruler.sources import Sources

DEPTHS = tuple(round(100 * i / 39) / 100 for i in range(40))
"""Where needles are in essays: RULER's 40 depths, each at most once."""


@dataclass(frozen=True)
class Setting:
    """What makes one needle task.

    Attributes:
        haystack: "needle" has needles that nobody asks for in place of sentences.
        keys, values: kinds.
        hidden: keys that there are.
        each: values of each key.
        asked: keys that are asked for.
    """

    haystack: Literal["noise", "essay", "needle"]
    keys: Kind = "words"
    values: Kind = "numbers"
    hidden: int = 1
    each: int = 1
    asked: int = 1


SETTINGS = {
    "niah_single_1": Setting("noise"),
    "niah_single_2": Setting("essay"),
    "niah_single_3": Setting("essay", values="uuids"),
    "niah_multikey_1": Setting("essay", hidden=4),
    "niah_multikey_2": Setting("needle"),
    "niah_multikey_3": Setting("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Setting("essay", each=4),
    "niah_multiquery": Setting("essay", hidden=4, asked=4),
}


def niah(sources: Sources, order: Order) -> Example:
    """Make an example of a needle task.

    Raises:
        ConfigError: if the length is too short, naming the least; if a text is missing.
    """
    setting = SETTINGS[order.task]
    text = _text(setting, order, sources)
    return text.fitted(sources.chat, sources.counts(text.joiner))


def _text(setting: Setting, order: Order, sources: Sources) -> NeedleText:
    rng = order.rng()
    haystack = sources.haystack("essay" if setting.haystack == "essay" else "noise")
    drawn = Needles(rng, setting.keys, setting.values, haystack.mentions)
    by_key = [drawn.hide(setting.each) for _ in range(setting.hidden)]
    needles = [needle for group in by_key for needle in group]
    rng.shuffle(needles)
    return NeedleText(
        task=order.task,
        name=order.name,
        length=order.length,
        needles=tuple(needles),
        depths=_depths(setting, len(needles), rng),
        asked=tuple(group[0].key for group in rng.sample(by_key, setting.asked)),
        passage=_passage(setting, drawn, haystack, rng),
        joiner=haystack.joiner,
    )


def _depths(setting: Setting, needles: int, rng: random.Random) -> tuple[float, ...]:
    """Draw where needles are: RULER's depths in essays, anywhere else at any place."""
    if setting.haystack == "essay":
        return tuple(sorted(rng.sample(DEPTHS, needles)))
    return tuple(sorted(rng.random() for _ in range(needles)))


def _passage(setting: Setting, drawn: Needles, haystack: Haystack, rng: random.Random) -> Passage:
    if setting.haystack == "needle":
        return Passage(drawn.distract(), by_words=False)
    return Passage(haystack.pieces(rng), by_words=setting.haystack == "essay")
