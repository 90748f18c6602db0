"""A node that went for lack of memory is rebuilt from its record, and those above it."""

from __future__ import annotations

import itertools

import pytest

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import keys
from criticalkv.shared.config import StoreConfig

ALICE = "a1" * 16
CONFIG = StoreConfig(read_deadline_s=0.3, lease_ttl_s=2)


@pytest.fixture
def valkey(emptied):
    return emptied


@pytest.fixture
def rig(rigs):
    return rigs(CONFIG)


async def put_chain(rig, make_node, length):
    chain = []
    for _ in range(length):
        chain.append(make_node(parent=chain[-1] if chain else None))
        await rig.put(chain[-1])
    return chain


async def bind(rig, name, node):
    request = pb.BindHandleRequest(handle=name, tenant=ALICE, node_id=node.node_id)
    await rig.handles.bind(request)


async def evict(rig, node):
    return (await rig.nodes.drop(node.node_id, guard="evict", later=True, ages=True))[0]


async def records(rig, chain):
    return [bool(record) for record in await rig.nodes.records([n.node_id for n in chain])]


def announced_long_ago(valkey, chain):
    for parent, child in itertools.pairwise(chain):
        valkey.zadd(keys.children(parent.node_id), {child.node_id: 1}, xx=True)


@pytest.mark.parametrize("length", [2, 3], ids=["child", "grandchild"])
@pytest.mark.parametrize("evicted", ["leaf", "all"])
async def test_deleting_a_handle_leaves_what_the_record_of_another_needs(
    rig, valkey, make_node, evicted, length
):
    chain = await put_chain(rig, make_node, length)
    await bind(rig, "ctx_1", chain[0])
    await bind(rig, "resp_1", chain[-1])
    for node in reversed(chain if evicted == "all" else chain[-1:]):
        announced_long_ago(valkey, chain)
        assert await evict(rig, node) == "dropped"
    assert await rig.handles.delete(ALICE, "ctx_1") == []
    assert await records(rig, chain) == [True] * length
    await rig.handles.delete(ALICE, "resp_1")
    assert await records(rig, chain) == [False] * length


async def test_a_manifest_that_expired_between_two_handles_leaves_its_record(
    rig, valkey, make_node
):
    chain = await put_chain(rig, make_node, 3)
    await bind(rig, "ctx_1", chain[0])
    await bind(rig, "resp_1", chain[2])
    announced_long_ago(valkey, chain)
    valkey.delete(*(keys.manifest(node.node_id) for node in chain[1:]))
    await rig.handles.delete(ALICE, "ctx_1")
    assert await records(rig, chain) == [True] * 3


async def test_an_evicted_child_with_a_handle_keeps_no_memory_of_its_parent(rig, make_node):
    parent, child = await put_chain(rig, make_node, 2)
    await bind(rig, "resp_1", child)
    assert await evict(rig, parent) == "parent"
    assert await evict(rig, child) == "dropped"
    assert await rig.nodes.spared([parent.node_id]) == [""]  # it is asked in its turn
    assert await evict(rig, parent) == "dropped"
    assert await records(rig, [parent, child]) == [True, True]


async def test_a_child_that_comes_back_keeps_its_parent_again(rig, make_node):
    (parent,) = await put_chain(rig, make_node, 1)
    await rig.put(make_node(parent=parent, seed=1))
    child = make_node(parent=parent, seed=1)
    await bind(rig, "resp_1", child)
    assert await evict(rig, child) == "dropped"
    assert (await rig.put(child)).published
    assert await evict(rig, parent) == "parent"
