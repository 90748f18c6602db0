"""A step of several sequences is what each of them, alone and naively, computes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from pool_world import CPU, FLOOR, ROOT, SCALING, TIERS, Known, Tokens, World, naive, step
from torch import Tensor

from criticalkv.services.decode.batch import BatchPlan, Member
from criticalkv.services.decode.resident import NodeView, ResidentNode
from criticalkv.services.decode.stepwise_kv import StepwiseKV
from criticalkv.shared.errors import CancelledError, NodeMissingError
from criticalkv.shared.model.attention import LayerCall


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
    world.close([*known, forked[1]])


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
        world.pool.write(node, 0, cache)
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
