"""Parameters: what has no effect is refused, so that a policy has one name."""

from __future__ import annotations

from decimal import Decimal

import pytest

from criticalkv.shared.errors import PolicyError
from criticalkv.shared.eviction.policy import Policy

REPLAY, ECHO = "replay+model+relative", "echo+model+relative"
STAGES = "window+uniform+twostage:second=relative"


@pytest.mark.parametrize(
    ("policy", "option"),
    [
        (REPLAY, "echo_chunk=16"),
        (REPLAY, "echo_reach=16"),
        (REPLAY, "distance=16"),
        (REPLAY, "stride=2"),
        (REPLAY + ":echo_weight=0", "echo_chunk=16"),
        (REPLAY + ":echo_weight=-0.0", "echo_reach=16"),
        (REPLAY + ":self_weight=0e5", "stride=2"),
        (REPLAY + ":echo_weight=1", "stride=2"),
        (REPLAY + ":self_weight=1", "echo_chunk=16"),
        (ECHO, "distance=16"),
        (ECHO + ":self_weight=0.00", "stride=2"),
        (STAGES, "eps=0.5"),
        (STAGES, "eps_per_token=true"),
        (STAGES, "norm=l2"),
        ("expected+uniform+critical", "vnorm=false"),
        ("expected+adakv+twostage", "vnorm=true"),
    ],
)
def test_what_has_no_effect_is_refused(policy: str, option: str) -> None:
    name = option.partition("=")[0]
    assert f"{name}=" not in Policy.parse(policy).canonical()
    with pytest.raises(PolicyError, match=f"does not use {name};"):
        Policy.parse(f"{policy}{',' if ':' in policy else ':'}{option}")


@pytest.mark.parametrize(
    "text",
    [
        REPLAY + ":echo_weight=0.5,echo_chunk=16,echo_reach=16",
        REPLAY + ":self_weight=0.5,distance=16,stride=2",
        ECHO + ":self_weight=0.5,distance=16,stride=2",
        "window+uniform+twostage:second=critical,eps=0.5,eps_per_token=true,norm=l2",
        "expected+uniform+plain:vnorm=false",
        "expected+uniform+twostage:preset=kvpress,vnorm=false",
    ],
)
def test_what_is_switched_on_is_used(text: str) -> None:
    policy = Policy.parse(text)
    canonical = policy.canonical()
    assert {*text.partition(":")[2].split(",")} <= {*canonical.partition(":")[2].split(",")}
    assert Policy.parse(canonical) == policy


@pytest.mark.parametrize("zero", ["0", "-0", "0.00", "-0e3"])
def test_zero_has_one_name(zero: str) -> None:
    same = Policy.parse(f"{REPLAY}:echo_weight={zero}").canonical()
    assert same == Policy.parse(REPLAY).canonical()


def test_a_weight_that_is_no_number_is_named() -> None:
    with pytest.raises(PolicyError, match="echo_weight"):
        Policy.parse(f"{REPLAY}:echo_weight=much,echo_chunk=16")


def test_options_may_switch_off_what_an_alias_sets() -> None:
    off = Policy.parse("default:echo_weight=0")
    assert off.echo_weight == 0
    assert "echo_reach" not in off.canonical()
    with pytest.raises(PolicyError, match="does not use echo_reach"):
        Policy.parse("default:echo_weight=0,echo_reach=8")


@pytest.mark.parametrize("value", [0, 0.0, "0", Decimal(0)])
def test_fields_may_be_given_as_they_are(value: object) -> None:
    parts = {"scorer": "replay", "allocator": "model", "selector": "relative"}
    assert Policy.model_validate({**parts, "echo_weight": value}) == Policy.parse(REPLAY)
