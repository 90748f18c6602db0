"""The policy option `codec`: part of a name only where it says something new."""

from __future__ import annotations

import pytest

from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.errors import PolicyError
from criticalkv.shared.eviction.parameters import ALIASES
from criticalkv.shared.eviction.policy import Policy, codec_of, parse_turn_policy, with_codec
from criticalkv.shared.identity import POLICY_DENSE

PROFILED = ("duo", "headkv")
NAMES = [name for name in ALIASES if not name.startswith(PROFILED)]


@pytest.mark.parametrize("name", NAMES)
def test_raw_is_not_spelled_so_that_old_names_stay(name: str) -> None:
    old = Policy.parse(name).canonical()
    assert "codec" not in old
    for text in (with_codec(old, "raw"), Policy.parse(f"{old},codec=raw").canonical()):
        assert text == old
    assert codec_of(old) == "raw"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_quantized_codec_is_part_of_the_name(name: str, codec: str) -> None:
    option = f"{',' if ':' in ALIASES[name] and ':' in name else ':'}codec={codec}"
    policy = Policy.parse(name + option)
    text = policy.canonical()
    assert policy.codec == codec_of(text) == codec
    assert f"codec={codec}" in text.partition(":")[2].split(",")
    assert Policy.parse(text).canonical() == text
    assert with_codec(Policy.parse(name).canonical(), policy.codec) == text
    assert with_codec(text, "raw") == Policy.parse(name).canonical()
    assert with_codec(text, None) == text


def test_a_stepwise_policy_may_have_one_but_not_a_turns() -> None:
    text = "snapkv:interval=32,keep=0.5,codec=int4"
    assert codec_of(text) == "int4"
    with pytest.raises(PolicyError, match="turns are not quantized"):
        parse_turn_policy(text)
    with pytest.raises(ValueError, match="turns are not quantized"):
        EvictionConfig(turn_policy=text)
    assert codec_of(POLICY_DENSE) == "raw"


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"codec.*'raw', 'int8' or 'int4'"):
        Policy.parse("snapkv:codec=int2")


def test_a_configured_policy_may_have_one() -> None:
    config = EvictionConfig(policy="default:codec=int8", first_policy="snapkv:codec=int8")
    assert codec_of(config.policy) == codec_of(str(config.first_policy)) == "int8"
