"""Background runs of one replica stand back while others run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_S = 0.05
"""How often a run that stands back looks whether it was cancelled."""


class Priority:
    """Counts foreground runs; whoever is not one waits until there are none."""

    def __init__(self) -> None:
        self._running = 0
        self._changed = threading.Condition()

    @contextmanager
    def foreground(self) -> Iterator[None]:
        """Be a foreground run while the context is open."""
        with self._changed:
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def stand_back(self, check: Callable[[], None]) -> None:
        """Wait while a foreground run is active. Raises what `check` raises."""
        while True:
            check()
            with self._changed:
                if not self._running:
                    return
                self._changed.wait(LOOK_S)
