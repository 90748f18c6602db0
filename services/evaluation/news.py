"""Summaries of MultiNews rows: does a compressed cache go on as the full one would?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from criticalkv.services.evaluation.case import Case, context_ids, data_file, question_ids
from criticalkv.shared.model.chat import ChatTemplate

ROWS = "multi_news_50.jsonl"
QUESTION = "Write a short summary of all the news above."
MIN_TOKENS = 300


def news(chat: ChatTemplate, data: Path | None, max_tokens: int) -> Iterator[Case]:
    """Yield rows that fit, with the summary by people as the answer; none without the file."""
    path = data_file(ROWS, data)
    if path is None:
        return
    for number, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        text = row["context"].replace("NEWLINE_CHAR", "\n")
        ids = context_ids(chat, "Here are news passages.\n\n" + text)
        if MIN_TOKENS < len(ids) <= max_tokens:
            summary = chat.encode_content(next(iter(row.get("answers", ())), ""))
            name = f"multi_news-{number}"
            yield Case(name, tuple(ids), tuple(question_ids(chat, QUESTION)), tuple(summary))
