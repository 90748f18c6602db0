"""Admission of full KV by bytes, for policies that need every layer before ranking."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from criticalkv.shared.errors import ContextLengthError, OverloadedError


class Spool:
    """A budget of host memory, shared by the prefills of one replica."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._lock = threading.Lock()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Hold `nbytes` while the context is open.

        Raises:
            ContextLengthError: if it can never fit.
            OverloadedError: if it does not fit now.
        """
        if nbytes > self._limit:
            raise ContextLengthError(
                f"the context's full KV is {nbytes >> 20} MiB, the prefill spool limit is "
                f"{self._limit >> 20} MiB (prefill.spool_limit_mb)"
            )
        with self._lock:
            if self._used + nbytes > self._limit:
                raise OverloadedError("the prefill spool is full", retry_after_s=5.0)
            self._used += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._used -= nbytes
