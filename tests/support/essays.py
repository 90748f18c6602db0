"""Essays whose sentences are all different, and the tokenizers that measure them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from tiny_models import byte_tokenizer
from transformers import AutoTokenizer

from criticalkv.shared.config import ModelConfig
from criticalkv.shared.model.chat import ChatTemplate
from criticalkv.shared.model.demo import ensure_demo_model

LINE = "the old river café runs past Zürich and 北京 while seven grey herons wait for rain"
KINDS = ("bytes", "real")


@cache
def chat(kind: str) -> ChatTemplate:
    """Return a tokenizer of one token per byte, or the small real model's."""
    if kind == "bytes":
        return ChatTemplate(byte_tokenizer())
    return ChatTemplate(AutoTokenizer.from_pretrained(ensure_demo_model(ModelConfig().cache_dir)))


def sentences(count: int = 120, seed: int = 5) -> list[str]:
    """Return sentences of 5 to 16 words, each with its own number in words."""
    rng = random.Random(seed)
    return [_sentence(rng, i) for i in range(count)]


def write_essays(folder: Path) -> Path:
    """Write them as a user would: two files, lines that break anywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    every = sentences()
    (folder / "a.txt").write_text("\n".join(every[:70]), encoding="utf-8")
    (folder / "b.txt").write_text("\n \n".join(every[70:]), encoding="utf-8")
    return folder


def _sentence(rng: random.Random, number: int) -> str:
    spelled = "".join(chr(ord("a") + int(digit)) for digit in str(number))
    return " ".join(["Verse", spelled, *rng.choices(LINE.split(), k=rng.randrange(3, 15))]) + "."
