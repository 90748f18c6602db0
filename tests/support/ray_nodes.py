"""A Ray cluster of several nodes on this machine, driven line by line over a pipe.

Run as a script: Ray reads its address switch when it is first imported, and the whole
cluster ends with this process. Commands are one JSON list a line, answers one JSON value:

    ["add", NAME]    start a node whose custom resource is NAME; its node id
    ["kill", NAME]   end that node at once, without a word to the others; its node id
    ["names"]        {NAME: node id}
    ["where"]        {deployment: {replica id: node id}} of the live replicas
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from criticalkv.services.cluster import LOCAL_ENV, _whole_or_nothing
from criticalkv.shared.config import load_config

# Ray gives a node half a minute to start, which a machine under load may exceed.
ATTEMPTS = 4
# A node that died in silence is missed after a few seconds rather than half a minute.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 4000,
    "health_check_failure_threshold": 3,
}


class Nodes:
    """The cluster's nodes by the name of their custom resource."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._nodes: dict[str, Any] = {}
        self._head = {"_system_config": HEALTH, "include_dashboard": False}

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, name: str) -> str:
        head = {} if self._nodes else self._head
        for attempt in range(ATTEMPTS):
            try:
                with _whole_or_nothing():
                    node = self._cluster.add_node(num_cpus=2, resources={name: 1}, **head)
                break
            except Exception as error:
                if attempt + 1 == ATTEMPTS or "timed out" not in str(error):
                    raise
        self._nodes[name] = node
        return str(node.node_id)

    def kill(self, name: str) -> str:
        node = self._nodes.pop(name)
        self._cluster.remove_node(node, allow_graceful=False)
        return str(node.node_id)

    def names(self) -> dict[str, str]:
        return {name: str(node.node_id) for name, node in self._nodes.items()}

    def where(self) -> dict[str, dict[str, str]]:
        from ray._private.state import state

        found: dict[str, dict[str, str]] = {}
        for actor in state.actor_table(None).values():
            kind, _, rest = actor["Name"].partition("::")
            if kind == "SERVE_REPLICA" and actor["State"] == "ALIVE":
                _, deployment, replica = rest.split("#")
                found.setdefault(deployment, {})[replica] = actor["Address"]["NodeID"]
        return found

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def cluster() -> Iterator[Nodes]:
    """Start the head; remove every node at the end."""
    folder = Path(tempfile.mkdtemp(prefix="ckv-", dir="/tmp"))  # short, for sockets in it
    (folder / "ray").mkdir()
    os.environ.update(LOCAL_ENV, RAY_TMPDIR=str(folder))
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    nodes = Nodes()
    try:
        nodes.add("gateway")
        os.environ["RAY_ADDRESS"] = nodes.address
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)


def answers() -> Callable[[Any], None]:
    """Keep standard output for answers; what Ray prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda value: print(json.dumps(value), file=out, flush=True)


def main(config: str) -> None:
    say = answers()
    with cluster() as nodes:
        from criticalkv.services.cli import running

        for name in ("prefill", "decode"):
            nodes.add(name)
        with running(load_config(config), start_store=False):
            say("up")
            for line in sys.stdin:
                command, *arguments = json.loads(line)
                say(getattr(nodes, command)(*arguments))


if __name__ == "__main__":
    main(sys.argv[1])
