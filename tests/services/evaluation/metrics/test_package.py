"""A metric whose package is missing says how to get it."""

from __future__ import annotations

import sys

import pytest

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.registry import METRICS
from criticalkv.shared.errors import ConfigError


@pytest.mark.parametrize(
    ("metric", "name"), [("rouge_l", "rouge"), ("code_similarity", "rapidfuzz")]
)
def test_a_missing_package_is_named(
    metric: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"needs the package {name}: pip install .*\[eval\]"):
        METRICS[metric]("a", Question("", ("a",), metric, 9))
