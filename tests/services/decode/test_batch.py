"""A step of several sequences is what each of them, alone and naively, computes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from small_pool import SmallPool
from torch import Tensor

from criticalkv.services.decode.batch import BatchPlan, Member
from criticalkv.services.decode.resident import NodeView, ResidentNode
from criticalkv.services.decode.stepwise_kv import StepwiseKV
from criticalkv.services.decode.turn_kv import TurnKV
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.errors import CancelledError, NodeMissingError
from criticalkv.shared.model.attention import LayerCall

TIERS = ("0.2", "1")
ROOT = [[[1, 0, 2], [1, 1, 0]], [[5, 2, 9], [4, 8, 1]]]
MID = [[[3, 0, 5], [0, 1, 4]]]
LEAF = [[[2, 2, 2], [2, 2, 2]]]
SCALING = 0.4
FLOOR = 2e-6  # of fp32 against fp64, at entries of order 1
CPU = torch.device("cpu")


@dataclass
class Known:
    """A sequence, and what its heads have seen, kept apart from the pool."""

    kv: TurnKV
    caches: list[RaggedCache] = field(default_factory=list)
    own: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    """[token][layer] → keys and values, [heads, dim]."""

    @property
    def position(self) -> int:
        return self.kv.first_position + len(self.own)

    def entries(self, layer: int, head: int, own: int) -> list[tuple[Tensor, Tensor, int]]:
        out = []
        for cache in self.caches:
            keys, values, positions = cache.layers[layer].head(head)
            out += list(zip(keys, values, positions.tolist(), strict=True))
        for t in range(own):
            keys, values = self.own[t][layer]
            out.append((keys[head], values[head], self.kv.first_position + t))
        return out


class World:
    """Sequences over one chain of three nodes, read at various tiers and depths."""

    def __init__(self) -> None:
        self.pool = SmallPool()
        root = self.pool.publish(ROOT, TIERS)
        mid = self.pool.publish(MID, parent=root[0], seed=1)
        leaf = self.pool.publish(LEAF, parent=mid[0], seed=2)
        self.caches = [cache for _, cache in (root, mid, leaf)]
        self.nodes = [self.pool.hold(*node) for node in (root, mid, leaf)]
        self.generator = torch.Generator().manual_seed(3)

    def sequence(self, *tiers: str) -> Known:
        views = [NodeView(node, tier) for node, tier in zip(self.nodes, tiers, strict=False)]
        for view in views:
            self.pool.residents.use(view.node)
        caches = [c.at_tier(t) for c, t in zip(self.caches, tiers, strict=False)]
        return Known(self.pool.turn(views), caches)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


@dataclass
class Tokens:
    """What a sequence's next tokens are made of, by layer."""

    query: Tensor  # [layers, num_q_heads, T, dim]
    key: Tensor
    value: Tensor

    @classmethod
    def random(cls, world: World, count: int) -> Tokens:
        layers, heads = world.pool.heads
        shape = (count, world.pool.spec.head_dim)
        sizes = (2 * heads, heads, heads)
        return cls(*(world.random(layers, size, *shape) for size in sizes))

    @property
    def count(self) -> int:
        return self.key.shape[2]


def step(
    world: World, members: Sequence[tuple[Known, Tokens]], window: int | None = None
) -> list[Tensor]:
    """Run a step; return each member's output, [layers, num_q_heads, T, dim]."""
    listed = []
    for known, tokens in members:
        world.pool.grow(known.kv, tokens.count)
        listed.append(Member(known.kv, [7] * tokens.count, known.position, lambda: None))
        for t in range(tokens.count):
            layers = zip(tokens.key[:, :, t], tokens.value[:, :, t], strict=True)
            known.own.append(list(layers))
    plan = BatchPlan(world.pool.pages, listed, CPU)
    outs = []
    for layer in range(world.pool.spec.num_layers):
        q, k, v = (
            torch.cat([getattr(tokens, name)[layer] for _, tokens in members], 1)
            for name in ("query", "key", "value")
        )
        outs.append(plan.attend(LayerCall(layer, q, k, v, SCALING, window)))
    return list(torch.stack(outs).split([tokens.count for _, tokens in members], dim=2))


def naive(known: Known, tokens: Tokens, window: int | None = None) -> Tensor:
    """Every query over the entries it sees, in fp64; to be called after the step."""
    out = torch.zeros(tokens.query.shape, dtype=torch.float64)
    before = len(known.own) - tokens.count
    for layer, head, t in torch.cartesian_prod(*map(torch.arange, out.shape[:3])).tolist():
        position = known.kv.first_position + before + t
        seen = known.entries(layer, head // 2, before + t + 1)
        if window is not None:
            seen = [entry for entry in seen if entry[2] > position - window]
        query = tokens.query[layer, head, t].double()
        weights = [math.exp(SCALING * float(query @ key.double())) for key, _, _ in seen]
        for weight, (_, value, _) in zip(weights, seen, strict=True):
            out[layer, head, t] += weight / sum(weights) * value.double()
    return out


def sequences(world: World) -> list[Known]:
    return [
        world.sequence(),
        world.sequence("0.2"),
        world.sequence("1", "1", "1"),
        world.sequence("0.2", "1"),
        world.sequence("1"),
    ]


@pytest.mark.parametrize("window", [None, 7])
def test_every_row_is_its_own_sequences(window: int | None) -> None:
    """Prompts of several tokens, then single ones beside them, then a fork."""
    world = World()
    known = sequences(world)
    for counts in ((3, 5, 1, 9, 4), (1, 1, 6, 1, 1), (1, 1, 1, 4, 1)):
        members = [(k, Tokens.random(world, n)) for k, n in zip(known, counts, strict=True)]
        for out, member in zip(step(world, members, window), members, strict=True):
            torch.testing.assert_close(out.double(), naive(*member, window), atol=FLOOR, rtol=0)
    (branch,) = known[2].kv.fork(1)
    forked = [known[2], Known(branch, known[2].caches, list(known[2].own)), known[0]]
    for few in ((1, 2, 1), (4, 1, 1)):
        members = [(k, Tokens.random(world, n)) for k, n in zip(forked, few, strict=True)]
        for out, member in zip(step(world, members, window), members, strict=True):
            torch.testing.assert_close(out.double(), naive(*member, window), atol=FLOOR, rtol=0)
    for each in (*known, forked[1]):
        each.kv.close()
    for node in world.nodes:
        world.pool.residents.leave(node)
    world.pool.assert_empty()


@pytest.mark.parametrize("alone", range(5))
def test_a_row_does_not_depend_on_its_neighbours(alone: int) -> None:
    together, apart = World(), World()
    counts = ((3, 5, 1, 9, 4), (1, 1, 2, 1, 1))
    one, all_of_them = sequences(apart)[alone], sequences(together)
    for step_counts in counts:
        members = [
            (k, Tokens.random(together, n)) for k, n in zip(all_of_them, step_counts, strict=True)
        ]
        outs = step(together, members)
        (out,) = step(apart, [(one, members[alone][1])])
        assert out.equal(outs[alone])


def test_tokens_and_positions_are_flattened_in_order() -> None:
    world = World()
    first, second = world.sequence(), world.sequence("1")
    for known, count in ((first, 2), (second, 3)):
        world.pool.grow(known.kv, count)
    start = world.nodes[0].manifest.next_position
    members = [
        Member(first.kv, (5, 6), 0, lambda: None),
        Member(second.kv, (8, 9, 7), start, lambda: None),
    ]
    plan = BatchPlan(world.pool.pages, members, CPU)
    assert plan.token_ids.tolist() == [5, 6, 8, 9, 7]
    assert plan.positions.tolist() == [0, 1, start, start + 1, start + 2]


class Echo(StepwiseKV):
    """Answers with its queries."""

    def __init__(self) -> None:
        return

    def attend(self, call: LayerCall) -> Tensor:
        return call.query + call.key.shape[1]


@pytest.mark.parametrize("paged", [0, 2])
def test_turns_beside_the_pages_get_their_own_part(paged: int) -> None:
    world = World()
    known = [(world.sequence("1"), Tokens.random(world, n + 1)) for n in range(paged)]
    members = []
    for each, tokens in known:
        world.pool.grow(each.kv, tokens.count)
        members.append(Member(each.kv, [1] * tokens.count, each.position, lambda: None))
        each.own += [[(tokens.key[0, :, t], tokens.value[0, :, t])] for t in range(tokens.count)]
    beside = [Tokens.random(world, n) for n in (2, 3)]
    members += [Member(Echo(), [1] * tokens.count, 0, lambda: None) for tokens in beside]
    everybody = [*(tokens for _, tokens in known), *beside]
    q, k, v = (
        torch.cat([getattr(tokens, name)[0] for tokens in everybody], 1)
        for name in ("query", "key", "value")
    )
    plan = BatchPlan(world.pool.pages, members, CPU)
    outs = plan.attend(LayerCall(0, q, k, v, SCALING, None))
    *first, two, three = outs.split([tokens.count for tokens in everybody], 1)
    assert two.equal(beside[0].query[0] + 2)
    assert three.equal(beside[1].query[0] + 3)
    for out, (each, tokens) in zip(first, known, strict=True):
        only = Tokens(tokens.query[:1], tokens.key[:1], tokens.value[:1])
        torch.testing.assert_close(out[None].double(), naive(each, only), atol=FLOOR, rtol=0)


def waiting(world: World, check: Callable[[], None]) -> tuple[ResidentNode, BatchPlan, LayerCall]:
    """A plan over a node of which nothing has come yet."""
    node = world.pool.begin(world.pool.publish(ROOT, TIERS, seed=5)[0])
    kv = world.pool.turn([NodeView(node, "1")], tokens=1)
    tokens = Tokens.random(world, 1)
    plan = BatchPlan(world.pool.pages, [Member(kv, [1], 9, check)], CPU)
    call = LayerCall(0, tokens.query[0], tokens.key[0], tokens.value[0], SCALING, None)
    return node, plan, call


def test_a_layer_is_attended_to_once_it_is_there() -> None:
    world = World()
    node, plan, call = waiting(world, lambda: None)
    cache = world.pool.publish(ROOT, TIERS, seed=5)[1]

    def arrive() -> None:
        layer = cache.layers[0]
        world.pool.pages.write(node.rows(0), layer.keys, layer.values, layer.positions)
        node.arrived(1)

    thread = threading.Timer(0.1, arrive)
    thread.start()
    assert not plan.attend(call).isnan().any()
    thread.join()


def test_who_is_given_up_or_fails_while_waiting_ends() -> None:
    def give_up() -> None:
        raise CancelledError("given up")

    _, plan, call = waiting(World(), give_up)
    with pytest.raises(CancelledError):
        plan.attend(call)
    node, plan, call = waiting(World(), lambda: None)
    node.failed(NodeMissingError.of(node.manifest.node_id, "planted"))
    with pytest.raises(NodeMissingError, match="planted"):
        plan.attend(call)
