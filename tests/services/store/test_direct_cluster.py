"""Direct reads from a real cluster: each node's segments from the server of its slot."""

from __future__ import annotations

from redis.crc import key_slot
from store_thread import store_on
from valkey_servers import cluster

PASSWORD = "look-only-password"


def test_each_node_is_read_where_its_slot_is(tmp_path, make_node):
    with cluster(tmp_path) as servers:
        for server in servers:
            with server.client() as admin:
                admin.execute_command(
                    "ACL", "SETUSER", "eyes", "on", f">{PASSWORD}", "%R~ckv:{*}:s:*", "+get"
                )
        url = f"redis+cluster://127.0.0.1:{servers[0].port}"
        # Only the user counts: the address is that of the slot.
        reader = f"redis://eyes:{PASSWORD}@127.0.0.1:1"
        with store_on(url, read_path="direct", redis_reader_url=reader) as client:
            ports = set()
            for node in [make_node() for _ in range(12)]:
                node.put(client)
                with client.open_get(node.node_id) as found:
                    assert [bytes(payload) for _, payload in found] == node.payloads
                    ports.add(found._location.port)
                    owner = servers[key_slot(node.node_id.encode()) * len(servers) // 16384]
                    assert found._location.port == owner.port
            assert len(ports) > 1
            assert client._direct.open
