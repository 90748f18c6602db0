"""Parents live at least as long as their children; handles decide what may go."""

from __future__ import annotations

import asyncio
import time

import pytest
from valkey_servers import user_of

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import scripts
from criticalkv.services.store.books import Books
from criticalkv.services.store.nodes import Nodes
from criticalkv.services.store.redis_data import RedisData
from criticalkv.shared.cache.manifest import encode_manifest
from criticalkv.shared.errors import (
    ContextNotFoundError,
    IdempotencyConflictError,
    InvalidRequestError,
    NodeMissingError,
)
from criticalkv.shared.redis_location import Deployment

ALICE, BOB = "a1" * 16, "b2" * 16


def ttl(store, *nodes):
    return [stat.ttl_ms for stat in store.stat([node.node_id for node in nodes])]


@pytest.fixture
def chain(store, make_node):
    root = make_node()
    child = make_node(parent=root)
    leaf = make_node(parent=child)
    for node in (root, child, leaf):
        node.put(store, ttl_ms=60_000)
    return root, child, leaf


def test_child_extends_its_ancestors_at_commit(store, make_node):
    root = make_node()
    root.put(store, ttl_ms=1000)
    child = make_node(parent=root)
    child.put(store, ttl_ms=50_000)
    parent_ms, child_ms = ttl(store, root, child)
    assert parent_ms >= child_ms > 40_000


def test_touch_extends_ancestors_segments_and_record(store, valkey, chain):
    assert store.touch(chain[2].node_id, 900_000)
    root, child, leaf = ttl(store, *chain)
    assert root >= leaf > 890_000
    assert child >= leaf
    for node in chain:
        assert valkey.pttl(node.segment_key(3)) > ttl(store, node)[0]
        assert valkey.pttl(f"ckv:{{{node.node_id}}}:t") > 900_000
    assert store.touch(chain[2].node_id, 1000)  # never shortens
    assert ttl(store, chain[2])[0] > 880_000


def test_touch_of_nothing(store):
    assert not store.touch("3" * 64, 1000)


def test_pin_keeps_the_chain_until_unpinned(store, valkey, chain):
    root, child, leaf = chain
    assert store.pin(ALICE, leaf.node_id) == 1
    assert store.pin(ALICE, leaf.node_id) == 1  # idempotent
    assert store.pin(BOB, leaf.node_id) == 2
    assert ttl(store, root, child, leaf) == [0, 0, 0]
    assert valkey.pttl(root.segment_key(0)) == -1
    assert [s.pinned for s in store.stat([n.node_id for n in chain])] == [False, False, True]
    assert store.unpin(ALICE, leaf.node_id) == 1
    assert ttl(store, root, leaf) == [0, 0]
    assert store.unpin(BOB, leaf.node_id) == 0
    assert all(ms > 0 for ms in ttl(store, root, child, leaf))
    assert valkey.pttl(root.segment_key(0)) > 0
    assert store.unpin(BOB, leaf.node_id) == 0


def test_two_pins_below_one_parent(store, make_node):
    root = make_node()
    left, right = make_node(parent=root), make_node(parent=root)
    for node in (root, left, right):
        node.put(store)
        store.pin(ALICE, node.node_id)
    store.unpin(ALICE, root.node_id)
    store.unpin(ALICE, left.node_id)
    assert ttl(store, root) == [0]
    store.unpin(ALICE, right.node_id)
    assert ttl(store, root)[0] > 0


def test_pin_of_nothing(store):
    with pytest.raises(NodeMissingError):
        store.pin(ALICE, "4" * 64)


def test_handle_roundtrip(store, chain):
    before = int(time.time()) - 1
    bound = store.bind_handle("resp_1", ALICE, chain[2].node_id, b"meta", ttl_ms=5_000_000)
    found = store.resolve_handle(ALICE, "resp_1")
    assert found == bound
    assert (found.node_id, found.metadata) == (chain[2].node_id, b"meta")
    assert found.created_at >= before
    assert ttl(store, chain[0])[0] > 4_900_000  # the chain lives with the handle


def test_unknown_expired_and_foreign_handles_look_the_same(store, chain):
    store.bind_handle("resp_mine", ALICE, chain[0].node_id, b"")
    store.bind_handle("resp_short", ALICE, chain[0].node_id, b"", ttl_ms=30)
    time.sleep(0.05)
    answers = set()
    for tenant, handle in [
        (ALICE, "resp_unknown"),
        (ALICE, "resp_short"),
        (BOB, "resp_mine"),
        (ALICE, "no such / name"),
    ]:
        for call in (store.resolve_handle, store.delete_handle):
            with pytest.raises(ContextNotFoundError) as caught:
                call(tenant, handle)
            answers.add((caught.value.message, caught.value.param))
    assert len(answers) == 1
    assert store.resolve_handle(ALICE, "resp_mine")
    assert store.list_handles(BOB) == []


def test_handle_is_bound_once(store, chain):
    store.bind_handle("resp_once", ALICE, chain[0].node_id, b"1")
    assert store.bind_handle("resp_once", ALICE, chain[0].node_id, b"2").metadata == b"2"
    with pytest.raises(IdempotencyConflictError):
        store.bind_handle("resp_once", ALICE, chain[1].node_id, b"")
    other = store.bind_handle("resp_once", BOB, chain[1].node_id, b"")  # another's own
    assert other.node_id == chain[1].node_id


def test_handle_outlives_kv_but_not_everything(store, chain):
    store.delete_node(chain[2].node_id)
    assert store.bind_handle("resp_kv", ALICE, chain[2].node_id, b"")
    with pytest.raises(NodeMissingError):
        store.bind_handle("resp_none", ALICE, "5" * 64, b"")


def test_handles_are_listed_newest_first(store, valkey, chain):
    tenant = "c3" * 8
    for i in range(3):
        store.bind_handle(f"ctx_{i}", tenant, chain[0].node_id, b"")
        valkey.zadd(f"ckv:o:{_digest(tenant)}", {f"ctx_{i}": i})
    store.bind_handle("resp_x", tenant, chain[0].node_id, b"", ttl_ms=30)
    time.sleep(0.05)
    assert [h.handle for h in store.list_handles(tenant)] == ["ctx_2", "ctx_1", "ctx_0"]
    assert [h.handle for h in store.list_handles(tenant, "ctx_", 2)] == ["ctx_2", "ctx_1"]
    assert store.list_handles(tenant, "resp_") == []
    with pytest.raises(InvalidRequestError, match="limit"):
        store.list_handles(tenant, limit=1001)


def _digest(tenant):
    from criticalkv.services.store import keys

    return keys.digest(tenant)


def test_delete_handle_takes_what_nothing_refers_to(store, valkey, chain):
    root, child, leaf = chain
    store.bind_handle("ctx_root", ALICE, root.node_id, b"")
    store.bind_handle("resp_leaf", ALICE, leaf.node_id, b"")
    store.bind_handle("resp_twin", BOB, leaf.node_id, b"")
    assert store.delete_handle(BOB, "resp_twin") == []
    assert store.delete_handle(ALICE, "resp_leaf") == [leaf.node_id, child.node_id]
    assert [s.present for s in store.stat([n.node_id for n in chain])] == [True, False, False]
    assert store.token_records([leaf.node_id]) == [None]
    assert list(valkey.scan_iter(f"ckv:{{{leaf.node_id}}}:*")) == []
    with pytest.raises(ContextNotFoundError):
        store.resolve_handle(ALICE, "resp_leaf")
    assert store.delete_handle(ALICE, "ctx_root") == [root.node_id]


def test_delete_handle_spares_branches_and_pins(store, make_node):
    root = make_node()
    left, right = make_node(parent=root), make_node(parent=root)
    for node, handle in ((root, "ctx_r"), (left, "resp_l"), (right, "resp_r")):
        node.put(store)
        store.bind_handle(handle, ALICE, node.node_id, b"")
    store.pin(BOB, right.node_id)
    assert store.delete_handle(ALICE, "ctx_r") == []  # has children
    assert store.delete_handle(ALICE, "resp_l") == [left.node_id]
    assert store.delete_handle(ALICE, "resp_r") == []  # pinned
    assert [s.present for s in store.stat([root.node_id, right.node_id])] == [True, True]


def test_deleting_an_expired_turn_still_frees_its_parents(store, make_node):
    root = make_node()
    child = make_node(parent=root)
    root.put(store)
    child.put(store)
    store.bind_handle("resp_exp", ALICE, child.node_id, b"")
    store.delete_node(child.node_id)
    assert store.delete_handle(ALICE, "resp_exp") == [root.node_id]
    assert store.token_records([child.node_id]) == [None]


def test_no_key_holds_a_tenant_or_handle_in_the_clear(store, valkey, chain):
    store.bind_handle("resp_canary", "ca" * 16, chain[0].node_id, b"")
    names = b"\n".join(valkey.scan_iter("*", count=1000))
    assert b"canary" not in names
    assert b"ca" * 16 not in names
    assert all(name.startswith(b"ckv:") for name in names.splitlines())


def key(node, kind):
    return f"ckv:{{{node.node_id}}}:{kind}"


def test_children_are_listed_as_long_as_their_parent_lives(store, valkey, chain):
    root, _, leaf = chain
    listed = key(root, "c")
    # The second look is a little later than the first.
    assert 0 < valkey.pttl(listed) <= valkey.pttl(key(root, "t")) + 1000
    record_ms = 30 * 24 * 3_600_000
    assert store.touch(leaf.node_id, record_ms)
    assert valkey.pttl(listed) > record_ms - 60_000
    store.pin(ALICE, leaf.node_id)
    assert valkey.pttl(listed) == -1
    store.unpin(ALICE, leaf.node_id)
    assert valkey.pttl(listed) >= valkey.pttl(key(root, "m")) - 1000
    assert valkey.zrange(listed, 0, -1) == [chain[1].node_id.encode()]


def test_unpinning_keeps_the_time_asked_for(store, valkey, make_node):
    root = make_node()
    child = make_node(parent=root)
    root.put(store)
    day_ms = 24 * 3_600_000  # the store's default
    child.put(store, ttl_ms=5 * day_ms)
    store.pin(ALICE, child.node_id)
    store.unpin(ALICE, child.node_id)
    root_ms, child_ms = ttl(store, root, child)
    assert root_ms >= child_ms > 4 * day_ms
    assert valkey.pttl(child.segment_key(0)) > child_ms
    store.pin(ALICE, child.node_id)
    store.touch(child.node_id, 9 * day_ms)
    store.unpin(ALICE, child.node_id)
    root_ms, child_ms = ttl(store, root, child)
    assert root_ms >= child_ms > 8 * day_ms


def test_unpinning_a_damaged_node_frees_its_ancestors(store, valkey, chain):
    root, child, leaf = chain
    store.pin(ALICE, leaf.node_id)
    store.delete_node(leaf.node_id)  # as a reader of a damaged segment does
    assert store.unpin(ALICE, leaf.node_id) == 0
    for node in (root, child):
        assert not valkey.exists(key(node, "q"))
        assert ttl(store, node)[0] > 0
    assert valkey.pttl(key(leaf, "t")) > 0


def test_pin_of_a_vanishing_node_leaves_no_marks(store_process, store, valkey, chain):
    root, child, leaf = chain

    async def pin(nodes, redis):
        run_many = redis.run_many

        async def vanish(calls):
            valkey.delete(key(leaf, "m"))
            return await run_many(calls)

        redis.run_many = vanish
        with pytest.raises(NodeMissingError):
            await nodes.pin(ALICE, leaf.node_id)

    with_nodes(store_process, pin)
    for node in (root, child):
        assert not valkey.exists(key(node, "q"))
        assert ttl(store, node)[0] > 0


def with_nodes(store_process, steps):
    """Run steps on the store's Redis, with a `Nodes` that they may interrupt."""

    async def run():
        redis = RedisData(Deployment.of(user_of(store_process.config.data_dir)), 5.0)
        try:
            nodes = Nodes(redis, Books(redis, 1 << 30), store_process.config)
            await steps(nodes, redis)
        finally:
            await redis.close()

    asyncio.run(run())


def test_deleted_context_takes_turns_that_nobody_bound(store, valkey, chain):
    root, child, leaf = chain
    store.bind_handle("ctx_turns", ALICE, root.node_id, b"")
    gone = store.delete_handle(ALICE, "ctx_turns")
    assert gone == [leaf.node_id, child.node_id, root.node_id]
    for node in chain:
        assert list(valkey.scan_iter(key(node, "*"))) == []


def test_deleting_a_context_keeps_what_others_hold(store, make_node):
    root = make_node()
    bound, loose, middle = (make_node(parent=root) for _ in range(3))
    below_bound, below_loose = make_node(parent=bound), make_node(parent=loose)
    pinned, unused = make_node(parent=middle), make_node(parent=middle)
    nodes = [root, bound, loose, middle, below_bound, below_loose, pinned, unused]
    for node in nodes:
        node.put(store)
    store.bind_handle("ctx_others", ALICE, root.node_id, b"")
    store.bind_handle("resp_bound", BOB, bound.node_id, b"")
    store.pin(BOB, pinned.node_id)
    gone = store.delete_handle(ALICE, "ctx_others")
    assert set(gone) == {loose.node_id, below_loose.node_id, unused.node_id}
    assert gone.index(below_loose.node_id) < gone.index(loose.node_id)
    kept = [root, bound, middle, below_bound, pinned]
    assert all(stat.present for stat in store.stat([node.node_id for node in kept]))
    store.unpin(BOB, pinned.node_id)
    assert store.delete_handle(BOB, "resp_bound") == [below_bound.node_id, bound.node_id]


def test_deleting_a_context_keeps_the_records_of_an_expired_turn(store, valkey, chain):
    root, child, leaf = chain
    store.bind_handle("ctx_rec", ALICE, root.node_id, b"")
    store.bind_handle("resp_rec", ALICE, leaf.node_id, b"")
    valkey.delete(key(leaf, "m"), key(child, "m"))  # expired
    assert store.delete_handle(ALICE, "ctx_rec") == []
    assert None not in store.token_records([node.node_id for node in chain])
    assert store.delete_handle(ALICE, "resp_rec") == [root.node_id]
    assert store.token_records([node.node_id for node in chain]) == [None] * 3


def test_turn_of_a_deleted_context_is_not_published(store, valkey, make_node):
    root = make_node()
    child = make_node(parent=root)
    root.put(store)
    store.bind_handle("ctx_gone", ALICE, root.node_id, b"")
    ancestors = [root.node_id]
    with store.open_put(child.node_id, child.manifest.attempt, ancestors=ancestors) as writer:
        for payload in child.payloads:
            writer.send(payload)
        assert store.delete_handle(ALICE, "ctx_gone") == [root.node_id]
        with pytest.raises(NodeMissingError, match="deleted"):
            writer.commit(child.manifest, child.record)
    assert list(valkey.scan_iter(key(child, "*"))) == []
    assert list(valkey.scan_iter(key(root, "*"))) == []


def test_turn_whose_parent_has_a_record_only_is_published(store, make_node):
    root = make_node()
    root.put(store)
    store.delete_node(root.node_id)
    assert make_node(parent=root).put(store).published


def test_context_deleted_in_the_midst_of_a_commit_wins(store_process, store, valkey, make_node):
    root = make_node()
    child = make_node(parent=root)
    root.put(store)
    store.bind_handle("ctx_race", ALICE, root.node_id, b"")
    for i, payload in enumerate(child.payloads):
        valkey.set(child.segment_key(i), payload, px=60_000)
    commit = pb.PutCommit(
        manifest_parts=encode_manifest(child.manifest), token_record=child.record.encode()
    )

    async def publish(nodes, redis):
        run = redis.run

        async def interrupted(script, names, args):
            if script == scripts.PUBLISH:
                assert store.delete_handle(ALICE, "ctx_race") == [root.node_id]
            return await run(script, names, args)

        redis.run = interrupted
        with pytest.raises(NodeMissingError):
            await nodes.publish(child.manifest, commit, "")

    with_nodes(store_process, publish)
    assert list(valkey.scan_iter(key(child, "*"))) == []
    assert list(valkey.scan_iter(key(root, "*"))) == []
