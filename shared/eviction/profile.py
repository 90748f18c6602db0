"""A model's head profile: how much each KV head matters for retrieval.

Made by `criticalkv profile`, read by the allocators headkv and duo. Knows no torch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from criticalkv.shared.errors import PolicyError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import HEX64


class Profile(BaseModel):
    """Importance of every KV head of one model; higher = retrieves more."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    model_digest: str = Field(pattern=HEX64)
    method: str = Field(max_length=200, description="the probe, with its settings")
    importance: tuple[tuple[float, ...], ...] = Field(
        description="[num_layers][num_kv_heads], finite and ≥ 0"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        heads = {len(row) for row in self.importance}
        if len(heads) != 1 or 0 in heads:
            raise ValueError("importance must be [num_layers][num_kv_heads]")
        if not all(0 <= x < float("inf") for row in self.importance for x in row):
            raise ValueError("importance must be finite and not negative")
        return self

    def encode(self) -> bytes:
        """The file's bytes; equal profiles give equal bytes."""
        return self.model_dump_json(indent=1).encode() + b"\n"

    @property
    def digest(self) -> str:
        """sha256 of the file, as policies name it."""
        return hashlib.sha256(self.encode()).hexdigest()


def save_profile(profile: Profile, folder: Path) -> Path:
    """Write a profile where `load_profile` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{profile.digest}.json"
    path.write_bytes(profile.encode())
    return path


def load_profile(digest: str, folder: Path) -> Profile:
    """Read a profile by its digest.

    Raises:
        PolicyError: if there is none, or the file is not what its name says.
    """
    path = folder / f"{digest}.json"
    try:
        profile = Profile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise PolicyError(
            f"policy profile {digest[:16]}… cannot be read from {folder}: make it there with "
            "`criticalkv profile`",
            param="policy",
        ) from error
    if profile.digest != digest:
        raise PolicyError(f"policy profile {digest[:16]}…: the file was changed", param="policy")
    return profile


class Profiles:
    """The profiles that one model's policies name, each read and checked once."""

    def __init__(self, folder: Path, model_digest: str, num_layers: int, num_kv_heads: int) -> None:
        self._folder = folder
        self._model = model_digest
        self._shape = (num_layers, num_kv_heads)
        self._read: dict[str, Profile] = {}

    def of(self, policy: Policy | None) -> Profile | None:
        """Return the profile that a policy names, None if it names none.

        Raises:
            PolicyError: if it cannot be read, or is of another model.
        """
        if policy is None or not policy.profile:
            return None
        if policy.profile not in self._read:
            profile = load_profile(policy.profile, self._folder)
            self._check(profile)
            self._read[policy.profile] = profile
        return self._read[policy.profile]

    def _check(self, profile: Profile) -> None:
        name = f"policy profile {profile.digest[:16]}…"
        if profile.model_digest != self._model:
            raise PolicyError(f"{name} is of another model", param="policy")
        shape = (len(profile.importance), len(profile.importance[0]))
        if shape != self._shape:
            raise PolicyError(
                f"{name} has {shape[0]} layers of {shape[1]} KV heads; the model has "
                f"{self._shape[0]} of {self._shape[1]}",
                param="policy",
            )
