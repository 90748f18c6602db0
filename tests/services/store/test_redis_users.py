"""The users of Redis: the store's may do what the store does, the reader's may read."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry
from store_thread import store_on
from valkey_servers import Server, admin_of, user_of

from criticalkv.services.store import scripts
from criticalkv.services.store.valkey import CLUSTER_RULES, READER_RULES, STORE_RULES, Valkey
from criticalkv.shared.errors import StoreUnavailableError
from criticalkv.shared.resp import DataConnection

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "infra" / "redis-users.acl.example"
FORBIDDEN = [
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("CONFIG", "GET", "*"),
    ("FLUSHALL",),
    ("EVAL", "return 1", "0"),
    ("ACL", "WHOAMI"),
    ("CLIENT", "LIST"),
    ("SHUTDOWN",),
    ("PUBLISH", "c", "m"),
    ("SET", "other", "v"),
    ("GET", "other"),
]


def client_of(process, name: str) -> redis.Redis:
    user = user_of(process.config.data_dir, name)
    return redis.Redis(unix_socket_path=user.path, username=user.username, password=user.password)


@pytest.mark.parametrize("words", FORBIDDEN, ids=lambda words: " ".join(words))
@pytest.mark.parametrize("name", ["store", "reader"])
def test_what_no_user_may(store_process, name, words):
    with client_of(store_process, name) as client, pytest.raises(NoPermissionError):
        client.execute_command(*words)


def test_nobody_is_let_in_without_a_password(store_process):
    path = user_of(store_process.config.data_dir).path
    once = Retry(NoBackoff(), 0)
    client = redis.Redis(unix_socket_path=path, retry=once)
    with contextlib.closing(client), pytest.raises(redis.AuthenticationError):
        client.ping()


def test_reader_reads_segments_and_nothing_else(store_process, store, make_node):
    node = make_node()
    node.put(store)
    with client_of(store_process, "reader") as client:
        assert client.get(node.segment_key(0))
        for words in (
            ("GET", f"ckv:{{{node.node_id}}}:t"),
            ("HGETALL", f"ckv:{{{node.node_id}}}:m"),
            ("SET", node.segment_key(0), "x"),
            ("UNLINK", node.segment_key(0)),
            ("GETDEL", node.segment_key(0)),
            ("GET", "ckv:{books}:total"),
            ("PTTL", node.segment_key(0)),
        ):
            with pytest.raises(NoPermissionError):
                client.execute_command(*words)
        # A script of the store's runs with the rights of who calls it.
        sha = hashlib.sha1(scripts.OPEN.encode(), usedforsecurity=False).hexdigest()
        with pytest.raises(NoPermissionError):
            client.evalsha(sha, 1, f"ckv:{{{node.node_id}}}:m")
    connection = DataConnection(user_of(store_process.config.data_dir, "reader"), 5.0)
    with contextlib.closing(connection), pytest.raises(StoreUnavailableError, match="NOPERM"):
        connection.set_many([(node.segment_key(0), b"x")], 1000)


def test_passwords_are_private(store_process):
    directory = Path(store_process.config.data_dir)
    assert stat.S_IMODE((directory / "users.acl").stat().st_mode) == 0o600
    secrets = {user_of(directory, name).password for name in ("store", "reader", "admin")}
    assert len(secrets) == 3
    assert all(len(secret) == 64 for secret in secrets)
    with admin_of(directory) as client:
        pid = client.info("server")["process_id"]
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
    log = (directory / "valkey.log").read_text()
    assert not [s for s in secrets if s in arguments + environment + log]


def test_passwords_differ_from_start_to_start(tmp_path):
    found = set()
    for _ in range(2):
        with Valkey(str(tmp_path), 1 << 26) as valkey:
            assert valkey.store == user_of(tmp_path, "store")
            assert valkey.store.password not in repr(valkey.store)
            found |= {who.password for who in (valkey.store, valkey.reader, valkey.admin)}
    assert len(found) == 6


def used() -> Iterator[str]:
    """Yield the commands that the store's code names, in scripts and outside of them."""
    for path in (ROOT / "services" / "store").glob("*.py"):
        text = path.read_text()
        yield from re.findall(r"redis\.call\('([A-Z]+)'", text)
        for node in ast.walk(ast.parse(text)):
            parts = node.elts if isinstance(node, ast.Tuple) else getattr(node, "args", [])
            first = parts[0] if isinstance(parts, list) and parts else None
            if (
                isinstance(first, ast.Constant)
                and isinstance(first.value, str)
                and re.fullmatch(r"[A-Z]{3,}( [A-Z]{3,})?", first.value)
                and path.name != "topology.py"
            ):
                yield first.value


def test_every_command_used_is_allowed_and_no_other():
    allowed = {rule[1:] for rule in STORE_RULES.split() if rule.startswith("+")}
    extra = {rule[1:] for rule in CLUSTER_RULES.split()}
    needed = {name.lower().replace(" ", "|") for name in used()} | {"get", "set", "select"}
    assert needed - extra == allowed


def test_example_names_the_same_rights():
    lines = EXAMPLE.read_text().splitlines()
    assert lines == [
        "user default off",
        f"user criticalkv on >CHANGE-ME-STORE {STORE_RULES} {CLUSTER_RULES}",
        f"user criticalkv-reader on >CHANGE-ME-READER {READER_RULES}",
    ]


def test_store_runs_on_the_example(tmp_path, make_node):
    with Server(tmp_path, "--aclfile", str(EXAMPLE)) as server:
        url = f"redis://criticalkv:CHANGE-ME-STORE@127.0.0.1:{server.port}"
        parent = make_node()
        child = make_node(parent=parent)
        with store_on(url, janitor_interval_s=0.1) as client:
            for node in (parent, child):
                assert node.put(client).published
            with client.open_get(child.node_id) as reader:
                assert [bytes(p) for _, p in reader] == child.payloads
            assert client.pin("ab", child.node_id) == 1
            assert client.unpin("ab", child.node_id) == 0
            assert client.delete_node(child.node_id)
        with pytest.raises(StoreUnavailableError), store_on(url.replace("STORE", "WRONG")):
            pass
