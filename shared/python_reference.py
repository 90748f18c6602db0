"""Python's own language reference: text that every interpreter ships, in the public domain."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics


@cache
def python_reference() -> str:
    """Return all topics of the reference, by name."""
    return "\n".join(topics[name] for name in sorted(topics))
