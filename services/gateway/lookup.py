"""Find the longest stored prefix of a prompt: by token ids, and by aliases.

Reads only; whatever is missing is somebody else's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.async_store import AsyncStore
from criticalkv.services.gateway.nodes import (
    Model,
    Node,
    Want,
    child_identity,
    child_node,
    enough,
    is_stepwise,
    with_ancestors,
)
from criticalkv.services.gateway.prompt import Answer, Prompt
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.errors import NodeMissingError
from criticalkv.shared.identity import POLICY_DENSE, resolve_tier
from criticalkv.shared.model.chat import ChatTemplate

# A stop string cut out of the answer may leave this much text behind it in the record.
MAX_EXTRA_CHARS = 512
MAX_ALIASES = 256  # latest answers that are looked up


@dataclass(frozen=True)
class Found:
    """A stored prefix: its last node, and how far into the prompt it reaches.

    Attributes:
        steps: tokens of the last nodes, as far as they have not the wanted policy.
        base: the node before these.
    """

    node: Node | None
    offset: int
    steps: tuple[tuple[int, ...], ...] = ()
    base: Node | None = None

    def then(self, node: Node, ids: tuple[int, ...], end: int, want: Want) -> Found:
        """Return the prefix that is one compressed node longer."""
        if node.policy == want.policy:
            return Found(node, end)
        return Found(node, end, (*self.steps, ids), self.base if self.steps else self.node)


class Lookup:
    """Looks prompts up in the store."""

    def __init__(self, store: AsyncStore, model: Model, template: ChatTemplate) -> None:
        self._store = store
        self._model = model
        self._template = template

    async def longest(self, prompt: Prompt, want: Want) -> Found:
        """Return the longest stored prefix of resent history."""
        turn = await self._aliased(prompt.answers, want)
        exact = await self._exact(prompt, want)
        return turn if turn is not None and turn.offset >= exact.offset else exact

    async def child(self, parent: Node | None, token_ids: Sequence[int], want: Want) -> Node | None:
        """Return the stored compressed node of these tokens, at the wanted view or higher.

        One of the wanted policy, else one of the first policy, where that will do.
        """
        return next(iter(await self._children(parent, token_ids, want)), None)

    async def _children(
        self, parent: Node | None, token_ids: Sequence[int], want: Want
    ) -> list[Node]:
        """Return the best stored node under each policy that will do, the best first.

        Before them one that an earlier attempt went on from.
        """
        views = parent.views(want.read_tier) if parent else [()]
        names = [
            child_identity(self._model, parent, view, token_ids, choice).node_id
            for choice in want.choices
            for view in views
        ]
        best: dict[str, Node] = {}
        for stat in await self._store.stat(names):
            if stat.present and enough(stat.tiers, want.at_least):
                best.setdefault(stat.policy, child_node(parent, stat))
        return sorted(best.values(), key=lambda node: node.id not in want.known)

    async def _exact(self, prompt: Prompt, want: Want) -> Found:
        return await self._from(Found(None, 0), prompt, prompt.boundaries, want)

    async def _from(self, found: Found, prompt: Prompt, ends: Sequence[int], want: Want) -> Found:
        """Return the longest stored prefix that begins with `found`, the best of equal ones.

        While a chain is being refined, its first version may be longer than the better one.
        """
        longest = found
        if not ends:
            return longest
        ids = prompt.ids[found.offset : ends[0]]
        for node in await self._children(found.node, ids, want):
            begun = found.then(node, ids, ends[0], want)
            further = await self._from(begun, prompt, ends[1:], want)
            if further.offset == prompt.boundaries[-1]:
                return further
            longest = max(longest, further, key=lambda f: f.offset)
        return longest

    async def _aliased(self, answers: Sequence[Answer], want: Want) -> Found | None:
        recent = answers[-MAX_ALIASES:]
        if not recent:
            return None
        entries = await self._store.resolve_aliases([answer.alias for answer in recent])
        for answer, targets in reversed(list(zip(recent, entries, strict=True))):
            node = await self._best(answer, targets, want)
            if node is not None:
                return Found(node, answer.end)
        return None

    async def _best(
        self, answer: Answer, targets: Sequence[pb.AliasTarget], want: Want
    ) -> Node | None:
        """Return the turn whose view is equal to the wanted one, else the next higher."""
        fitting = []
        for target in targets:
            node = await self._candidate(target)
            if node is not None and _fits(tuple(target.view), node, want):
                view = tuple(map(Decimal, target.view))
                fitting.append((node.id not in want.known, view, node))
        for *_, node in sorted(fitting, key=lambda found: found[:2]):
            if await self._holds(node, answer.text):
                return node
        return None

    async def _candidate(self, target: pb.AliasTarget) -> Node | None:
        stat = (await self._store.stat([target.node_id]))[0]
        if not stat.present or list(stat.view) != list(target.view):
            return None
        try:
            return await with_ancestors(self._store, stat)
        except NodeMissingError:
            return None

    async def _holds(self, node: Node, text: str) -> bool:
        """Whether the turn's own tokens say what the client says was answered."""
        record = (await self._store.token_records([node.id]))[0]
        return record is not None and answers_with(record, text, self._template)


def answers_with(record: TokenRecord, text: str, template: ChatTemplate) -> bool:
    """Whether a turn's tokens, after its generation prompt, decode to `text`."""
    prompt = template.generation_ids
    ids = (*record.token_ids, *record.pending_ids)
    start = _last_index(ids, prompt)
    if start < 0:
        return False
    return any(
        said.startswith(text) and len(said) - len(text) <= MAX_EXTRA_CHARS
        for said in _texts(ids[start + len(prompt) :], template)
    )


def _texts(ids: Sequence[int], template: ChatTemplate) -> tuple[str, str]:
    """Return the text of tokens, at a text's start and within one.

    SentencePiece's decoders take the first space of a text away. That of an answer which
    goes on after given words is among these.
    """
    before = template.encode_content("a")
    within = template.decode([*before, *ids]).removeprefix(template.decode(before))
    return template.decode(ids), within


def _last_index(ids: Sequence[int], part: Sequence[int]) -> int:
    part = tuple(part)
    ids = tuple(ids)
    for at in range(len(ids) - len(part), -1, -1):
        if ids[at : at + len(part)] == part:
            return at
    return -1


def _fits(view: tuple[str, ...], node: Node, want: Want) -> bool:
    """Whether each ancestor is stored, and was read, at the wanted tier or a higher one.

    And whether nothing was evicted on the way by a stepwise policy that is not wanted.
    """
    if not all(_is_wanted(policy, want) for policy in node.chain_policies):
        return False
    wanted = [resolve_tier(tiers, want.read_tier) for tiers in node.chain_tiers[:-1]]
    return all(enough(tiers, want.at_least) for tiers in node.chain_tiers) and all(
        Decimal(v) >= Decimal(w) for v, w in zip(view, wanted, strict=True)
    )


def _is_wanted(policy: str, want: Want) -> bool:
    if policy in (POLICY_DENSE, want.policy, want.first_policy, want.turn_policy):
        return True
    return not is_stepwise(policy, otherwise=True)
