"""A second forward pass beside the context's, one layer at a time.

A layer's compressed KV is sent and freed before the next layer is computed. A pass that
attends to it must therefore stand still in each layer until that layer is there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Generic, TypeVar

from torch import Tensor

from criticalkv.shared.errors import CancelledError, DeadlineError
from criticalkv.shared.model.attention import AttentionPlan, LayerCall

Layer = TypeVar("Layer")


class SideForward(Generic[Layer]):
    """A forward pass in a thread of its own, whose layers are shown to it.

    An AttentionPlan. Of its thread and the caller's only one runs at a time. A context
    manager: leaving it ends the pass.

    Args:
        run: makes the whole pass with the plan it is given.
        attend: attention of one layer over what was shown.
        timeout_s: longest wait for the other thread.
    """

    def __init__(
        self,
        run: Callable[[AttentionPlan], Tensor],
        attend: Callable[[LayerCall, Layer], Tensor],
        timeout_s: float,
    ) -> None:
        self._run = run
        self._attend = attend
        self._timeout_s = timeout_s
        self._shown: queue.SimpleQueue[Layer | None] = queue.SimpleQueue()
        self._still = threading.Semaphore(0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="side-forward")

    def __enter__(self) -> SideForward[Layer]:
        self._result = self._thread.submit(self._run, self)
        # Called once the result is there: `_wait` then sees it.
        self._result.add_done_callback(lambda _: self._still.release())
        try:
            self._wait()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def show(self, layer: Layer) -> None:
        """Let the pass go on through its next layer.

        Raises:
            DeadlineError: if it takes too long; and what the pass raises.
        """
        self._shown.put(layer)
        self._wait()

    def result(self) -> Tensor:
        """Return what the pass computed; all its layers were shown.

        Raises:
            DeadlineError: if it takes too long; and what the pass raises.
        """
        try:
            return self._result.result(self._timeout_s)
        except TimeoutError:
            raise DeadlineError("a side pass took too long") from None

    def attend(self, call: LayerCall) -> Tensor:
        """See AttentionPlan. Waits for the layer."""
        self._still.release()
        try:
            layer = self._shown.get(timeout=self._timeout_s)
        except queue.Empty:
            raise DeadlineError("a layer was not shown in time") from None
        if layer is None:
            raise CancelledError("the forward pass ended before its last layer")
        return self._attend(call, layer)

    def _close(self) -> None:
        """End the pass: in its next layer, so that nobody waits for the present one for ever."""
        self._shown.put(None)
        ended, _ = wait([self._result], timeout=self._timeout_s)
        self._thread.shutdown(wait=bool(ended))

    def _wait(self) -> None:
        """Wait until the pass stands still, or has ended."""
        if not self._still.acquire(timeout=self._timeout_s):
            raise DeadlineError("a layer's side pass took too long")
        if self._result.done():
            self._result.result()
