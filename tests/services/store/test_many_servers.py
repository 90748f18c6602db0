"""Three store servers on one Valkey, killed at random: no wrong byte, no lost one."""

from __future__ import annotations

import random
import threading
import time

import pytest
from store_rig import held_bytes, total
from valkey_servers import Server, wait_for

from criticalkv.services.store import keys
from criticalkv.services.store.nodes import split_parts
from criticalkv.services.store.process import start_store
from criticalkv.shared import failpoints
from criticalkv.shared.cache.manifest import decode_manifest
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import CriticalKVError

TIERS = ("0.1", "0.2", "0.4", "0.6")
NODES, SERVERS = 40, 3
ENOUGH = {"put": 50, "read": 50, "death": 4}
FAULTS = "store.put.begin=exit:0.01;store.put.commit=exit:0.02;store.put.published=exit:0.04"


class Traffic:
    """Puts and reads, through whichever server lives; each attempt's content is known."""

    def __init__(self, make_node, config):
        self.make_node = make_node
        self.config = config
        self.payloads = {}
        self.ids = {}
        self.errors = []
        self.done = dict.fromkeys(ENOUGH, 0)
        self.stop = threading.Event()
        self.stores = [start_store(config) for _ in range(SERVERS)]

    def node(self, which):
        node = self.make_node(
            seed=which, tiers=TIERS, layers=1, rows=1024, head_dim=31, tokens=4096,
            prefill_ms=which + 1.0,
        )  # fmt: skip
        self.payloads[node.manifest.attempt] = node.payloads
        self.ids[which] = node.node_id
        return node

    def client(self, seed):
        rng = random.Random(seed)
        while not self.stop.is_set():
            try:
                with rng.choice(self.stores).client(timeout_s=5.0) as client:
                    for _ in range(20):
                        self.one(client, rng)
            except CriticalKVError:
                time.sleep(0.02)
            except Exception as error:
                self.errors.append(error)
                return

    def one(self, client, rng):
        which = rng.randrange(NODES)
        if which not in self.ids or rng.random() < 0.4:
            self.node(which).put(client)
            self.done["put"] += 1
        else:
            self.read(client, self.ids[which], rng.choice([None, *TIERS]))
            self.done["read"] += 1

    def read(self, client, node_id, tier=None):
        with client.open_get(node_id, tier=tier) as reader:
            payloads = self.payloads[reader.manifest.attempt]
            for index, payload in reader:
                assert bytes(payload) == payloads[index], "another node's bytes"

    def kill(self, seed):
        rng = random.Random(seed)
        while not self.stop.wait(rng.uniform(0.3, 1.5)):
            self.stores[rng.randrange(SERVERS)].process.kill()
            for which, store in enumerate(self.stores):
                if store.process.poll() is not None:  # by us, or by a failpoint
                    self.done["death"] += 1
                    self.stores[which] = start_store(self.config)

    def run(self):
        threads = [threading.Thread(target=self.client, args=(i,)) for i in range(4)]
        threads.append(threading.Thread(target=self.kill, args=(99,)))
        for thread in threads:
            thread.start()
        end = time.monotonic() + 60
        while any(self.done[what] < n for what, n in ENOUGH.items()) and not self.errors:
            assert time.monotonic() < end, self.done
            time.sleep(0.1)
        self.stop.set()
        for thread in threads:
            thread.join()
        for store in self.stores:
            store.stop()


def stray_keys(valkey):
    """Segments that no manifest names, or whose tier it has dropped."""
    out = []
    for key in valkey.scan_iter("ckv:*:s:*", count=1000):
        node, _, rest = key.decode()[5:].partition("}")
        attempt, index = rest.split(":")[2:]
        found = valkey.hmget(keys.manifest(node), "attempt", "parts")
        if found[0] is None or found[0].decode() != attempt:
            out.append(key)
            continue
        manifest = decode_manifest(split_parts(found[1]))
        if manifest.segments[int(index)].tier >= len(manifest.tiers):
            out.append(key)
    return out


@pytest.mark.timeout(240)
def test_killed_servers_leave_no_wrong_byte_and_no_lost_one(tmp_path, make_node, monkeypatch):
    with Server(tmp_path) as redis, redis.client() as valkey:
        config = StoreConfig(
            address="127.0.0.1:0",
            redis_url=redis.url,
            memory_limit_mb=16,  # 16 whole nodes
            lease_ttl_s=1,
            read_deadline_s=0.5,
            janitor_interval_s=0.2,
        )
        with monkeypatch.context() as patch:
            patch.setenv(failpoints.VARIABLE, FAULTS)
            traffic = Traffic(make_node, config)
            traffic.run()
        assert traffic.errors == []
        with start_store(config) as store, store.client() as client:
            wait_for(lambda: _settled(valkey), 60)
            assert stray_keys(valkey) == []
            assert total(valkey) <= 16 << 20
            alive = [s.node_id for s in client.stat(list(traffic.ids.values())) if s.present]
            assert len(alive) > 5
            for node_id in alive:
                traffic.read(client, node_id)
            left = client.stat(alive)
            assert all(stat.present for stat in left)
            assert any(len(stat.tiers) < len(TIERS) for stat in left), "nothing shrank"


def _settled(valkey):
    waiting = [valkey.zcard(name) for name in (keys.WRITING, keys.TRASH, keys.CUTS)]
    return not any(waiting) and total(valkey) == held_bytes(valkey)
