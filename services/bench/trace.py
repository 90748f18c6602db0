"""Request traces: when requests came, how long they were, and what they had in common.

Mooncake (FAST'25): JSON lines {timestamp in ms, input_length, output_length, hash_ids},
one hash id for every 512 tokens of the input; requests whose leading hash ids are equal
have so many equal leading tokens. Azure LLM inference: CSV with TIMESTAMP, ContextTokens
and GeneratedTokens; it does not tell what is shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from criticalkv.services.evaluation.rows import Rows
from criticalkv.shared.errors import ConfigError

MOONCAKE_FILE = "mooncake_conversation_first.jsonl"
BLOCK_TOKENS = 512
STRICT = Rows(hint="")


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        at_s: when it came; in a trace, seconds since the first one.
        input_tokens: of the whole prompt.
        output_tokens: that were generated.
        hash_ids: of the input's blocks of 512 tokens, the last one as long as is left;
            none = nothing is known of what it shares.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, num: int, rows: Rows = STRICT) -> list[TraceRequest]:
    """Return a trace's first requests in the order in which they came.

    Args:
        path: `.csv` = Azure, all others Mooncake.
        num: of requests, at most.
        rows: what is done about malformed ones.

    Raises:
        ConfigError: naming the line that is malformed, or the file without requests.
    """
    is_azure = path.suffix.lower() == ".csv"
    found = rows.read_csv(path, _azure) if is_azure else rows.read(path, _mooncake)
    requests = sorted(islice(found, num), key=lambda request: request.at_s)
    if not requests:
        raise ConfigError(f"{path.name} has no requests", param="trace")
    first = requests[0].at_s
    return [replace(request, at_s=request.at_s - first) for request in requests]


def read_blocks(data: Path | None, num: int) -> list[tuple[int, ...]] | None:
    """Return the hash ids of the Mooncake trace's first requests; None if there is no trace.

    Args:
        data: folder to look in before $CRITICALKV_DATA.
        num: of requests, at most.
    """
    from criticalkv.services.evaluation.case import data_file  # which imports tokenizers

    path = data_file(MOONCAKE_FILE, data)
    return None if path is None else [request.hash_ids for request in read_trace(path, num)]


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    timestamp: float = Field(ge=0)
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: tuple[int, ...]


def _mooncake(fields: dict[str, Any]) -> TraceRequest:
    row = _Row.model_validate(fields)
    blocks = math.ceil(row.input_length / BLOCK_TOKENS)
    if len(row.hash_ids) != blocks:
        raise ValueError(
            f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens, which are {blocks} blocks"
        )
    return TraceRequest(
        at_s=row.timestamp / 1000,
        input_tokens=row.input_length,
        output_tokens=row.output_length,
        hash_ids=row.hash_ids,
    )


def _azure(fields: dict[str, Any]) -> TraceRequest:
    tokens, generated = int(fields["ContextTokens"]), int(fields["GeneratedTokens"])
    if tokens < 1 or generated < 1:
        raise ValueError("ContextTokens and GeneratedTokens must be at least 1")
    at = datetime.fromisoformat(fields["TIMESTAMP"])
    return TraceRequest(at.timestamp(), tokens, generated)
