"""Publishing: what goes wrong on the way to the store is nobody's bad request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from criticalkv.shared import failpoints
from criticalkv.shared.cache.ragged import RaggedLayer, cu_seqlens_of
from criticalkv.shared.errors import NodeTooLargeError, StoreUnavailableError
from criticalkv.shared.failpoints import Failpoints
from criticalkv.shared.identity import POLICY_DENSE, Identity, tokens_digest
from criticalkv.shared.publish import NodePublisher
from criticalkv.shared.store_client import StoreClient

TOKENS = range(40)
DIGEST = "ab" * 32


def publish(store: StoreClient) -> None:
    identity = Identity(
        model_digest=DIGEST,
        tokenizer_digest=DIGEST,
        dtype="float32",
        policy=POLICY_DENSE,
        salt="cd" * 32,
        tokens=tokens_digest(TOKENS),
    )
    rows = torch.randn(len(TOKENS), 8)
    positions = torch.arange(len(TOKENS), dtype=torch.int32)
    layer = RaggedLayer(rows, rows.clone(), positions, cu_seqlens_of([len(TOKENS)]))
    with NodePublisher(store, identity, "ab" * 16) as publisher:
        publisher.send(layer, torch.tensor([[len(TOKENS)]]))
        publisher.commit(token_ids=list(TOKENS), next_position=len(TOKENS), head_dim=8, tiers=["1"])


@pytest.mark.parametrize("kind", ["flip", "truncate"])
@pytest.mark.parametrize("seed", range(4))
def test_damage_on_the_way_is_no_bad_request(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    text = f"client.put.frame={kind}:1;seed={seed}"
    monkeypatch.setattr(failpoints, "_active", Failpoints.parse(text))
    with pytest.raises(StoreUnavailableError, match="did not arrive"):
        publish(store)


def test_a_node_that_is_too_large_is_one(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Callable[..., None]:
        raise NodeTooLargeError("the node exceeds store.max_node_mb")

    monkeypatch.setattr("criticalkv.shared.node_writer.NodeWriter._result", refuse)
    with pytest.raises(NodeTooLargeError):
        publish(store)
