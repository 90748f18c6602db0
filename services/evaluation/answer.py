"""Answers: what a model said under one policy at one tier, and who asks it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from criticalkv.services.evaluation.example import Example

FULL = "full"
"""Instead of a policy: the whole cache, at tier 1."""
History = Literal["model", "gold", "none"]
"""What later questions follow: the model's own answers, the right ones, or only the context."""
KL_TOKENS = 64
"""Of an answer, over which KL is measured: the first ones tell most, and all cost the same."""


@dataclass(frozen=True, order=True)
class Cell:
    """One column of the results: a policy, spelled as its user did, at a tier."""

    policy: str
    tier: str


FULL_CELL = Cell(FULL, "1")


@dataclass(frozen=True)
class Answer:
    """What came back for one question.

    Attributes:
        text: of the answer, without its prefix.
        finish_reason: "stop" or "length".
        tier: at which the context was read.
        kept: entries read ÷ entries of the full cache, of the context.
        kept_bytes: bytes of the context's node up to that tier, as stored.
        kl: KL(full ‖ compressed) over the first KL_TOKENS tokens of the full cache's own
            answer, nats per token; None if it was not measured.
        token_ids: of the answer, if they are known.
    """

    text: str
    finish_reason: str
    tier: str
    kept: float
    kept_bytes: int
    kl: float | None = None
    token_ids: tuple[int, ...] = ()


Answers = tuple[Answer, ...]
"""One for each question of an example, in order."""


class Answerer(Protocol):
    """Asks an example's questions: in-process, or of a running service."""

    def check(self, cells: Sequence[Cell]) -> None:
        """Refuse cells that cannot be asked, before anything is.

        Raises:
            PolicyError, InvalidRequestError: naming what cannot be.
        """
        ...

    def answer(self, example: Example, cells: Iterable[Cell]) -> Iterator[tuple[Cell, Answers]]:
        """Yield each cell's answers as they come, in any order.

        Raises:
            CriticalKVError: of the first cell that failed; cells already yielded stand.
        """
        ...

    def close(self) -> None:
        """Give back what it holds; no wait without a deadline."""
        ...
