"""Small files in SQuAD's and HotpotQA's formats, whose questions say which paragraph answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def paragraph(key: str) -> str:
    rng = random.Random(key)
    return f"The code of {key} is {key[::-1]}. " + "x" * rng.randrange(20, 200)


def write_squad(folder: Path, articles: int = 8) -> Path:
    data = [
        {
            "title": f"Title {a}",
            "paragraphs": [
                {
                    "context": paragraph(f"s{a}p{p}"),
                    "qas": [
                        {
                            "id": f"{a}-{p}",
                            "question": f"Which code has s{a}p{p}?",
                            "answers": [{"text": f"s{a}p{p}"[::-1], "answer_start": 9}] * 3,
                            "is_impossible": False,
                        },
                        {"id": "no", "question": "Impossible?", "answers": [], "is_impossible": 1},
                    ],
                }
                for p in range(6)
            ],
        }
        for a in range(articles)
    ]
    (folder / "squad.json").write_text(json.dumps({"version": "v2.0", "data": data}))
    return folder


def hotpot_row(number: int, facts: bool) -> dict[str, Any]:
    titles = [f"h{number}t{t}" for t in range(6)]
    row = {
        "question": f"What joins {titles[1]} and {titles[4]}?",
        "answer": titles[1][::-1],
        "context": [[title, [paragraph(title)[:20], paragraph(title)[20:]]] for title in titles],
    }
    named = [[titles[4], 0], [titles[1], 0], [titles[1], 1]]
    return {**row, "supporting_facts": named} if facts else row


def write_hotpot(folder: Path, facts: bool = True) -> Path:
    rows = [hotpot_row(number, facts) for number in range(8)]
    (folder / "hotpotqa.json").write_text(json.dumps(rows))
    return folder
