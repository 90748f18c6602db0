"""An order: which example of a task is to be made."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """One example, and nothing of the others in the same run.

    Attributes:
        task: name as RULER spells it.
        length: tokens of prompt and answer together.
        seed: of the run.
        number: of the example within its task and length, from 0.
    """

    task: str
    length: int
    seed: int
    number: int

    @property
    def name(self) -> str:
        """Unique within a run, such as "niah_single_1-1024-3"."""
        return f"{self.task}-{self.length}-{self.number}"

    def rng(self) -> random.Random:
        """Return where everything that is random comes from, the same each time."""
        return random.Random(f"{self.seed}-{self.name}")
