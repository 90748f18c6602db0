"""Load on the running service: a trace is replayed, or clients hold conversations.

Answers are streamed by the `openai` client; figures have the names that `vllm bench serve`
gives them. A request that fails is counted, and each has a deadline.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openai import APIError, AsyncOpenAI
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from criticalkv.services.bench.conversations import Loop, conversations
from criticalkv.services.bench.load import Gate, Tick, closed_loop, gate, open_loop
from criticalkv.services.bench.load_client import Asker, LoadClient
from criticalkv.services.bench.serve_figures import MEANING, figures, goodput_targets, samples
from criticalkv.services.bench.trace import read_trace
from criticalkv.services.bench.trace_asks import Scale, arrivals, known_share, poisson
from criticalkv.services.bench.words import Words
from criticalkv.services.evaluation.case import context_ids
from criticalkv.services.evaluation.rows import Rows
from criticalkv.shared.api_key import check_api_key
from criticalkv.shared.config import ModelConfig
from criticalkv.shared.errors import ConfigError, CriticalKVError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import canonical_tier
from criticalkv.shared.model.chat import ChatTemplate
from criticalkv.shared.model.spec import load_spec, load_tokenizer
from criticalkv.shared.report import Report

__all__ = ["Benchmark", "Loop", "Options", "Replay", "Scale", "goodput_targets"]


@dataclass(frozen=True)
class Replay:
    """Which part of a trace, and how.

    Attributes:
        trace: file.
        num: of requests, at most.
        scale: of lengths and times.
        request_rate: per second, at random times instead of the trace's; None = the trace's.
        skip_bad: leave malformed lines out instead of stopping.
    """

    trace: Path
    num: int = 100
    scale: Scale = field(default_factory=Scale)
    request_rate: float | None = None
    skip_bad: bool = False


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        load: a trace, or clients in closed loops.
        api_key: is in no report.
        policy: of contexts; None = the service's.
        tier: at which contexts are read; None = the service's.
        max_concurrency: requests at once; None = any number.
        targets: of goodput, ms.
        timeout_s: deadline of each request.
        any_model: the tokenizer was chosen for whatever model is served; else its model's
            name must be the one that is served.
    """

    load: Replay | Loop
    api_key: str = field(default="local", repr=False)
    policy: str | None = None
    tier: str | None = None
    max_concurrency: int | None = None
    targets: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    timeout_s: float = 600.0
    any_model: bool = False


class Benchmark:
    """All requests of a run, ready to be sent.

    Args:
        model: whose tokenizer counts the tokens of the texts that are sent.
        options: what is measured.

    Raises:
        ConfigError: if trace, policy, tier, tokenizer or API key cannot be used.
    """

    def __init__(self, model: ModelConfig, options: Options) -> None:
        check_api_key(options.api_key)
        spec = load_spec(model, check_device=False)
        asker = _asker(ChatTemplate(load_tokenizer(spec)), options)
        self._tokenizer = spec.name
        self._options = options
        self._plan = _planned(options, asker)

    def run(self, url: str) -> Report:
        """Load a service and return the report; after Ctrl-C that of the requests so far.

        Args:
            url: of the service, without /v1.

        Raises:
            ConfigError: if it serves another model than the one whose tokens were counted.
            CriticalKVError: if no service answers there.
        """
        counted = None if self._options.any_model else self._tokenizer
        run, interrupted = _Run(self._options, self._plan, url, counted), False
        try:
            asyncio.run(run.execute())
        except KeyboardInterrupt:
            interrupted = True
        return self._report(run, interrupted)

    def _report(self, run: _Run, interrupted: bool) -> Report:
        records = run.client.records if run.client else []
        details = {
            "model_id": run.model,
            "tokenizer_id": self._tokenizer,
            "num_prompts": self._plan.count,
            **_settings(self._options),
            **self._plan.details,
            **figures(records, run.duration_s, self._options.targets),
            "not_sent": self._plan.count - len(records),
            "interrupted": interrupted,
        }
        headline = {key: details[key] for key in MEANING}
        return Report("serve", False, headline, MEANING, details, dict(samples(records)))


@dataclass(frozen=True)
class _Plan:
    """All requests, and how they are sent."""

    count: int
    details: dict[str, Any]
    send: Callable[[LoadClient, Gate, Tick], Coroutine[Any, Any, None]]


@dataclass
class _Run:
    """One run; what there is of it can be read whenever it ends.

    Attributes:
        counted: name of the model whose tokens were counted, if it must be the served one.
    """

    options: Options
    plan: _Plan
    url: str
    counted: str | None
    model: str | None = None
    client: LoadClient | None = None
    duration_s: float = 0.0

    async def execute(self) -> None:
        """Send everything and wait for the answers."""
        options = self.options
        async with AsyncOpenAI(
            base_url=f"{self.url.rstrip('/')}/v1",
            api_key=options.api_key,
            timeout=options.timeout_s,
            max_retries=0,
        ) as openai:
            self.model = await _served_model(openai, self.url)
            _check_counted(self.counted, self.model)
            self.client = LoadClient(openai, self.model, options.timeout_s)
            try:
                await self._load(self.client)
            finally:
                self.duration_s = self.client.now()

    async def _load(self, client: LoadClient) -> None:
        with Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)
        ) as progress:
            step = progress.add_task("requests", total=self.plan.count)
            place = gate(self.options.max_concurrency)
            await self.plan.send(client, place, lambda: progress.advance(step))


async def _served_model(openai: AsyncOpenAI, url: str) -> str:
    try:
        return (await openai.models.list()).data[0].id
    except (APIError, IndexError) as error:
        why = error.message if isinstance(error, APIError) else "it serves no model"
        raise CriticalKVError(f"no service to measure at {url}: {why}") from error


def _check_counted(counted: str | None, served: str) -> None:
    """Refuse to send texts of who knows how many tokens."""
    if counted not in (None, served):
        raise ConfigError(
            f"the service has {served!r}, the texts are counted in tokens of {counted!r}: give "
            "--model with a tokenizer that is the served model's",
            param="model.path",
        )


def _asker(chat: ChatTemplate, options: Options) -> Asker:
    words = Words(chat.encode_content, options.seed)
    text = words.text("", 1)
    overhead = len(context_ids(chat, text)) - len(chat.encode_content(text))
    return Asker(words, overhead, _extension(options))


def _extension(options: Options) -> dict[str, str]:
    """Return what every request says about its contexts."""
    wanted = {}
    if options.policy is not None:
        wanted["policy"] = Policy.parse(options.policy).canonical()
    if options.tier is not None:
        try:
            wanted["read_tier"] = canonical_tier(options.tier)
        except ValueError as error:
            raise ConfigError(f"--tier: {error}", param="tier") from error
    return wanted


def _planned(options: Options, asker: Asker) -> _Plan:
    if isinstance(options.load, Loop):
        return _talks(options.load, asker, options.seed)
    return _replay(options.load, asker, options.seed)


def _talks(loop: Loop, asker: Asker, seed: int) -> _Plan:
    plan = conversations(loop, asker, seed)
    details = {"mode": "closed_loop", **asdict(loop)}
    return _Plan(
        loop.requests,
        details,
        lambda client, place, tick: closed_loop(client, plan, asker, place, tick),
    )


def _replay(replay: Replay, asker: Asker, seed: int) -> _Plan:
    rows = Rows(replay.skip_bad, Console(stderr=True, markup=False).print)
    requests = read_trace(replay.trace, replay.num, rows)
    plan = arrivals(requests, replay.scale, asker)
    if replay.request_rate is not None:
        plan = poisson(plan, replay.request_rate, seed)
    details = {
        "mode": "replay",
        "trace": replay.trace.name,
        "length_scale": replay.scale.length,
        "time_scale": replay.scale.time,
        "trace_known_block_share": known_share(requests),
        "asked_input_tokens": sum(arrival.input_tokens for arrival in plan),
        "asked_output_tokens": sum(arrival.ask.body["max_tokens"] for arrival in plan),
    }
    return _Plan(
        len(plan), details, lambda client, place, tick: open_loop(client, plan, place, tick)
    )


def _settings(options: Options) -> dict[str, Any]:
    rate = None if isinstance(options.load, Loop) else options.load.request_rate
    return {
        "policy": options.policy,
        "tier": options.tier,
        "seed": options.seed,
        "timeout_s": options.timeout_s,
        "max_concurrency": options.max_concurrency,
        "request_rate": "inf" if rate == math.inf else rate,
        "goodput_targets_ms": dict(options.targets),
    }
