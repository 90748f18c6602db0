"""A gateway over a real store and real HTTP, with scripted workers."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from openai import OpenAI
from tiny_models import CHATML, byte_tokenizer

from criticalkv.services.gateway.app import build_app
from criticalkv.services.gateway.core import GatewayCore
from criticalkv.services.store.process import StoreProcess
from criticalkv.shared.cache.quality import Quality
from criticalkv.shared.cache.ragged import RaggedLayer, cu_seqlens_of
from criticalkv.shared.config import Config, EvictionConfig, GatewayConfig
from criticalkv.shared.errors import NodeMissingError
from criticalkv.shared.eviction.policy import Policy, codec_of
from criticalkv.shared.identity import POLICY_DENSE, Identity, tokens_digest
from criticalkv.shared.model.chat import ChatTemplate, tokenizer_digest
from criticalkv.shared.publish import NodePublisher
from criticalkv.shared.requests import (
    DecodeDelta,
    DecodeEnd,
    DecodeRequest,
    DecodeStart,
    PrefillRequest,
    PrefillResult,
    TokenLogprob,
)
from criticalkv.shared.store_client import StoreClient

HEAD_DIM = 4
Event = DecodeStart | DecodeDelta | DecodeEnd


@dataclass(frozen=True)
class ServedModel:
    """What the gateway knows of a model; a fresh digest keeps tests apart."""

    tokenizer_digest: str
    name: str = "tiny"
    model_digest: str = field(default_factory=lambda: secrets.token_hex(32))
    dtype: str = "float32"
    max_positions: int = 4096
    head_dim: int = HEAD_DIM


@dataclass
class ScriptedWorkers:
    """Publishes real nodes of random KV, and says what the script says."""

    store: StoreClient
    model: ServedModel
    template: ChatTemplate
    prefills: list[PrefillRequest] = field(default_factory=list)
    decodes: list[DecodeRequest] = field(default_factory=list)
    prefill_delay: float = 0.0
    hold_background: threading.Event | None = None
    fail_background: list[Exception] = field(default_factory=list)
    token_delay: float = 0.0
    say: Callable[[DecodeRequest], str] = lambda request: f"seed {request.sampling.seed}"
    finish: str = "stop"
    publish_error: str | None = None
    fail_prefill: list[Exception] = field(default_factory=list)
    fail_decode: list[Exception] = field(default_factory=list)
    fail_after: int | None = None
    fail_with: Exception = field(
        default_factory=lambda: RuntimeError("the secret text of a worker's failure")
    )
    cut_after: int | None = None
    start_fields: dict[str, Any] = field(default_factory=dict)
    end_fields: dict[str, Any] = field(default_factory=dict)
    before_decode: list[Callable[[], None]] = field(default_factory=list)
    open_decodes: int = 0
    cancelled_prefills: int = 0
    quality: Quality | None = None

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        self.prefills.append(request)
        try:
            await asyncio.sleep(self.prefill_delay)
        except asyncio.CancelledError:
            self.cancelled_prefills += 1
            raise
        if request.background and self.hold_background is not None:
            try:
                while not self.hold_background.is_set():
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.cancelled_prefills += 1
                raise
        if request.background and self.fail_background:
            raise self.fail_background.pop(0)
        if self.fail_prefill:
            raise self.fail_prefill.pop(0)
        return await asyncio.to_thread(self._prefill, request)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Event, None]:
        self.decodes.append(request)
        self.open_decodes += 1
        try:
            if self.before_decode:
                await asyncio.to_thread(self.before_decode.pop(0))
            if self.fail_decode:
                raise self.fail_decode.pop(0)
            chain = await asyncio.to_thread(self._chain, request)
            async with aclosing(self._choices(request, *chain)) as events:
                async for event in events:
                    yield event
        finally:
            self.open_decodes -= 1

    async def _choices(
        self,
        request: DecodeRequest,
        ancestors: tuple[str, ...],
        view: tuple[str, ...],
        position: int,
    ) -> AsyncGenerator[Event, None]:
        """Say every choice's text, a character of each in turn."""
        runs = dict(enumerate(_runs(request)))
        for choice in runs:
            start = {
                "replica": "r1", "bytes_pulled": 10, "cached_tokens": position,
                "tier": min(view, key=Decimal, default="1"), "retained_fraction": 0.5,
                "store_ms": 1.0, "choice": choice, "view": view, **self.start_fields,
            }  # fmt: skip
            yield DecodeStart.model_validate(start)
        for i in itertools.count(len(request.emitted)):
            if i == self.cut_after:
                return
            for choice, run in list(runs.items()):
                text = self.say(run)
                if i == len(text):
                    del runs[choice]
                    yield await asyncio.to_thread(
                        self._end, run, text, ancestors, view, position, choice
                    )
                    continue
                if i == self.fail_after:
                    raise self.fail_with
                await asyncio.sleep(self.token_delay)
                yield _delta(text[i], run, choice)
            if not runs:
                return

    def _chain(self, request: DecodeRequest) -> tuple[tuple[str, ...], tuple[str, ...], int]:
        if request.parent is None:
            return (), (), 0
        leaf = self.store.stat([request.parent])[0]
        stats = [*self.store.stat(list(leaf.ancestors)), leaf] if leaf.present else [leaf]
        for stat in stats:
            if not stat.present:
                raise NodeMissingError.of(stat.node_id, "absent")
        view = request.view
        assert len(view) == len(stats)
        for stat, tier in zip(stats, view, strict=True):
            if tier not in stat.tiers:
                raise NodeMissingError.of(stat.node_id, f"not stored at {tier}")
        return (*leaf.ancestors, request.parent), view, leaf.next_position

    def _prefill(self, request: PrefillRequest) -> PrefillResult:
        parent = self.store.stat([request.ancestors[-1]])[0] if request.ancestors else None
        if parent is not None and not parent.present:
            raise NodeMissingError.of(request.ancestors[-1], "absent")
        identity = self._identity(
            request.policy,
            request.salt,
            request.ancestors,
            request.view,
            request.token_ids,
            request.pending_ids,
        )
        assert identity.node_id == request.node_id
        below = [t for t in Config().eviction.tiers if Decimal(t) < Decimal(request.store_tier)]
        one_tier = request.policy == POLICY_DENSE or Policy.parse(request.policy).is_stepwise
        tiers = ["1"] if one_tier else [*below, request.store_tier]
        before = parent.next_position if parent else 0
        manifest = self._publish(
            identity,
            request.token_ids,
            request.ancestors,
            before,
            tiers,
            request.pending_ids,
            request.lease_token,
            request.ttl_ms,
            self.quality,
        )
        return PrefillResult(
            node_id=request.node_id,
            tiers=manifest.tiers,
            tier_bytes=tuple(manifest.tier_bytes()),
            tier_entries=tuple(manifest.tier_entries()),
            full_entries=manifest.full_entries,
            num_tokens=manifest.num_tokens,
            next_position=manifest.next_position,
            prefill_ms=1.0,
            scoring_ms=1.0,
            total_ms=2.0,
            stored_bytes=1,
            published=True,
            replica="p1",
            quality=self.quality,
        )

    def _end(
        self,
        request: DecodeRequest,
        text: str,
        ancestors: tuple[str, ...],
        view: tuple[str, ...],
        position: int,
        choice: int,
    ) -> DecodeEnd:
        new = self.template.encode_content(text)
        ids = (*request.token_ids, *new)
        pending = self.template.closing_ids
        identity = self._identity(request.policy, request.salt, ancestors, view, ids, pending)
        wanted = request.publish and self.finish != "cancelled"
        published = wanted and self.publish_error is None
        if published:
            self._publish(
                identity,
                ids,
                ancestors,
                position,
                ["1"],
                pending,
                "",
                request.ttl_ms,
            )
        return DecodeEnd.model_validate(
            {
                "finish_reason": self.finish,
                "prompt_tokens": position + len(request.token_ids),
                "completion_tokens": len(new),
                "ancestors": ancestors,
                "view": view,
                "node_id": identity.node_id if published else None,
                "publish_error": self.publish_error,
                "choice": choice,
                **self.end_fields,
            }
        )

    def _identity(
        self,
        policy: str,
        salt: str,
        ancestors: tuple[str, ...],
        view: tuple[str, ...],
        ids: tuple[int, ...],
        pending: tuple[int, ...] = (),
    ) -> Identity:
        return Identity(
            model_digest=self.model.model_digest,
            tokenizer_digest=self.model.tokenizer_digest,
            dtype=self.model.dtype,
            codec=codec_of(policy),
            policy=policy,
            salt=salt,
            parent=ancestors[-1] if ancestors else None,
            view=view,
            tokens=tokens_digest(ids, pending),
        )

    def _publish(
        self,
        identity: Identity,
        ids: tuple[int, ...],
        ancestors: tuple[str, ...],
        before: int,
        tiers: list[str],
        pending: tuple[int, ...],
        lease: str,
        ttl_ms: int,
        quality: Quality | None = None,
    ) -> Any:
        lens = [max(1, int(len(ids) * Decimal(t))) for t in tiers]
        rows = torch.randn(lens[-1], HEAD_DIM)
        positions = torch.arange(before, before + lens[-1], dtype=torch.int32)
        layer = RaggedLayer(rows, rows.clone(), positions, cu_seqlens_of([lens[-1]]))
        table = torch.tensor([[n] for n in lens])
        with NodePublisher(
            self.store, identity, secrets.token_hex(8), lease_token=lease, ancestors=ancestors
        ) as put:
            put.send(layer, table)
            return put.commit(
                token_ids=ids,
                next_position=before + len(ids),
                head_dim=HEAD_DIM,
                tiers=tiers,
                pending_ids=pending,
                ttl_ms=ttl_ms,
                quality=quality,
            ).manifest


def _runs(request: DecodeRequest) -> list[DecodeRequest]:
    """Return one request per choice, each with its own seed."""
    sampling = request.sampling
    seeds = (sampling.seed, *request.branch_seeds)
    samplings = [sampling.model_copy(update={"seed": seed}) for seed in seeds]
    return [request.model_copy(update={"sampling": s}) for s in samplings]


def _delta(character: str, request: DecodeRequest, choice: int) -> DecodeDelta:
    token = TokenLogprob(token_id=1, token=character, logprob=-0.5, top=((character, -0.5),))
    wanted = request.sampling.logprobs is not None
    logprobs = (token,) if wanted else ()
    said = {"token_ids": (1,), "sampled": (1,)}
    return DecodeDelta(choice=choice, text=character, logprobs=logprobs, **said)


@dataclass
class Gateway:
    """A running gateway and what a test needs of its parts."""

    core: GatewayCore
    workers: ScriptedWorkers
    store: StoreClient
    url: str

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=20)

    def chat(self, messages: Any, **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        body = {"model": "tiny", "messages": messages, **fields}
        return self.post("/v1/chat/completions", body, **headers)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=20)

    def node_ids(self) -> list[str]:
        return [request.node_id for request in self.workers.prefills]


@contextmanager
def gateway_factory(store_process: StoreProcess) -> Iterator[Callable[..., Gateway]]:
    """Start gateways with given settings; stop them at the end."""
    stops: list[Callable[[], None]] = []

    def make(
        template: str = CHATML,
        max_positions: int = 4096,
        eviction: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Gateway:
        tokenizer = byte_tokenizer(template)
        model = ServedModel(tokenizer_digest(tokenizer), max_positions=max_positions)
        config = Config(
            eviction=EvictionConfig(**(eviction or {})),
            gateway=GatewayConfig(
                **{"implicit_breakpoint_tokens": 100, "decode_max_suffix_tokens": 64, **settings}
            ),
        )
        store = store_process.client()
        workers = ScriptedWorkers(store, model, ChatTemplate(tokenizer))
        core = GatewayCore(config, model, tokenizer, store_process.client(), workers)
        url, stop = serve(build_app(core))
        stops.extend([stop, store.close])
        return Gateway(core, workers, store, url)

    yield make
    for stop in stops:
        stop()


@pytest.fixture
def make_gateway(store_process: StoreProcess) -> Iterator[Callable[..., Gateway]]:
    """Factory of gateways."""
    with gateway_factory(store_process) as make:
        yield make


@pytest.fixture(scope="module")
def shared_gateway(store_process: StoreProcess) -> Iterator[Gateway]:
    """One gateway for requests that change nothing."""
    with gateway_factory(store_process) as make:
        yield make()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file of keys: `key-a` and `key-a2` of tenant a, `key-b` of b."""
    owners = {"key-a": "a", "key-a2": "a", "key-b": "b"}
    lines = [f"{hashlib.sha256(key.encode()).hexdigest()}: {name}" for key, name in owners.items()]
    file = tmp_path / "keys.yaml"
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
def gateway(make_gateway: Callable[..., Gateway]) -> Gateway:
    """A gateway with small limits: implicit breakpoint 100 tokens, suffix 64."""
    return make_gateway()


def serve(app: Any) -> tuple[str, Callable[[], None]]:
    """Run an app on a free loopback port in a thread; return its URL and a stop."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]

    def stop() -> None:
        server.should_exit = True
        thread.join()

    return f"http://127.0.0.1:{port}", stop
