"""The demo: one real document, two conversations over it, one table.

Everything is real: the embedded Valkey, the store, Ray Serve with two decode replicas,
and the unmodified `openai` client in streaming mode.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import APIError, OpenAI
from rich.console import Console
from rich.table import Table

from criticalkv.services.cli import running
from criticalkv.shared.config import Config, placed
from criticalkv.shared.errors import ConfigError, CriticalKVError
from criticalkv.shared.loopback import free_port

DOCUMENT_TOPICS = ("compound", "execmodel")
DOCUMENT_CHARS = 12_500
READ_TIERS = ("0.2", "0.4")
MAX_TOKENS = 48
# Positions kept free for questions and answers.
ROOM_TOKENS = 1024
TIMEOUT_S = 900.0
QUESTIONS = (
    (
        "What is this document about? Answer in one sentence.",
        "What does the try statement do?",
        "And what is the finally clause for?",
    ),
    (
        "How does a for loop work?",
        "What happens when break is used in it?",
        "How is the with statement different?",
    ),
)


@dataclass
class Answer:
    """One streamed answer and what it cost."""

    text: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    tokens: int = 0
    cached_tokens: int = 0
    extension: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first token."""
        return max(0, self.tokens - 1) / max(self.total_s - self.ttft_s, 1e-9)

    @property
    def first_line(self) -> str:
        """The first line that holds text."""
        return next((line for line in self.text.strip().splitlines() if line), "")


def run(config: Config, document: Path | None) -> None:
    """Start everything, converse, print the table, stop everything."""
    console = Console() if Console().is_terminal else Console(width=170)
    text = read_document(document) if document else default_document()
    check_length(config, text)
    try:
        show(console, beside_others(config), text)
    except APIError as error:
        raise CriticalKVError(f"the service answered with an error: {error.message}") from error


def show(console: Console, config: Config, text: str) -> None:
    """Start everything, converse about a text, print the table, stop everything."""
    with running(config) as live:
        url = f"http://{live.gateway.host}:{live.gateway.port}/v1"
        client = OpenAI(base_url=url, api_key="demo", timeout=TIMEOUT_S, max_retries=0)
        conversation = Conversation(client, client.models.list().data[0].id)
        with console.status("Prefilling and compressing the document, once …"):
            context = conversation.register(text)
        print_context(console, context)
        table = new_table()
        warm = list(converse(console, conversation, context["id"], table))
        console.print(table)
        print_summary(console, context, warm)


class Conversation:
    """Talks to the gateway as any user would."""

    def __init__(self, client: OpenAI, model: str) -> None:
        self._client = client
        self._model = model

    def register(self, text: str) -> dict[str, Any]:
        """Register a context at every tier, so that the full cache can be asked too."""
        body = {"text": text, "store_tier": 1.0}
        return self._client.post("/contexts", body=body, cast_to=dict[str, Any])

    def ask(self, question: str, context_id: str, tier: str) -> Answer:
        """Ask one question, streaming."""
        answer, started = Answer(), time.perf_counter()
        stream = self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": question}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"criticalkv": {"context_id": context_id, "read_tier": float(tier)}},
        )
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                answer.ttft_s = answer.ttft_s or time.perf_counter() - started
                answer.text += chunk.choices[0].delta.content
            if chunk.usage:
                answer.tokens = chunk.usage.completion_tokens
                details = chunk.usage.prompt_tokens_details
                answer.cached_tokens = (details and details.cached_tokens) or 0
            answer.extension = getattr(chunk, "criticalkv", None) or answer.extension
        answer.total_s = time.perf_counter() - started
        return answer


def converse(
    console: Console, conversation: Conversation, context_id: str, table: Table
) -> Iterator[Answer]:
    """Hold the conversations, each beside its full-cache twin; yield the warm answers."""
    for number, (tier, questions) in enumerate(zip(READ_TIERS, QUESTIONS, strict=True)):
        ours = full = context_id
        for turn, question in enumerate(questions, start=1):
            with console.status(f"Conversation {number + 1}, turn {turn}: {question}"):
                answer = conversation.ask(question, ours, tier)
                twin = conversation.ask(question, full, "1")
            ours, full = answer.extension["handle"], twin.extension["handle"]
            table.add_row(f"{'AB'[number]}{turn}", *row(answer), twin.first_line)
            yield answer


def row(answer: Answer) -> tuple[str, ...]:
    """Cells of one answer."""
    extension = answer.extension
    return (
        str(extension["replica"])[:8],
        f"{answer.ttft_s:.2f} s",
        str(answer.cached_tokens),
        megabytes(extension["bytes_pulled"]),
        str(extension["tier"]),
        f"{extension['retained_fraction']:.2f}",
        f"{answer.tokens_per_s:.1f}",
        answer.first_line,
    )


def new_table() -> Table:
    """The empty table."""
    table = Table(title="Two conversations over one stored context")
    for name in ("turn", "replica", "TTFT", "cached", "pulled", "tier", "kept", "tok/s"):
        table.add_column(name, no_wrap=True, justify="left" if name == "replica" else "right")
    table.add_column("answer", ratio=1, max_width=60)
    table.add_column("answer with the full cache", ratio=1, max_width=60)
    return table


def print_context(console: Console, context: dict[str, Any]) -> None:
    """Say what was stored."""
    console.print(
        f"Context of {context['num_tokens']} tokens; full KV {megabytes(context['full_bytes'])}. "
        "Stored once, readable at every tier:"
    )
    console.print(
        "  " + "   ".join(f"{t['tier']}: {megabytes(t['bytes'])}" for t in context["tiers"])
    )


def print_summary(console: Console, context: dict[str, Any], warm: list[Answer]) -> None:
    """Set the cold prefill beside the warm turns."""
    cold, scoring = context["prefill_ms"] / 1e3, context["scoring_ms"] / 1e3
    ttfts = sorted(answer.ttft_s for answer in warm)
    median = ttfts[len(ttfts) // 2]
    replicas = {answer.extension["replica"] for answer in warm}
    console.print(
        f"Cold prefill: {cold:.2f} s (and {scoring:.2f} s to score it, once). "
        f"Warm TTFT: median {median:.2f} s, {cold / median:.0f} times faster; "
        f"worst {ttfts[-1]:.2f} s. "
        f"Decode replicas used: {len(replicas)}."
    )


def megabytes(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.1f} MB"


def default_document() -> str:
    """Python's own language reference, as shipped with every interpreter."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in DOCUMENT_TOPICS)
    return re.sub(r"[ \t]+\n", "\n", text)[:DOCUMENT_CHARS] + "\n\n"


def read_document(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: if it is none, or empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--document {path} is not a text file in UTF-8: {error}") from error
    if "\0" in text:
        raise ConfigError(f"--document {path} is not a text file")
    if not text.strip():
        raise ConfigError(f"--document {path} is empty")
    return text


def check_length(config: Config, text: str) -> None:
    """Refuse a text that leaves the model no room for the conversation.

    Raises:
        ConfigError: naming both lengths.
    """
    from criticalkv.shared.model.spec import load_spec, load_tokenizer

    spec = load_spec(placed(config).model)
    limit = spec.max_positions - ROOM_TOKENS
    length = len(load_tokenizer(spec)(text, verbose=False)["input_ids"])
    if length > limit:
        raise ConfigError(
            f"the document has {length} tokens; {spec.name} has {spec.max_positions} positions, "
            f"which leaves {max(0, limit)} for it: give a shorter one with --document"
        )


def beside_others(config: Config) -> Config:
    """Return the configuration on free ports, with threads for workers that take turns."""
    threads = min(2, os.cpu_count() or 1)
    gateway = config.gateway.model_copy(update={"port": free_port()})
    store = config.store.model_copy(update={"address": "127.0.0.1:0"})
    parts: dict[str, Any] = {"gateway": gateway, "store": store}
    for name, part in (("prefill", config.prefill), ("decode", config.decode)):
        if "threads" not in part.model_fields_set:
            parts[name] = part.model_copy(update={"threads": threads})
    return config.model_copy(update=parts)
