"""Admission of full KV by bytes, for policies that need every layer before ranking."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from criticalkv.services.prefill.priority import LOOK_S
from criticalkv.shared.errors import ContextLengthError, OverloadedError


class Spool:
    """A budget of host memory, shared by the prefills of one replica.

    Background runs only borrow: what they hold is given back as soon as a foreground run
    needs it. They are stopped for that, since they stand back while it waits and would
    never finish.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._lent = 0
        self._claims = 0
        self._changed = threading.Condition()

    @contextmanager
    def reserve(
        self, nbytes: int, check: Callable[[], None] = lambda: None, *, background: bool = False
    ) -> Iterator[None]:
        """Hold `nbytes` while the context is open.

        Args:
            nbytes: of full KV.
            check: called while a background run is waited for; may raise to stop.
            background: only borrow them; see `check_loan`.

        Raises:
            ContextLengthError: if it can never fit.
            OverloadedError: if it does not fit now.
        """
        if nbytes > self._limit:
            raise ContextLengthError(
                f"the context's full KV is {nbytes >> 20} MiB, the prefill spool limit is "
                f"{self._limit >> 20} MiB (prefill.spool_limit_mb)"
            )
        with self._changed:
            if background:
                self.check_loan()
            else:
                self._claim(nbytes, check)
            self._check_room(nbytes)
            self._add(nbytes, background)
        try:
            yield
        finally:
            with self._changed:
                self._add(-nbytes, background)
                self._changed.notify_all()

    def check_loan(self) -> None:
        """Called by a background run again and again while it holds memory.

        Raises:
            OverloadedError: if a foreground run needs it.
        """
        with self._changed:
            claimed = self._claims > 0
        if claimed:
            raise OverloadedError("a background prefill made room for others", retry_after_s=5.0)

    def _claim(self, nbytes: int, check: Callable[[], None]) -> None:
        """Wait for what background runs hold, if that is what is missing."""
        self._claims += 1
        try:
            while 0 <= self._limit - nbytes - (self._used - self._lent) < self._lent:
                self._changed.wait(LOOK_S)
                check()
        finally:
            self._claims -= 1

    def _check_room(self, nbytes: int) -> None:
        if self._used + nbytes > self._limit:
            raise OverloadedError("the prefill spool is full", retry_after_s=5.0)

    def _add(self, nbytes: int, background: bool) -> None:
        self._used += nbytes
        self._lent += nbytes if background else 0
