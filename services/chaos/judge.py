"""What each answer should have been: the oracle's greedy tokens, as text.

Knows documents, what each tier keeps of them, and how turns follow one another. The
tiers at which they were read are the history's: under pressure they shrink.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from criticalkv.services.chaos.check import Verdict
from criticalkv.services.chaos.history import Ask, Record, Turn
from criticalkv.services.evaluation import oracle
from criticalkv.services.evaluation.case import context_ids, question_ids
from criticalkv.services.evaluation.oracle import Block, Greedy
from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.cache.ragged import RaggedLayer
from criticalkv.shared.model.chat import Message, Part
from criticalkv.shared.model.loader import LoadedModel

TOLERANCE = 2e-3
"""Logits: a top-2 margin up to this is a near-tie. Errors measured are below half of it."""
WHOLE = "1"

Ids = tuple[int, ...]


@dataclass(frozen=True)
class KeptEntries:
    """What each tier keeps of a document: bool [layers, kv_heads, tokens] by tier."""

    by_tier: Mapping[str, Tensor]

    @classmethod
    def of(cls, manifest: Manifest, layers: Sequence[RaggedLayer]) -> KeptEntries:
        """Read them from a node that was stored with all its tiers."""
        heads = manifest.num_kv_heads
        out = {
            tier: torch.zeros(len(layers), heads, manifest.num_tokens, dtype=torch.bool)
            for tier in manifest.tiers
        }
        for index, tier in enumerate(manifest.tiers):
            for layer, ragged in enumerate(layers):
                for head in range(heads):
                    count = int(manifest.lens[index, layer, head])
                    out[tier][layer, head, ragged.head(head)[2][:count].long()] = True
        return cls(out)

    def __call__(self, tier: str, layer: int) -> Tensor:
        """As the oracle asks."""
        return self.by_tier[tier][layer]

    def equals(self, other: KeptEntries) -> bool:
        """Whether both keep the same."""
        return self.by_tier.keys() == other.by_tier.keys() and all(
            torch.equal(kept, other.by_tier[tier]) for tier, kept in self.by_tier.items()
        )


@dataclass(frozen=True)
class _Chain:
    """A conversation so far: stored blocks, and tokens that the next turn runs first."""

    ids: Ids
    blocks: tuple[Block, ...]
    pending: Ids = ()


@dataclass
class Judge:
    """Compares answers with the oracle; computes each only once.

    Args:
        model: untouched, in this process.
        documents: the fixed ones.
        kept: by (document, policy).
    """

    model: LoadedModel
    documents: Sequence[str]
    kept: Mapping[tuple[int, str], KeptEntries]
    _said: dict[tuple[object, ...], Greedy] = field(default_factory=dict)

    def __call__(self, record: Record) -> Verdict:
        """Judge an answer, whole or cut."""
        assert record.ask is not None
        ask = replace(record.ask, turn=replace(record.ask.turn, tier=record.tier))
        if not record.tier:
            if record.answered:
                return Verdict(wrong="an answer without its tier")
            return self._beginning(ask, record)
        if ask.own and record.tier != WHOLE:
            return Verdict(exempt="a document of its own shrank")
        return self._verdict(record, self._candidates(ask), ask.stop)

    def _beginning(self, ask: Ask, record: Record) -> Verdict:
        """Judge an answer that ended before its tier was told: some tier must begin so."""
        tiers = self._tiers(ask, ask.read_tier)
        every = (replace(ask, turn=replace(ask.turn, tier=tier)) for tier in tiers)
        found = (said for one in every for said in self._candidates(one))
        return self._verdict(record, found, ask.stop)

    def _verdict(self, record: Record, candidates: Iterator[Greedy], stop: str) -> Verdict:
        """Compare with one after the other: the likely one comes first."""
        others = []
        for said in candidates:
            if self._matches(record, said, stop):
                return Verdict()
            others.append(said)
        if not others:
            return Verdict(exempt="an earlier answer had a near-tie")
        if any(self._ties(record, said) for said in others):
            return Verdict(exempt="near-tie")
        theirs = " | ".join(repr(self._text(said.tokens)) for said in others[:3])
        return Verdict(wrong=f"answer {record.text!r}, the oracle says {theirs}")

    def _matches(self, record: Record, said: Greedy, stop: str) -> bool:
        text, stopped = self._text(said.tokens), said.ended
        if stop and stop in text:
            text, stopped = text[: text.index(stop)], True
        if not record.answered:
            return text.startswith(record.text)
        return record.text == text and record.finish == ("stop" if stopped else "length")

    def _ties(self, record: Record, said: Greedy) -> bool:
        """Whether the answer is right up to a near-tie."""
        clear = said.clear(TOLERANCE)
        return clear < len(said.margins) and record.text.startswith(self._text(said.tokens[:clear]))

    def _text(self, ids: Sequence[int]) -> str:
        return self.model.chat.decode(ids).rstrip("\ufffd")

    def _candidates(self, ask: Ask) -> Iterator[Greedy]:
        """Yield the right answers: in resent history a turn may have been found, or run anew."""
        for tiers in product(*(self._possible(ask, at) for at in range(len(ask.before)))):
            pairs = zip(ask.before, tiers, strict=True)
            before = tuple(replace(turn, tier=tier) for turn, tier in pairs)
            chain = self._chain(replace(ask, before=before))
            if chain is not None:
                yield self._say(chain, self._prompt(ask), ask.turn)
        if ask.form == "resent" and ask.before:
            yield self._anew(ask)

    def _possible(self, ask: Ask, at: int) -> list[str]:
        tier = ask.before[at].tier
        return self._tiers(ask, tier) if ask.form == "resent" else [tier]

    def _tiers(self, ask: Ask, likely: str | None) -> list[str]:
        """Return the tiers that a document may have been read at, the likely one first."""
        if ask.document is None:
            return [WHOLE]
        every = self.kept[ask.document, ask.policy].by_tier
        return sorted(every, key=lambda tier: (tier != likely, -float(tier)))

    def _chain(self, ask: Ask) -> _Chain | None:
        """Return the conversation before the turn; None if it went otherwise."""
        chain = self._root(ask)
        for at, turn in enumerate(ask.before):
            prompt = self._prompt(replace(ask, before=ask.before[:at], turn=turn))
            said = self._say(chain, prompt, turn)
            if self._text(said.tokens) != turn.answer:
                return None
            chain = self._after(chain, prompt, turn, said)
        return chain

    def _root(self, ask: Ask) -> _Chain:
        if ask.document is None and not ask.own:
            return _Chain((), ())
        ids = tuple(context_ids(self.model.chat, self._document(ask)))
        kept = None if ask.document is None else self.kept[ask.document, ask.policy]
        return _Chain(ids, (Block(0, len(ids), (), kept),))

    def _document(self, ask: Ask) -> str:
        return ask.own if ask.document is None else self.documents[ask.document]

    def _prompt(self, ask: Ask) -> Ids:
        """Return the tokens of the turn's question, up to where the answer begins."""
        chat, question = self.model.chat, ask.turn.question
        if ask.before:
            message = Message("user", (Part(question),))
            roles = ("user", "assistant") * len(ask.before)
            pieces = chat.continue_(roles, False, [message])
            return tuple(token for piece in pieces for token in piece.ids)
        if ask.form == "handle":
            return tuple(question_ids(chat, question))
        return self._resent(ask)

    def _resent(self, ask: Ask) -> Ids:
        """Return what follows the document when the whole conversation is in the request."""
        parts = tuple(Part(text) for text in (self._document(ask), ask.turn.question) if text)
        first = [Message("user", parts)]
        said = [m for turn in ask.before for m in self._messages(turn)]
        if ask.before:
            opening = (Part(self._document(ask)), Part(ask.before[0].question))
            first = [Message("user", opening)]
            said = [*said[1:], Message("user", (Part(ask.turn.question),))]
        pieces = self.model.chat.render([*first, *said], add_generation_prompt=True)
        ids = [token for piece in pieces for token in piece.ids]
        return tuple(ids[len(self._root(ask).ids) :])

    def _messages(self, turn: Turn) -> list[Message]:
        return [Message("user", (Part(turn.question),)), Message("assistant", (Part(turn.answer),))]

    def _anew(self, ask: Ask) -> Greedy:
        """Return the answer if no stored turn stands for the resent ones."""
        return self._say(self._root(ask), self._resent(ask), ask.turn)

    def _say(self, chain: _Chain, prompt: Ids, turn: Turn) -> Greedy:
        ids = (*chain.ids, *chain.pending, *prompt)
        start = len(chain.ids)
        views = tuple((b.start, b.end, b.view, id(b.kept)) for b in chain.blocks)
        name = (ids, start, views, turn.tier, turn.max_tokens)
        if name not in self._said:
            blocks = [*chain.blocks, Block(start, len(ids), (turn.tier,))]
            model = self.model
            self._said[name] = oracle.greedy(model.model, model.spec, ids, blocks, turn.max_tokens)
        return self._said[name]

    def _after(self, chain: _Chain, prompt: Ids, turn: Turn, said: Greedy) -> _Chain:
        """Return the conversation after a turn: its last token may have no KV yet."""
        ids = (*chain.ids, *chain.pending, *prompt, *said.tokens)
        end = len(ids) if said.ended else len(ids) - 1
        block = Block(len(chain.ids), end, (turn.tier,))
        pending = (*ids[end:], *self.model.chat.closing_ids)
        return _Chain(ids[:end], (*chain.blocks, block), pending)
