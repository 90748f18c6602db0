"""Moving a handle to a better node: only from a childless one, and only once."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from valkey_servers import user_of

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import keys, scripts
from criticalkv.services.store.books import Books
from criticalkv.services.store.handles import Handles
from criticalkv.services.store.nodes import Nodes
from criticalkv.services.store.redis_data import RedisData
from criticalkv.shared.errors import (
    ContextNotFoundError,
    IdempotencyConflictError,
    InvalidRequestError,
    NodeMissingError,
)
from criticalkv.shared.redis_location import Deployment

ALICE, BOB = "a1" * 16, "b2" * 16
MOVED = pb.MoveHandleResponse.MOVED
HAS_CHILDREN = pb.MoveHandleResponse.HAS_CHILDREN
ELSEWHERE = pb.MoveHandleResponse.ELSEWHERE


@pytest.fixture
def pair(store, make_node):
    """A node with a handle, and a better one."""
    old, new = make_node(), make_node()
    old.put(store)
    new.put(store)
    store.bind_handle("ctx_1", ALICE, old.node_id, b"old", ttl_ms=9_000_000)
    yield old, new
    for node in (old, new):
        store.unpin(ALICE, node.node_id)
    for handle in ("ctx_1", "ctx_2"):
        try:
            store.delete_handle(ALICE, handle)
        except ContextNotFoundError:
            continue


def bound(valkey, node):
    return valkey.zrange(keys.bindings(node.node_id), 0, -1)


def move(store, old, new, metadata=None, handle="ctx_1"):
    return store.move_handle(ALICE, handle, old.node_id, new.node_id, metadata)


def ms_left(store, node):
    return store.stat([node.node_id])[0].ttl_ms


def test_a_handle_moves_and_keeps_what_it_is(store, valkey, pair):
    old, new = pair
    before = store.resolve_handle(ALICE, "ctx_1")
    assert move(store, old, new, b"new") == MOVED
    after = store.resolve_handle(ALICE, "ctx_1")
    assert (after.node_id, after.metadata) == (new.node_id, b"new")
    assert (after.created_at, after.ttl_ms) == (before.created_at, before.ttl_ms)
    assert [h.node_id for h in store.list_handles(ALICE, "ctx_1")] == [new.node_id]
    assert (len(bound(valkey, old)), len(bound(valkey, new))) == (0, 1)
    assert move(store, old, new) == MOVED  # a retry after a lost answer
    assert store.resolve_handle(ALICE, "ctx_1").metadata == b"new"


def test_the_new_node_lives_with_the_handle_and_the_handle_no_longer(store, valkey, pair):
    old, new = pair
    name = keys.handle(keys.digest(ALICE, "ctx_1"))
    valkey.pexpire(name, 5_000_000)
    store.touch(new.node_id, 1000)
    move(store, old, new)
    assert 4_900_000 < valkey.pttl(name) <= 5_000_000
    assert ms_left(store, new) > 4_900_000
    assert valkey.zscore(keys.bindings(new.node_id), bound(valkey, new)[0]) > time.time() * 1000


def test_a_node_with_children_keeps_its_handle(store, valkey, make_node, pair):
    old, new = pair
    child = make_node(parent=old)
    child.put(store)
    assert move(store, old, new, b"new") == HAS_CHILDREN
    found = store.resolve_handle(ALICE, "ctx_1")
    assert (found.node_id, found.metadata) == (old.node_id, b"old")
    assert (len(bound(valkey, old)), len(bound(valkey, new))) == (1, 0)
    store.delete_node(child.node_id)  # its KV is gone, and nobody holds it


def test_a_child_that_is_only_announced_counts(store, store_process, make_node, pair):
    old, new = pair
    child = make_node(parent=old)
    with_handles(store_process, lambda _, redis: announce(redis, old, child))
    assert move(store, old, new) == HAS_CHILDREN


def test_a_lost_child_without_a_handle_does_not_count(store, valkey, make_node, pair):
    old, new = pair
    child = make_node(parent=old)
    child.put(store)
    store.delete_node(child.node_id)
    valkey.zadd(keys.children(old.node_id), {child.node_id: 1.0})  # announced long ago
    assert move(store, old, new) == MOVED


def test_a_lost_child_with_a_handle_counts(store, valkey, make_node, pair):
    old, new = pair
    child = make_node(parent=old)
    child.put(store)
    store.bind_handle("resp_move", ALICE, child.node_id, b"")
    store.delete_node(child.node_id)
    valkey.zadd(keys.children(old.node_id), {child.node_id: 1.0})
    assert move(store, old, new) == HAS_CHILDREN
    store.delete_handle(ALICE, "resp_move")


def test_a_handle_on_a_third_node_stays(store, valkey, make_node, pair):
    old, new = pair
    third = make_node()
    third.put(store)
    move(store, old, new)
    assert move(store, old, third) == ELSEWHERE
    assert store.resolve_handle(ALICE, "ctx_1").node_id == new.node_id
    assert bound(valkey, third) == []


def test_what_cannot_be_moved_is_refused(store, pair):
    old, new = pair
    for tenant, handle in ((ALICE, "ctx_0"), (BOB, "ctx_1"), (ALICE, "no / name")):
        with pytest.raises(ContextNotFoundError):
            store.move_handle(tenant, handle, old.node_id, new.node_id)
    with pytest.raises(NodeMissingError):
        store.move_handle(ALICE, "ctx_1", old.node_id, "6" * 64)
    with pytest.raises(InvalidRequestError, match="same"):
        store.move_handle(ALICE, "ctx_1", old.node_id, old.node_id)
    with pytest.raises(InvalidRequestError, match="metadata"):
        store.move_handle(ALICE, "ctx_1", old.node_id, new.node_id, b"x" * 65537)
    assert store.resolve_handle(ALICE, "ctx_1").node_id == old.node_id


def test_a_node_that_has_lost_its_kv_can_be_left(store, pair):
    old, new = pair
    store.delete_node(old.node_id)
    assert move(store, old, new) == MOVED


def test_the_pin_goes_over_with_the_last_handle(store, pair):
    old, new = pair
    store.bind_handle("ctx_2", ALICE, old.node_id, b"")
    store.pin(ALICE, old.node_id)
    move(store, old, new)
    assert [s.pinned for s in store.stat([old.node_id, new.node_id])] == [True, True]
    move(store, old, new, handle="ctx_2")
    assert [s.pinned for s in store.stat([old.node_id, new.node_id])] == [False, True]


def test_a_pin_that_could_not_go_over_keeps_the_handle(store, pair):
    old, new = pair
    store.pin(ALICE, old.node_id)
    store.delete_node(new.node_id)  # its record is left
    with pytest.raises(NodeMissingError):
        move(store, old, new)
    assert store.resolve_handle(ALICE, "ctx_1").node_id == old.node_id
    store.unpin(ALICE, old.node_id)
    assert move(store, old, new) == MOVED


def test_a_better_node_goes_with_the_old_one(store, valkey, make_node, pair):
    old, better = pair
    child = make_node(parent=better)
    child.put(store)
    assert store.link_better(old.node_id, better.node_id)
    assert store.link_better(old.node_id, child.node_id)
    assert valkey.pttl(keys.betters(old.node_id)) > 3_600_000
    gone = store.delete_handle(ALICE, "ctx_1")
    assert set(gone) == {old.node_id, better.node_id, child.node_id}
    assert store.token_records([better.node_id, child.node_id]) == [None, None]
    assert not valkey.exists(keys.betters(old.node_id))


def test_a_better_node_goes_even_if_the_kv_is_lost_already(store, pair):
    old, better = pair
    store.link_better(old.node_id, better.node_id)
    store.delete_node(old.node_id)
    store.delete_node(better.node_id)
    store.delete_handle(ALICE, "ctx_1")
    assert store.token_records([old.node_id, better.node_id]) == [None, None]


def test_a_better_node_that_is_in_use_stays(store, pair):
    old, better = pair
    store.link_better(old.node_id, better.node_id)
    store.bind_handle("ctx_2", ALICE, better.node_id, b"")
    assert store.delete_handle(ALICE, "ctx_1") == [old.node_id]
    assert store.stat([better.node_id])[0].present


def test_a_link_lives_as_long_as_the_node(store, valkey, pair):
    old, better = pair
    store.link_better(old.node_id, better.node_id)
    name = keys.betters(old.node_id)
    valkey.pexpire(name, 5000)
    store.pin(ALICE, old.node_id)
    assert valkey.pttl(name) == -1
    store.unpin(ALICE, old.node_id)
    assert valkey.pttl(name) > 3_600_000
    valkey.pexpire(name, 5000)
    store.touch(old.node_id, 1000)
    assert valkey.pttl(name) > 3_600_000


def test_nothing_is_linked_to_what_has_been_deleted(store, pair):
    old, better = pair
    store.delete_handle(ALICE, "ctx_1")
    assert not store.link_better(old.node_id, better.node_id)
    with pytest.raises(InvalidRequestError, match="same"):
        store.link_better(better.node_id, better.node_id)


def test_deleting_a_moved_handle_removes_both_nodes(store, pair):
    old, new = pair
    move(store, old, new)
    assert set(store.delete_handle(ALICE, "ctx_1")) == {old.node_id, new.node_id}
    assert store.token_records([old.node_id, new.node_id]) == [None, None]


def test_a_read_that_met_the_move_keeps_nothing_forever(store, valkey, pair):
    old, new = pair
    move(store, old, new)
    digest = keys.digest(ALICE, "ctx_1")
    valkey.zadd(keys.bindings(old.node_id), {digest: (time.time() + 99) * 1000})
    store.pin(ALICE, old.node_id)
    assert old.node_id in store.delete_handle(ALICE, "ctx_1")


def test_deleting_a_moved_handle_spares_another_on_the_old_node(store, pair):
    old, new = pair
    store.bind_handle("ctx_2", ALICE, old.node_id, b"")
    store.pin(ALICE, old.node_id)
    move(store, old, new)
    store.unpin(ALICE, new.node_id)
    assert store.delete_handle(ALICE, "ctx_1") == [new.node_id]
    assert store.stat([old.node_id])[0].pinned


def test_binding_again_to_the_node_that_was_left_changes_nothing(store, make_node, pair):
    old, new = pair
    move(store, old, new, b"new")
    again = store.bind_handle("ctx_1", ALICE, old.node_id, b"old")
    assert again.node_id == new.node_id
    assert store.resolve_handle(ALICE, "ctx_1").metadata == b"new"
    third = make_node()
    third.put(store)
    with pytest.raises(IdempotencyConflictError):
        store.bind_handle("ctx_1", ALICE, third.node_id, b"")


def test_delete_unreferenced(store, pair):
    old, new = pair
    assert not store.delete_unreferenced(old.node_id)
    assert store.delete_unreferenced(new.node_id)
    assert store.token_records([new.node_id]) == [None]
    assert not store.delete_unreferenced(new.node_id)


# ------------------------------------------------------------------- races


def with_handles(store_process, steps):
    """Run steps against the store's Valkey with components of their own."""

    async def run():
        redis = RedisData(Deployment.of(user_of(store_process.config.data_dir)), 5.0)
        nodes = Nodes(redis, Books(redis, 1 << 30), store_process.config)
        try:
            return await steps(Handles(redis, nodes, store_process.config), redis)
        finally:
            await redis.close()

    return asyncio.run(run())


async def announce(redis, parent, child):
    """What a put of a child does first."""
    names = [keys.children(parent.node_id), keys.manifest(parent.node_id)]
    await redis.run(
        scripts.ADOPT, [*names, keys.record(parent.node_id)], [child.node_id, 30_000, 0, 1]
    )


def move_with(store_process, old, new, script, meanwhile):
    """Move, and let something happen right before a script runs."""

    async def steps(handles, redis):
        run = redis.run

        async def racing(name, *rest):
            if name is script:
                await asyncio.to_thread(meanwhile)
            return await run(name, *rest)

        redis.run = racing
        request = pb.MoveHandleRequest(
            tenant=ALICE, handle="ctx_1", from_node=old.node_id, to_node=new.node_id
        )
        return (await handles.move(request)).outcome

    return with_handles(store_process, steps)


def test_a_child_published_between_look_and_move_keeps_the_handle(
    store_process, store, valkey, make_node, pair
):
    old, new = pair
    child = make_node(parent=old)
    outcome = move_with(store_process, old, new, scripts.LEAVE, lambda: child.put(store))
    assert outcome == HAS_CHILDREN
    assert store.resolve_handle(ALICE, "ctx_1").node_id == old.node_id
    assert (len(bound(valkey, old)), bound(valkey, new)) == (1, [])


@pytest.mark.parametrize("script", ["LEAVE", "MOVE"])
def test_a_handle_deleted_meanwhile_is_not_brought_back(store_process, store, valkey, pair, script):
    old, new = pair

    def delete():
        store.delete_handle(ALICE, "ctx_1")

    with pytest.raises(ContextNotFoundError):
        move_with(store_process, old, new, getattr(scripts, script), delete)
    with pytest.raises(ContextNotFoundError):
        store.resolve_handle(ALICE, "ctx_1")
    assert bound(valkey, new) == []
    assert store.delete_unreferenced(new.node_id)


def test_a_move_right_before_a_delete_is_deleted_too(store_process, store, valkey, pair):
    old, new = pair

    async def steps(handles, redis):
        run = redis.run

        async def racing(name, *rest):
            if name is scripts.UNBIND:
                await asyncio.to_thread(lambda: move(store, old, new))
            return await run(name, *rest)

        redis.run = racing
        return await handles.delete(ALICE, "ctx_1")

    assert set(with_handles(store_process, steps)) == {old.node_id, new.node_id}
    assert bound(valkey, new) == []


def test_the_new_node_deleted_meanwhile_waits_for_the_move(store_process, store, pair):
    old, new = pair
    removed = []
    outcome = move_with(
        store_process,
        old,
        new,
        scripts.LEAVE,
        lambda: removed.append(store.delete_unreferenced(new.node_id)),
    )
    assert (outcome, removed) == (MOVED, [False])


def test_of_two_movers_one_wins(store, valkey, make_node):
    for i in range(10):
        old, *goals = nodes = [make_node() for _ in range(3)]
        for node in nodes:
            node.put(store)
        handle = f"ctx_race{i}"
        store.bind_handle(handle, ALICE, old.node_id, b"")
        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(lambda to: move(store, old, to, handle=handle), goals))  # noqa: B023
        assert sorted(outcomes) == [MOVED, ELSEWHERE]
        winner, loser = goals if outcomes[0] == MOVED else reversed(goals)
        assert store.resolve_handle(ALICE, handle).node_id == winner.node_id
        assert (len(bound(valkey, winner)), bound(valkey, loser)) == (1, [])
