"""The failpoint of prefill: behind every layer, before anything is published."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from criticalkv.services.local import LocalEngine
from criticalkv.shared import failpoints
from criticalkv.shared.errors import StoreUnavailableError
from criticalkv.shared.failpoints import Failpoints
from criticalkv.shared.model.loader import LoadedModel


@pytest.mark.parametrize("policy", ["default", "snapkv", "dense"])
def test_a_layer_that_fails_publishes_nothing(
    tiny_model: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    with LocalEngine(tiny_model(num_layers=3)) as local:
        monkeypatch.setattr(failpoints, "_active", Failpoints.parse("prefill.layer=delay:1:0"))
        node = local.compress_tokens(range(40, 90), policy=policy)
        assert failpoints._active is not None
        assert failpoints._active.counts == {"prefill.layer": 3}
        monkeypatch.setattr(failpoints, "_active", Failpoints.parse("prefill.layer=error"))
        with pytest.raises(StoreUnavailableError, match=r"prefill\.layer"):
            local.compress_tokens(range(41, 91), policy=policy)
        assert list(local.store._nodes) == [node.node_id]  # type: ignore[attr-defined]
