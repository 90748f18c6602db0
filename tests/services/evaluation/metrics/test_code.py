"""Scores of LongBench's own metrics.py: computed by it, to the last bit."""

from __future__ import annotations

import pytest

from criticalkv.services.evaluation.example import Question
from criticalkv.services.evaluation.metrics.registry import METRICS


@pytest.mark.parametrize(
    ("text", "references", "score"),
    [
        ("return x", ("return x",), 1.0),
        ("    return x\n    y = 1", ("        return x",), 0.86),
        ("", ("return x",), 0.0),
        ("return x", ("",), 0.0),
        ("", ("",), 1.0),
        ("\n\n# first\nreturn x", ("return x",), 1.0),
        ("```python\nimport os\n```", ("import os",), 1.0),
        ("// note\nint a = 0;", ("int b = 0;",), 0.9),
        ("a = 1 # one", ("a = 1",), 0.0),
        ("# only", ("a = 1",), 0.0),
        ("\n\n", ("a = 1",), 0.0),
        ("x = 'é'", ("x = 'e'",), 0.86),
        ("foo(bar, baz)", ("foo(baz)", "foo(bar, baz);"), 0.96),
        ("abc", ("ab",), 0.8),
        ("  \nreturn x", ("return x",), 0.2),
        ("self.a = a\n", ("self.b = b",), 0.8),
        ("ab", ("abcdef",), 0.5),
        ("abcde", ("abc",), 0.75),
        ("aaaaaaabbbbbbbbb", ("aaaaaaaccccccccc",), 0.44),
        ("aaaaaaaaaaaaabbb", ("aaaaaaaaaaaaaccc",), 0.81),
    ],
)
def test_code_similarity(text: str, references: tuple[str, ...], score: float) -> None:
    question = Question("", references, "code_similarity", 9)
    assert METRICS["code_similarity"](text, question) == score
