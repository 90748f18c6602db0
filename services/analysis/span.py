"""A run of consecutive tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

from criticalkv.shared.errors import ConfigError


@dataclass(frozen=True)
class Span:
    """Tokens begin … end − 1, by their positions in the sequence.

    Raises:
        ConfigError: if it is empty or begins before the first token.
    """

    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end:
            raise ConfigError(f"span {self} holds no tokens; it is A:B, 0 ≤ A < B", param="span")

    def __len__(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.begin}:{self.end}"

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read "A:B".

        Raises:
            ConfigError: if the text is not of this form, or names no tokens.
        """
        found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
        if found is None:
            raise ConfigError(f"span {text!r} is not A:B, such as 100:120", param="span")
        return cls(int(found[1]), int(found[2]))

    def overlaps(self, other: Span) -> bool:
        """Say whether a token is in both."""
        return self.begin < other.end and other.begin < self.end

    def check_within(self, tokens: int) -> None:
        """Check that a sequence has these tokens.

        Raises:
            ConfigError: if it ends before they do.
        """
        if self.end > tokens:
            raise ConfigError(f"span {self} ends after the last of {tokens} tokens", param="span")
