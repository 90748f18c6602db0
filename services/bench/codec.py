"""How near quantized caches stay to unquantized ones: equal answers, and KL by stored bytes.

Every context is compressed once per codec, as a service does it; questions are asked of
its nodes at tier 1, and the tiers below are read back for the plane of tier × codec.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from criticalkv.services.decode.places import pages_needed
from criticalkv.services.evaluation.case import question_ids
from criticalkv.services.evaluation.forced import divergence
from criticalkv.services.evaluation.needles import Needles
from criticalkv.services.evaluation.news import news
from criticalkv.services.evaluation.statistics import Estimate
from criticalkv.services.local import LocalEngine, LocalNode
from criticalkv.services.local.engine import SALT
from criticalkv.services.local.side_by_side import answer_logprobs
from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.chain import ChainLoader
from criticalkv.shared.config import DecodeConfig
from criticalkv.shared.model.chat import ChatTemplate
from criticalkv.shared.model.loader import LoadedModel

CODECS = ("raw", "int8", "int4")
POLICY = "default"
QUESTIONS = (
    "Write a summary of the text above in four sentences.",
    "List the most important points of the text above.",
    "Explain the text above to a child.",
    "Which people, places and things does the text above mention? Describe each of them.",
    "Quote the beginning of the text above, then say what it is about.",
    "What happens at the end of the text above? Answer at length.",
    "Write a headline for the text above, and explain why it fits.",
    "Continue the text above in the same style.",
    "Write a letter to a friend about what the text above says.",
    "What could one criticize about the text above? Give your reasons.",
)
FIRST_SEED = 1000
MAX_NEWS_TOKENS = 4096  # of a row, before it is cut
NEAR_TIE = 0.02
"""Nats between the two likeliest tokens below which the cache was nearly indifferent."""
POOL_TIER = "0.2"
PAGE_SIZES = (64, 128, 256)


@dataclass(frozen=True)
class Text:
    """A context's token ids, and questions that end its open message."""

    name: str
    token_ids: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]


@dataclass
class Samples:
    """What one codec differed in, prompt by prompt.

    Attributes:
        same: whether all tokens are the unquantized cache's.
        kl: along its answer, mean over tokens, nats.
        agreement: share of its tokens that are the likeliest, too.
        flips: of every answer that differs, the first other token's index, and the margin
            by which the unquantized cache preferred its own there, nats.
    """

    same: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    flips: list[tuple[int, float]] = field(default_factory=list)

    @property
    def same_or_tied(self) -> list[float]:
        """Whether an answer is the same, or first differs at a near tie, prompt by prompt."""
        margins = iter(margin for _, margin in self.flips)
        return [same or float(next(margins) < NEAR_TIE) for same in self.same]

    def as_json(self) -> dict[str, Any]:
        """Means with their intervals."""
        named = (
            ("same", self.same),
            ("same_or_tied", self.same_or_tied),
            ("kl", self.kl),
            ("agreement", self.agreement),
        )
        means: dict[str, Any] = {name: Estimate.of(x).as_json() for name, x in named}
        flips = [{"token": token, "margin": margin} for token, margin in self.flips]
        return means | {"flips": flips}


class Compressed:
    """One context's nodes, a codec each."""

    def __init__(self, engine: LocalEngine, text: Text) -> None:
        self.text = text
        self._engine = engine
        self._loader = ChainLoader(engine.store, engine.model.spec)
        self._nodes = {codec: self._compress(codec) for codec in CODECS}

    def manifest(self, codec: str) -> Manifest:
        """Return the manifest of a codec's node."""
        return self._engine.manifest(self._nodes[codec])

    def cache(self, codec: str, tier: str) -> RaggedCache:
        """Return a codec's entries as a reader gets them."""
        chain = self._loader.load(self._nodes[codec].node_id, SALT, (tier,))
        return chain.nodes[0].cache

    def answers(self, codec: str, tokens: int) -> list[tuple[int, ...]]:
        """Ask all questions at once; return `tokens` greedy tokens each."""
        ask = partial(
            self._engine.generate,
            self._nodes[codec],
            tier="1",
            max_tokens=tokens,
            ignore_eos=True,
        )
        with ThreadPoolExecutor(len(self.text.questions)) as pool:
            return [turn.token_ids for turn in pool.map(ask, self.text.questions)]

    def _compress(self, codec: str) -> LocalNode:
        policy = f"{POLICY}:codec={codec}"
        return self._engine.compress_tokens(self.text.token_ids, policy=policy)


def closeness(
    model: LoadedModel,
    *,
    data: Path | None = None,
    contexts: int = 10,
    questions: int = len(QUESTIONS),
    tokens: int = 1024,
    answer_tokens: int = 32,
) -> dict[str, Any]:
    """Compare the codecs on contexts of `tokens` tokens.

    Args:
        model: that reads and answers.
        data: folder with news and essays, both optional.
        contexts: half of them news where there are any, the others needles in essays.
        questions: asked of every context; contexts · questions prompts in all.
        tokens: of a context.
        answer_tokens: of an answer, end tokens ignored.

    Returns:
        prompts; by codec: shares of equal answers, KL and agreement along the unquantized
        cache's answers; plane: mean KL and stored bytes of every tier and codec; best: the
        cells that no other one beats in both; pool_bytes: by codec and page size.
    """
    samples = {codec: Samples() for codec in CODECS[1:]}
    cells: dict[tuple[str, str], list[tuple[int, float]]] = {}
    config = DecodeConfig(max_num_seqs=max(16, questions))
    pool: dict[str, dict[str, int]] = {}
    with LocalEngine(model, decode=config) as engine:
        for text in texts(model.chat, data, contexts, questions, tokens):
            context = Compressed(engine, text)
            right = context.answers(CODECS[0], answer_tokens)
            _compare(model, context, right, answer_tokens, samples)
            _add_plane(model, context, right[0], cells)
            pool = pool or _pool_bytes(context)
    plane = [_cell(codec, tier, found) for (codec, tier), found in cells.items()]
    return {
        "prompts": contexts * questions,
        "codecs": {codec: found.as_json() for codec, found in samples.items()},
        "plane": plane,
        "best": best(plane),
        "pool_bytes": pool,
    }


def texts(
    chat: ChatTemplate, data: Path | None, contexts: int, questions: int, tokens: int
) -> Iterator[Text]:
    """Yield contexts, cut to `tokens`: news where there are any, then needles in essays."""
    asked = tuple(tuple(question_ids(chat, text)) for text in QUESTIONS[:questions])
    long = (row for row in news(chat, data, MAX_NEWS_TOKENS) if len(row.context_ids) >= tokens)
    rows = list(islice(long, contexts // 2))
    for row in rows:
        yield Text(row.name, row.context_ids[:tokens], asked)
    needles = Needles(chat, data)
    for seed in range(FIRST_SEED, FIRST_SEED + contexts - len(rows)):
        case = needles.case(seed, needles=4, tokens=tokens)
        yield Text(case.name, case.context_ids, asked)


def best(plane: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells that no other one beats in bytes and KL, fewest bytes first."""
    kept: list[dict[str, Any]] = []
    for cell in sorted(plane, key=lambda c: (c["bytes"], c["kl"]["mean"])):
        if not kept or cell["kl"]["mean"] < kept[-1]["kl"]["mean"]:
            kept.append(cell)
    return kept


def _compare(
    model: LoadedModel,
    context: Compressed,
    right: Sequence[tuple[int, ...]],
    tokens: int,
    samples: dict[str, Samples],
) -> None:
    """Add every question's sample: free answers, then along the right one."""
    given = {codec: context.answers(codec, tokens) for codec in samples}
    caches = [context.cache(codec, "1") for codec in CODECS]
    for i, (question, answer) in enumerate(zip(context.text.questions, right, strict=True)):
        raw, *others = answer_logprobs(model, caches, question, answer)
        for codec, found in zip(samples, others, strict=True):
            _add(samples[codec], raw, found, answer, given[codec][i])


def _add(
    samples: Samples, raw: Tensor, found: Tensor, right: tuple[int, ...], given: tuple[int, ...]
) -> None:
    samples.same.append(float(given == right))
    samples.kl.append(divergence(raw, found))
    samples.agreement.append(float((raw.argmax(-1) == found.argmax(-1)).float().mean()))
    if given != right:
        at = next(i for i, (a, b) in enumerate(zip(given, right, strict=True)) if a != b)
        first, second = raw[at].topk(2).values.tolist()
        samples.flips.append((at, first - second))


def _add_plane(
    model: LoadedModel,
    context: Compressed,
    answer: Sequence[int],
    cells: dict[tuple[str, str], list[tuple[int, float]]],
) -> None:
    """Follow one answer over every tier and codec; add bytes and KL to the whole raw cache."""
    question = context.text.questions[0]
    full = answer_logprobs(model, [context.cache(CODECS[0], "1")], question, answer)[0]
    for codec in CODECS:
        manifest = context.manifest(codec)
        caches = [context.cache(codec, tier) for tier in manifest.tiers]
        found = answer_logprobs(model, caches, question, answer)
        sizes = zip(manifest.tiers, manifest.tier_bytes(), found, strict=True)
        for tier, size, logprobs in sizes:
            cells.setdefault((codec, tier), []).append((size, divergence(full, logprobs)))


def _cell(codec: str, tier: str, found: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """One tier and codec: mean bytes, and KL with its interval, over all contexts."""
    size = sum(size for size, _ in found) / len(found)
    kl = Estimate.of([kl for _, kl in found]).as_json()
    return {"codec": codec, "tier": tier, "bytes": round(size), "kl": kl}


def _pool_bytes(context: Compressed) -> dict[str, dict[str, int]]:
    """Bytes of the decode pool that a context takes, by codec and page size."""
    out: dict[str, dict[str, int]] = {}
    raw = context.manifest(CODECS[0])
    for codec in CODECS:
        manifest = context.manifest(codec)
        pages = {size: pages_needed(manifest, POOL_TIER, size) for size in PAGE_SIZES}
        out[codec] = {str(n): raw.entry_bytes * n * count for n, count in pages.items()}
    return out
