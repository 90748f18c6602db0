"""Random schedules of several servers: what is read is right, and the books add up."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_rig import Rig, held_bytes, total
from valkey_servers import admin_of

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import keys
from criticalkv.services.store.valkey import Valkey
from criticalkv.shared.cache.manifest import decode_manifest
from criticalkv.shared.config import StoreConfig, TenantQuota
from criticalkv.shared.errors import CriticalKVError, NodeMissingError, QuotaExceededError
from criticalkv.shared.frames import decode_get
from criticalkv.shared.identity import tenant_digest

TIERS = ("0.1", "0.2", "0.4", "0.6")
TIER = 2 * 6 * 68
GRACE_S = 0.05
NODES = 6
SERVERS = 3
CONFIG = StoreConfig(
    read_deadline_s=GRACE_S,
    high_watermark=0.9,
    low_watermark=0.7,
    tenant_quotas={"alice": TenantQuota(max_nodes=3)},
)
STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, NODES - 1), st.integers(2, 4)),
    st.tuples(st.just("read"), st.integers(0, NODES - 1), st.sampled_from(TIERS)),
    st.tuples(st.just("shrink"), st.integers(0, NODES - 1), st.booleans()),
    st.tuples(st.just("pin"), st.integers(0, NODES - 1), st.booleans()),
    st.tuples(st.just("drop"), st.integers(0, NODES - 1), st.booleans()),
    st.tuples(st.just("tend"), st.just(0), st.just(0)),
    st.tuples(st.just("sweep"), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.just(0), st.just(0)),
)
SCHEDULES = st.lists(st.lists(STEPS, min_size=4, max_size=14), min_size=SERVERS, max_size=SERVERS)


@pytest.fixture(scope="module")
def server():
    with Valkey("", 1 << 30) as valkey:
        yield valkey


class Run:
    """One schedule. A put of a node always has the same content, so reads can be judged."""

    def __init__(self, server, make_node, tenant):
        self.server = server
        self.make_node = make_node
        self.tenant = tenant
        self.payloads = {}
        self.reads = self.overtaken = 0

    def node(self, which, tiers=4):
        # The same identity whatever is stored of it; each put is an attempt of its own.
        node = self.make_node(seed=which, tiers=TIERS[:tiers], prefill_ms=which + 1.0)
        self.payloads[node.manifest.attempt] = node.payloads
        return node

    async def step(self, rig, name, which, what):
        if name == "put":
            await rig.put(self.node(which, what), tenant=self.tenant)
        elif name == "read":
            await self.read(rig, self.node(which).node_id, what)
        elif name == "shrink":
            await rig.shrinker.shrink(self.node(which).node_id, at_once=what)
        elif name == "pin":
            step = rig.nodes.pin if what else rig.nodes.unpin
            await step("aa", self.node(which).node_id)
        elif name == "drop":
            await rig.nodes.drop(self.node(which).node_id, guard="evict", later=what)
        elif name == "tend":
            await rig.evictor.keep_watermark()
        elif name == "sweep":
            await rig.janitor.sweep()
        else:
            await asyncio.sleep(GRACE_S / 2)

    async def read(self, rig, node_id, tier):
        stream = rig.reader.get(pb.GetNodeRequest(node_id=node_id, tier=tier))
        header = decode_get(await anext(stream))[0].header
        manifest = decode_manifest(header.manifest_parts)
        order = manifest.read_order(header.tier, range(manifest.num_layers))
        payloads = self.payloads[manifest.attempt]
        found = []
        try:
            async for data in stream:
                found.append(bytes(decode_get(data)[1]))
                await asyncio.sleep(0)
        except NodeMissingError:
            self.overtaken += 1  # a clean miss, and nothing wrong before it
            order = order[: len(found)]
        self.reads += 1
        assert found == [payloads[i] for i in order]

    async def serve(self, rig, steps):
        for step in steps:
            try:
                await self.step(rig, *step)
            except NodeMissingError:
                pass
            except QuotaExceededError:
                assert self.tenant
            except CriticalKVError as error:  # one pinned node at most: there is always room
                raise AssertionError(f"{step}: {error.message}") from error

    async def run(self, schedules):
        limit = (4 * SERVERS + 4 * 2) * TIER
        rigs = [Rig(self.server.store, CONFIG, limit) for _ in range(SERVERS)]
        for rig in rigs:
            rig.evictor.young_s = 0.0
        try:
            await asyncio.gather(*(self.serve(*pair) for pair in zip(rigs, schedules, strict=True)))
            await self.settle(rigs)
        finally:
            for rig in rigs:
                await rig.close()

    async def settle(self, rigs):
        await asyncio.sleep(2 * GRACE_S)
        for rig in rigs:
            await rig.janitor.sweep()
            await asyncio.sleep(GRACE_S)
        await rigs[0].janitor.sweep()
        await self.check_freeing(rigs[0])
        for which in range(NODES):
            node_id = self.node(which).node_id
            if (await rigs[0].nodes.present([node_id]))[0]:
                await self.read(rigs[0], node_id, "")
                assert (await rigs[0].nodes.present([node_id]))[0], "it was damaged"

    async def check_freeing(self, rig):
        counted = await rig.redis.command("HGETALL", keys.FREEING)
        counted = {name: size for name, size in counted.items() if int(size)}
        await rig.redis.command("DEL", keys.COUNTED)
        await rig.books.recount(1)
        anew = await rig.redis.command("HGETALL", keys.FREEING)
        assert counted == {name: size for name, size in anew.items() if int(size)}


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schedules=SCHEDULES, tenant=st.sampled_from(["", "alice"]))
def test_any_schedule_of_three_servers(server, make_node, schedules, tenant):
    # Two pins at most, or the store may rightly be full.
    pins = 0
    for steps in schedules:
        for i, (name, which, on) in enumerate(steps):
            if name == "pin" and on:
                steps[i] = (name, pins % 2, on) if which else (name, 0, on)
                pins += 1
    with admin_of(server.directory) as valkey:
        valkey.flushall()
        run = Run(server, make_node, tenant_digest(tenant) if tenant else "")
        asyncio.run(run.run(schedules))
        assert total(valkey) == held_bytes(valkey)
        sizes = {k: int(v) for k, v in valkey.hgetall(keys.SIZES).items()}
        assert sum(sizes.values()) == total(valkey)
        assert valkey.zcard(keys.TRASH) == valkey.zcard(keys.CUTS) == 0
        assert valkey.hlen(keys.CUT_BYTES) == valkey.zcard(keys.WRITING) == 0
        alive = {key.decode()[5:69] for key in valkey.scan_iter("ckv:*:m")}
        listed = {place.decode().split(":")[1] for place in valkey.zrange(keys.INDEX, 0, -1)}
        assert alive == listed == {name.decode() for name in valkey.hkeys(keys.USED)}
        if tenant:
            owned = [valkey.hget(n, run.tenant) for n in (keys.OWNED_BYTES, keys.OWNED_NODES)]
            assert [int(n or 0) for n in owned] == [total(valkey), len(alive)]
