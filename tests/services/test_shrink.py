"""The whole path over a store under pressure: contexts answer on, at a lower tier."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from whole_service import DOCUMENT, Service, of_its_own, text_of

from criticalkv.services.local.engine import LocalEngine
from criticalkv.services.store.process import StoreProcess, start_store
from criticalkv.shared.cache.manifest import Manifest, Segment
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.identity import Identity, tokens_digest
from criticalkv.shared.store_client import StoreClient

LIMIT = 16 << 20


@pytest.fixture
def process(tmp_path: Path) -> Iterator[StoreProcess]:
    config = StoreConfig(
        address="127.0.0.1:0",
        data_dir=str(tmp_path),
        memory_limit_mb=LIMIT >> 20,
        high_watermark=1,
        low_watermark=1,
        read_deadline_s=5.0,
        janitor_interval_s=0.2,
    )
    with start_store(config) as store:
        yield store


@pytest.fixture
def service(tiny_model: Any, process: StoreProcess) -> Iterator[Any]:
    running = Service(of_its_own(tiny_model()), process)
    yield running
    running.close()


def filler(store: StoreClient, nbytes: int) -> None:
    """Put a dense node that is worth more than anything else."""
    rows = nbytes // 260
    ids = tuple(secrets.randbelow(1000) for _ in range(rows))
    payload = secrets.token_bytes(260 * rows)
    digest = secrets.token_hex(32)
    identity = Identity(
        model_digest=digest,
        tokenizer_digest=digest,
        dtype="float32",
        policy="dense",
        salt=digest,
        tokens=tokens_digest(ids),
    )
    manifest = Manifest(
        identity=identity,
        attempt=secrets.token_hex(8),
        num_tokens=rows,
        next_position=rows,
        num_layers=1,
        num_kv_heads=1,
        head_dim=32,
        tiers=("1",),
        prefill_ms=1e9,
        tier_lens=(((rows,),),),
        segments=(Segment(layer=0, tier=0, rows=rows, checksum=xxhash.xxh3_64_intdigest(payload)),),
    )
    record = TokenRecord(identity=identity, token_ids=ids, ancestors=())
    with store.open_put(manifest.node_id, manifest.attempt) as writer:
        writer.send(payload)
        assert writer.commit(manifest, record).published


def press(service: Any, context: dict[str, Any]) -> None:
    """Fill the store until it shrinks the context, which nothing else can make room for."""
    store = service.workers._store
    for size in 15 * [1 << 20] + 500 * [8 << 10]:  # in small steps, or it would go as a whole
        filler(store, size)
        if tiers_of(service, context)[-1] == "0.2":
            return
    raise AssertionError("it did not shrink")


def tiers_of(service: Any, context: dict[str, Any]) -> list[str]:
    return list(service.workers._store.stat([context["node_id"]])[0].tiers)


def test_a_conversation_goes_on_over_a_shrunk_context(service: Any) -> None:
    context = service.register(store_tier=0.4)
    first = service.ask("one?", context["id"])
    assert first.criticalkv["tier"] == "0.4"
    handle = first.criticalkv["handle"]
    expected = service.ask("two?", handle, read_tier=0.2)
    assert expected.criticalkv["tier"] == "0.2"
    press(service, context)
    service.workers.fresh_decoder()
    second = service.ask("two?", handle)
    assert second.criticalkv["tier"] == "0.2"
    assert text_of(second) == text_of(expected)
    assert service.workers.decodes[-1].view == ("0.2", "1")
    assert text_of(second) == locally(service, "one?", "0.4", "two?", "0.2")
    third = service.ask("three?", second.criticalkv["handle"])
    assert third.criticalkv["tier"] == "0.2"
    again = service.ask("one?", context["id"])  # a new branch from the root
    assert again.criticalkv["tier"] == "0.2"
    assert text_of(again) == locally(service, "one?", "0.2")
    assert len(service.workers.prefills) == 1


def locally(service: Any, *talk: str) -> str:
    """What the same engines say without any service, asked (question, tier), …"""
    with LocalEngine(service.workers._model) as engine:
        node: Any = engine.compress(DOCUMENT, store_tier="0.4")
        for question, tier in zip(talk[::2], talk[1::2], strict=True):
            node = engine.ask(node, question, tier=tier, max_tokens=8)
        return str(node.text)


def test_a_running_turn_does_not_notice(service: Any) -> None:
    context = service.register(store_tier=0.4)
    whole = text_of(service.ask("one?", context["id"], max_tokens=200))
    service.workers.fresh_decoder()
    stream = service.ask("one?", context["id"], max_tokens=200, stream=True)
    chunks = [next(stream)]
    pressing = threading.Thread(target=press, args=(service, context))
    pressing.start()
    chunks += list(stream)
    pressing.join()
    assert tiers_of(service, context)[-1] == "0.2"
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole
    assert chunks[-1].criticalkv["tier"] == "0.4"


def test_a_lost_turn_over_a_shrunk_context_is_rebuilt_at_its_own_view(service: Any) -> None:
    context = service.register(store_tier=0.4)
    first = service.ask("one?", context["id"])
    handle, turn = first.criticalkv["handle"], first.criticalkv["node_id"]
    expected = service.ask("two?", handle)
    press(service, context)
    assert service.workers._store.delete_node(turn)
    service.workers.fresh_decoder()
    again = service.ask("two?", handle)
    assert text_of(again) == text_of(expected)
    assert again.criticalkv["tier"] == "0.4"
    root, child = service.workers.prefills[1:]
    assert (root.node_id, root.store_tier) == (context["node_id"], "0.4")
    assert (child.node_id, child.view) == (turn, ("0.4",))


def test_a_prefill_overtaken_by_a_shrink_is_planned_anew(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = service.register(store_tier=0.4)
    prefill = service.workers.prefill

    async def overtaken(request: Any) -> Any:
        if tiers_of(service, context)[-1] == "0.4":
            press(service, context)
        return await prefill(request)

    monkeypatch.setattr(service.workers, "prefill", overtaken)
    answer = service.ask("z" * 300, context["id"])  # its head is a child of the context
    assert answer.criticalkv["tier"] == "0.2"
    assert [r.view for r in service.workers.prefills[1:]] == [("0.4",), ("0.2",)]
