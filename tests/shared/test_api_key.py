"""Keys that a header can carry, and the others, which are never said."""

from __future__ import annotations

import pytest

from criticalkv.shared.api_key import check_api_key
from criticalkv.shared.errors import ConfigError


@pytest.mark.parametrize("key", ["local", "sk-0_9.~", "open sesame"])
def test_a_printable_key_is_taken(key: str) -> None:
    assert check_api_key(key) == key


@pytest.mark.parametrize(
    "key", ["", "sesame\n", " sesame", "sesame\r\nx", "sés\u200bame", "s\x00esame"]
)
def test_another_key_is_refused_unsaid(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_api_key(key)
    assert refused.value.param == "api_key"
    assert not key or key.strip() not in str(refused.value)
