"""Codecs: in how many bits a node's kept entries are stored. No tensors here."""

from __future__ import annotations

from typing import Literal

from criticalkv.kernels.group_layout import GroupLayout
from criticalkv.shared.errors import PolicyError
from criticalkv.shared.identity import CODEC_RAW

Codec = Literal["raw", "int8", "int4"]
BITS = {"int8": 8, "int4": 4}


def layout_of(codec: str, head_dim: int) -> GroupLayout | None:
    """Return the groups' layout of a codec, None for raw.

    Raises:
        ValueError: if the codec is unknown, or cannot hold this head_dim.
    """
    if codec == CODEC_RAW:
        return None
    if codec not in BITS:
        raise ValueError(f"codec {codec!r} is unknown; there are raw, {', '.join(BITS)}")
    return GroupLayout(BITS[codec], head_dim)


def checked_layout(codec: str, head_dim: int) -> GroupLayout | None:
    """Return the groups' layout of a codec that a policy asks for, None for raw.

    Raises:
        PolicyError: if the codec cannot hold this head_dim, saying what to do.
    """
    try:
        return layout_of(codec, head_dim)
    except ValueError as error:
        raise PolicyError(f"codec {codec}: {error}; use codec=raw", param="policy") from error
