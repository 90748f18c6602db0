"""What a stop string cut off is computed anew within the turn's deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from criticalkv.services.decode.stepwise_kv import StepwiseKV
from criticalkv.services.local import LocalEngine
from criticalkv.services.local.engine import SALT
from criticalkv.shared.chain import Chain
from criticalkv.shared.errors import DeadlineError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import DecodeEnd, DecodeRequest, Sampling

POLICY = "window+uniform+plain:window=4,interval=8,target=6"


def stop() -> None:
    raise DeadlineError("too late")


def test_computing_anew_can_be_stopped(
    tiny_model: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = StepwiseKV(tiny_model(), Policy.parse(POLICY), Chain())
    monkeypatch.setattr(kv._node, "cache", lambda _: None)  # an eviction has seen the rest
    with pytest.raises(DeadlineError):
        kv.own(list(range(20)), stop)


def test_the_deadline_of_the_turn_ends_it_and_the_answer_is_told(
    tiny_model: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(_: Any, __: Any, check: Callable[[], None]) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            check()
            time.sleep(0.01)

    monkeypatch.setattr(StepwiseKV, "own", endless)
    request = DecodeRequest(
        request_id="r",
        token_ids=(1, 2, 3),
        salt=SALT,
        policy=Policy.parse(POLICY).canonical(),
        sampling=Sampling(max_tokens=2, ignore_eos=True),
        deadline_s=5.0,
    )
    with LocalEngine(tiny_model()) as local:
        *_, end = local.decode.generate(request)
    assert isinstance(end, DecodeEnd)
    assert (end.completion_tokens, end.node_id) == (2, None)
    assert "deadline" in str(end.publish_error)
