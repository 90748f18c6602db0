"""Prompt tokens that somebody waits for, of one replica."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Waiting:
    """Counts prefills from their acceptance to their end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._tokens = 0, 0

    @contextmanager
    def accepted(self, tokens: int) -> Iterator[None]:
        """Count a prefill while the context is open."""
        self._add(1, tokens)
        try:
            yield
        finally:
            self._add(-1, -tokens)

    def numbers(self) -> tuple[int, int]:
        """Return prefills and their prompt tokens, of one moment."""
        with self._lock:
            return self._count, self._tokens

    def _add(self, count: int, tokens: int) -> None:
        with self._lock:
            self._count += count
            self._tokens += tokens
