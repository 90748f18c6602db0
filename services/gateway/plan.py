"""From a prompt to what decode runs: look up, prefill what is missing, cut the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from criticalkv.services.gateway.async_store import AsyncStore
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.lookup import Found, Lookup
from criticalkv.services.gateway.nodes import Model, Node, Want, child_identity, child_node
from criticalkv.services.gateway.prefill_once import Prefiller
from criticalkv.services.gateway.prompt import Prompt
from criticalkv.services.gateway.restore import Restorer
from criticalkv.shared.config import GatewayConfig
from criticalkv.shared.errors import (
    ContextExpiredError,
    ContextLengthError,
    ContextNotFoundError,
    NodeMissingError,
)
from criticalkv.shared.identity import NodeId
from criticalkv.shared.model.chat import ChatTemplate
from criticalkv.shared.requests import PrefillRequest, PrefillResult

ATTEMPTS = 3


@dataclass
class Spent:
    """Prefill work done for one request."""

    results: list[PrefillResult] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that this request had computed and written."""
        return sum(result.num_tokens for result in self.results)

    @property
    def prefill_ms(self) -> float:
        """Time of the model's forwards over the contexts."""
        return sum(result.prefill_ms for result in self.results)

    @property
    def scoring_ms(self) -> float:
        """Time of scoring (replay included), ranking and packing."""
        return sum(result.scoring_ms for result in self.results)


@dataclass(frozen=True)
class Provisional:
    """The end of a chain that has another policy than the wanted one.

    Attributes:
        leaf: its last node.
        base: the node before it; None if it begins with the root.
        steps: its nodes' tokens.
        want: how they are wanted.
    """

    leaf: NodeId
    base: Node | None
    steps: tuple[tuple[int, ...], ...]
    want: Want


@dataclass
class Made:
    """What a background job computes in an old node's place.

    Each node is linked to the old one before it is computed, so that it cannot outlive it
    unseen, whatever happens in between.
    """

    store: AsyncStore
    old: NodeId
    ids: list[NodeId] = field(default_factory=list)

    async def begin(self, node_id: NodeId) -> None:
        """Note a node that is about to be computed.

        Raises:
            ContextNotFoundError: if the old one has been deleted.
        """
        if not await self.store.link_better(self.old, node_id):
            raise ContextNotFoundError("the context was deleted meanwhile")
        self.ids.append(node_id)

    def end(self, node_id: NodeId, result: PrefillResult | None) -> None:
        """Forget it if somebody else was first."""
        if result is None or not result.published:
            self.ids.remove(node_id)


@dataclass(frozen=True)
class Plan:
    """What decode runs, and where it came from."""

    parent: Node | None
    token_ids: tuple[int, ...]
    spent: Spent
    provisional: Provisional | None = None
    tenant: str = ""

    @property
    def prompt_tokens(self) -> int:
        """Original length of everything before the answer."""
        return (self.parent.next_position if self.parent else 0) + len(self.token_ids)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were in the store already."""
        return max(0, self.prompt_tokens - len(self.token_ids) - self.spent.tokens)


class Planner:
    """Makes plans for one model."""

    def __init__(
        self,
        store: AsyncStore,
        model: Model,
        template: ChatTemplate,
        prefiller: Prefiller,
        restorer: Restorer,
        limits: GatewayConfig,
    ) -> None:
        self._lookup = Lookup(store, model, template)
        self._model = model
        self._prefiller = prefiller
        self._restorer = restorer
        self._limits = limits

    async def resent(self, prompt: Prompt, want: Want, room: int, deadline: Deadline) -> Plan:
        """Plan a prompt that carries the whole conversation.

        Args:
            prompt: all of it.
            want: tiers, policy, salt.
            room: tokens that must stay free for the answer.
            deadline: of the request.

        Raises:
            ContextLengthError: before any prefill.
        """
        check_room(len(prompt.ids), room, self._model.max_positions)
        spent = Spent()

        async def plan() -> Plan:
            found = await self._lookup.longest(prompt, want)
            check_room(_length(found, prompt), room, self._model.max_positions)
            return await self._finish(prompt, found, want, spent, deadline)

        return await _anew(plan)

    async def continued(
        self, node_id: str, prompt: Prompt, want: Want, room: int, deadline: Deadline
    ) -> Plan:
        """Plan new tokens after a stored node, whose KV may have to be rebuilt.

        Raises:
            ContextLengthError: before any prefill.
            ContextExpiredError: if neither KV nor record is there.
        """
        before = await self._restorer.length(node_id)
        check_room(before + len(prompt.ids), room, self._model.max_positions)
        spent = Spent()

        async def plan() -> Plan:
            node, done = await self._restorer.restore(node_id, deadline, want.at_least, want.tenant)
            spent.results += done
            found = Found(node, 0)
            check_room(_length(found, prompt), room, self._model.max_positions)
            return await self._finish(prompt, found, want, spent, deadline)

        return await _anew(plan)

    async def store_all(self, prompt: Prompt, want: Want, deadline: Deadline) -> Plan:
        """Make sure that the nodes of all boundaries are stored; the rest is left out."""
        check_room(len(prompt.ids), 1, self._model.max_positions)
        spent = Spent()

        async def plan() -> Plan:
            found = await self._lookup.longest(prompt, want)
            found = await self._to_last_boundary(prompt, found, want, spent, deadline)
            return Plan(found.node, (), spent, _provisional(found, want), want.tenant)

        return await _anew(plan)

    async def refine(self, cheap: Provisional, deadline: Deadline, made: Made) -> Node:
        """Compute a chain's end under the wanted policy, behind everything else.

        Raises:
            ContextExpiredError: if the chain has been deleted.
        """
        if not await self._restorer.knows(cheap.leaf):
            raise ContextExpiredError("the context is no longer stored")
        node, want = cheap.base, cheap.want.settled
        for ids in cheap.steps:
            node = await self._stored(node, ids, want, Spent(), deadline, made)
        assert node is not None
        return node

    async def fold(self, leaf: NodeId, want: Want, deadline: Deadline, made: Made) -> Node:
        """Compute a whole chain as one root, behind everything else.

        What the leaf left pending becomes part of it: a root is found by its tokens, and
        must not depend on who put it there.

        Raises:
            ContextExpiredError: if a token record is gone.
        """
        ids = await self._restorer.tokens(leaf)
        return await self._stored(None, ids, want.settled, Spent(), deadline, made)

    async def restore(self, plan: Plan, deadline: Deadline, view: Sequence[str] = ()) -> Plan:
        """Rebuild the chain of a plan whose KV was lost meanwhile.

        Args:
            view: exact tier that each node of the chain must have, root first; empty = any.
        """
        assert plan.parent is not None
        parent, done = await self._restorer.restore(
            plan.parent.id, deadline, tenant=plan.tenant, view=view
        )
        spent = Spent([*plan.spent.results, *done])
        return Plan(parent, plan.token_ids, spent, tenant=plan.tenant)

    async def _finish(
        self, prompt: Prompt, found: Found, want: Want, spent: Spent, deadline: Deadline
    ) -> Plan:
        found = await self._to_last_boundary(prompt, found, want, spent, deadline)
        return await self._cut(prompt, found, want, spent, deadline)

    async def _to_last_boundary(
        self, prompt: Prompt, found: Found, want: Want, spent: Spent, deadline: Deadline
    ) -> Found:
        for end in prompt.boundaries:
            if end > found.offset:
                ids = _pending(found) + prompt.ids[found.offset : end]
                node = await self._stored(found.node, ids, want, spent, deadline)
                found = found.then(node, ids, end, want)
        return found

    async def _cut(
        self, prompt: Prompt, found: Found, want: Want, spent: Spent, deadline: Deadline
    ) -> Plan:
        """Send the head of a long suffix to prefill."""
        ids, limit = (
            _pending(found) + prompt.ids[found.offset :],
            self._limits.decode_max_suffix_tokens,
        )
        bound = limit if found.node else limit + self._limits.implicit_breakpoint_tokens
        if len(ids) <= bound:
            return Plan(found.node, ids, spent, _provisional(found, want), want.tenant)
        at = prompt.cut(found.offset, len(_pending(found)), limit)
        node = await self._stored(found.node, ids[:at], want, spent, deadline)
        found = found.then(node, ids[:at], found.offset, want)
        return Plan(node, ids[at:], spent, _provisional(found, want), want.tenant)

    async def _stored(
        self,
        parent: Node | None,
        ids: tuple[int, ...],
        want: Want,
        spent: Spent,
        deadline: Deadline,
        made: Made | None = None,
    ) -> Node:
        """Return the node of these tokens, prefilled if need be: at first cheaply, if wanted.

        With `made` in the background.
        """
        node = await self._lookup.child(parent, ids, want)
        if node is not None:
            return node
        request = self._request(parent, ids, want.choices[-1], background=made is not None)
        if made is not None:
            await made.begin(request.node_id)
        stat, result = await self._prefiller.ensure(request, want.at_least, deadline)
        if made is not None:
            made.end(request.node_id, result)
        spent.results += [result] if result else []
        return child_node(parent, stat)

    def _request(
        self, parent: Node | None, ids: tuple[int, ...], want: Want, *, background: bool
    ) -> PrefillRequest:
        view = parent.view(want.read_tier) if parent else ()
        return PrefillRequest(
            node_id=child_identity(self._model, parent, view, ids, want).node_id,
            token_ids=ids,
            policy=want.policy,
            store_tier=want.store_tier,
            salt=want.salt,
            ancestors=parent.chain if parent else (),
            view=view,
            ttl_ms=want.ttl_ms,
            tenant=want.tenant,
            background=background,
        )


async def _anew(plan: Callable[[], Awaitable[Plan]]) -> Plan:
    """Plan again if a node vanished, or lost a tier that was to be read, meanwhile."""
    for _ in range(ATTEMPTS - 1):
        with suppress(NodeMissingError):
            return await plan()
    return await plan()


def check_room(prompt_tokens: int, room: int, limit: int) -> None:
    """Refuse a prompt that leaves no room for the answer.

    Raises:
        ContextLengthError: naming the limit.
    """
    if prompt_tokens + room > limit:
        field = "max_tokens" if prompt_tokens < limit else "messages"
        raise ContextLengthError(
            f"{field}: {prompt_tokens} prompt tokens and {room} for the answer exceed the model's "
            f"limit of {limit} tokens",
            param=field,
        )


def _provisional(found: Found, want: Want) -> Provisional | None:
    if found.node is None or not found.steps:
        return None
    return Provisional(found.node.id, found.base, found.steps, want)


def _pending(found: Found) -> tuple[int, ...]:
    return found.node.pending_ids if found.node else ()


def _length(found: Found, prompt: Prompt) -> int:
    before = found.node.next_position if found.node else 0
    return before + len(_pending(found)) + len(prompt.ids) - found.offset
