"""Quantized contexts through the whole service: they go on, weigh less, and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from whole_service import DOCUMENT, Service, of_its_own, text_of

from criticalkv.kernels.group_layout import GroupLayout
from criticalkv.services.local.engine import LocalEngine
from criticalkv.services.store.process import StoreProcess
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.loader import LoadedModel

Factory = Callable[..., LoadedModel]
BITS = {"int8": 8, "int4": 4}
QUESTIONS = ("one?", "two?", "three?")


@pytest.fixture
def service(tiny_model: Factory, store_process: StoreProcess) -> Iterator[Service]:
    running = Service(of_its_own(tiny_model()), store_process)
    yield running
    running.close()


def talk(service: Service, handle: str, *, fresh: bool) -> list[str]:
    said = []
    for question in QUESTIONS:
        if fresh:
            service.workers.fresh_decoder()
        answer = service.ask(question, handle, read_tier=0.4)
        handle = answer.criticalkv["handle"]
        said.append(text_of(answer))
    return said


@pytest.mark.parametrize("codec", BITS)
def test_a_quantized_context_goes_on_over_turns(service: Service, codec: str) -> None:
    context = service.register(codec=codec)
    expected = talk(service, context["id"], fresh=False)
    assert talk(service, context["id"], fresh=True) == expected
    with LocalEngine(service.workers._model) as engine:  # the same engines without any service
        node: Any = engine.compress(DOCUMENT, policy=f"default:codec={codec}", store_tier="0.6")
        for question, said in zip(QUESTIONS, expected, strict=True):
            node = engine.ask(node, question, tier="0.4", max_tokens=8)
            assert node.text == said
    assert len(service.workers.prefills) == 1


@pytest.mark.parametrize("codec", BITS)
def test_it_weighs_its_codecs_share(service: Service, codec: str) -> None:
    raw, small = service.register(), service.register(codec=codec)
    layout = GroupLayout(BITS[codec], service.workers._model.spec.head_dim)
    for theirs, ours in zip(raw["tiers"], small["tiers"], strict=True):
        assert ours["entries"] == theirs["entries"]
        least = ours["entries"] * (layout.wire_row_bytes + layout.wire_group_bytes / 32)
        assert least <= ours["bytes"] < theirs["bytes"]
    assert raw["full_bytes"] == small["full_bytes"]
    assert small["tiers"][-1]["bytes"] < 0.5 * raw["tiers"][-1]["bytes"]
    service.workers.fresh_decoder()
    answer = service.ask("one?", small["id"], read_tier=0.4)
    [at] = [t for t in small["tiers"] if t["tier"] == "0.4"]
    assert answer.criticalkv["bytes_pulled"] == at["bytes"]
    assert answer.criticalkv["codec"] == codec
    assert answer.criticalkv["policy"] == small["policy"]


def test_lost_quantized_kv_is_rebuilt_as_it_was(service: Service) -> None:
    context = service.register(codec="int8")
    first = service.ask("one?", context["id"])
    store = service.workers._store
    before = store.open_get(context["node_id"]).manifest
    for node_id in (first.criticalkv["node_id"], context["node_id"]):
        assert store.delete_node(node_id)
    service.workers.fresh_decoder()
    again = service.ask("one?", context["id"])
    assert text_of(again) == text_of(first)
    assert store.open_get(context["node_id"]).manifest.segments == before.segments
    policies = {request.policy for request in service.workers.prefills}
    assert policies == {Policy.parse("default:codec=int8").canonical()}
