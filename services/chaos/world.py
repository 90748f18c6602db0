"""What the load talks about: documents, questions, and who holds which handle."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

WORDS = (
    "river",
    "stone",
    "lamp",
    "cloud",
    "engine",
    "paper",
    "window",
    "copper",
    "garden",
    "signal",
    "north",
    "harbour",
    "ledger",
    "mirror",
    "violet",
    "anchor",
    "timber",
    "needle",
    "basket",
    "summer",
)
POLICIES = ("default", "window+adakv+twostage")
QUESTIONS = ("Which one?", "And why is that?", "Count them.")
FOLLOW_UPS = ("Go on.", "Say it again, shorter.")
READ_TIERS = (None, "0.05", "0.1", "0.2", "0.4", "0.6", "1")
STORE_TIERS = ("0.4", "0.6", "1")
DOCUMENT_WORDS = 60


def document(seed: int) -> str:
    """Return a text of plain words and numbers."""
    drawn = random.Random(seed)
    words = (f"{drawn.choice(WORDS)} {drawn.randrange(1000)}" for _ in range(DOCUMENT_WORDS // 2))
    return f"Notes {seed}: " + ", ".join(words) + ". "


@dataclass(frozen=True)
class Held:
    """A handle that a tenant has, and when it was made, in seconds of the run."""

    handle: str
    born: float


@dataclass
class World:
    """Shared by all clients.

    Attributes:
        model: name in the API.
        documents: the fixed ones.
        policies: under which they are compressed.
    """

    model: str
    documents: list[str]
    policies: tuple[str, ...]
    _held: dict[tuple[str, int, str], Held] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, tenant: str, number: int, policy: str, held: Held) -> None:
        """Share a context's handle with the tenant's other clients."""
        with self._lock:
            self._held[tenant, number, policy] = held

    def held(self, tenant: str, number: int, policy: str) -> Held | None:
        """Return the tenant's handle of a document, if it has one."""
        with self._lock:
            return self._held.get((tenant, number, policy))

    def forget(self, tenant: str, number: int, policy: str, held: Held) -> None:
        """Drop a handle that is no longer known, unless a new one is there."""
        with self._lock:
            if self._held.get((tenant, number, policy)) == held:
                del self._held[tenant, number, policy]

    def foreign(self, tenant: str, drawn: random.Random) -> Held | None:
        """Return a handle of another tenant."""
        with self._lock:
            others = [held for (owner, *_), held in self._held.items() if owner != tenant]
        return drawn.choice(others) if others else None
