"""Key-value retrieval of "lost in the middle" (arXiv 2307.03172): one question for each row."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.scbench.retr_kv import Pair, about

TASK = "kv75"


class Row(BaseModel):
    """The fields of a row; its key and value are one of the records, which differ in their keys."""

    ordered_kv_records: list[tuple[str, str]] = Field(min_length=1)
    key: str
    value: str

    @model_validator(mode="after")
    def _one_answer(self) -> Row:
        keys = [key for key, _ in self.ordered_kv_records]
        if len(set(keys)) < len(keys):
            raise ValueError("two records have one key")
        if (self.key, self.value) not in self.ordered_kv_records:
            raise ValueError("key and value are none of the records")
        return self


def kv75(row: dict[str, Any], name: str) -> Example:
    """Return the example of a row.

    Raises:
        ValueError: if it is malformed.
    """
    read = Row.model_validate(row)
    pairs = [Pair(key, value) for key, value in read.ordered_kv_records]
    return about(TASK, name, pairs, [Pair(read.key, read.value)])
