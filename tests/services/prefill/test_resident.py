"""Full KV of spooled layers on the device: moved once, if there is room."""

from __future__ import annotations

import pytest
import torch

from criticalkv.services.prefill import resident
from criticalkv.services.prefill.context_pass import LayerPass
from criticalkv.services.prefill.resident import Resident
from criticalkv.services.prefill.spooled_layer import SpooledLayer
from criticalkv.shared.cache.ragged import RaggedLayer
from criticalkv.shared.model.attention import LayerCall

KV = torch.randn(2, 10, 4)
EMPTY = RaggedLayer(KV[0, :0], KV[0, :0], torch.empty(0, dtype=torch.int32), torch.zeros(3))


def spooled() -> SpooledLayer:
    call = LayerCall(0, KV, KV, KV, 0.5, None)
    return SpooledLayer(LayerPass(call, KV, EMPTY), None)


@pytest.mark.parametrize(("free", "stays"), [(8 * KV.nbytes, True), (8 * KV.nbytes - 1, False)])
def test_layers_stay_where_there_is_room_for_all(
    free: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "free_bytes", lambda _: free)
    layers = Resident([spooled(), spooled()], torch.device("meta"))
    first, again = layers.layer(1), layers.layer(1)
    assert first[0].device.type == "meta"
    assert (first[0] is again[0]) == (first[1] is again[1]) == stays


def test_on_a_cpu_nothing_is_copied() -> None:
    one = spooled()
    keys, values = Resident([one], torch.device("cpu")).layer(0)
    assert keys is one.keys
    assert values is one.values
