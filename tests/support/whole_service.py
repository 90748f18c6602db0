"""A whole service without Ray: real HTTP, real store, engines in this process."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import uvicorn
from openai import OpenAI

from criticalkv.services.decode.engine import DecodeEngine
from criticalkv.services.gateway.app import build_app
from criticalkv.services.gateway.core import GatewayCore
from criticalkv.services.prefill.engine import PrefillEngine
from criticalkv.services.store.process import StoreProcess
from criticalkv.shared.config import Config, DecodeConfig, EvictionConfig, GatewayConfig
from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import (
    DecodeDelta,
    DecodeEnd,
    DecodeRequest,
    DecodeStart,
    PrefillRequest,
    PrefillResult,
)

Event = DecodeStart | DecodeDelta | DecodeEnd
DOCUMENT = "".join(f"Line {i} says {i * 7919 % 1000}. " for i in range(30))
GREEDY = {"temperature": 0, "max_tokens": 8}


class EngineWorkers:
    """Workers made of engines in this process; `decoder` is the one that decodes next."""

    def __init__(self, model: LoadedModel, process: StoreProcess, config: Config) -> None:
        self._model = model
        self._process = process
        self._config = config
        self._store = process.client()
        self._prefill = PrefillEngine(model, self._store, config.prefill, config.eviction)
        self.prefills: list[PrefillRequest] = []
        self.decodes: list[DecodeRequest] = []
        self._engines: list[DecodeEngine] = []
        self.fresh_decoder()

    def fresh_decoder(self) -> None:
        """Decode on another worker from now on: empty cache, own connection."""
        self.decoder = DecodeEngine(self._model, self._process.client(), self._config.decode)
        self._engines.append(self.decoder)

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        self.prefills.append(request)
        return await asyncio.to_thread(self._prefill.run, request)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Event, None]:
        self.decodes.append(request)
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event | CriticalKVError]()
        sequence = self.decoder.submit(
            request, lambda event: loop.call_soon_threadsafe(events.put_nowait, event) and None
        )
        running = 1 + len(request.branch_seeds)
        try:
            while running:
                event = await events.get()
                if isinstance(event, CriticalKVError):
                    raise event
                yield event
                running -= isinstance(event, DecodeEnd)
        finally:
            sequence.cancelled.set()

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        self._store.close()


class Service:
    """A running gateway, and what tests ask of it."""

    def __init__(
        self,
        model: LoadedModel,
        process: StoreProcess,
        eviction: EvictionConfig | None = None,
        decode_max_suffix_tokens: int = 100,
    ) -> None:
        config = Config(
            eviction=eviction or EvictionConfig(),
            gateway=GatewayConfig(
                implicit_breakpoint_tokens=200, decode_max_suffix_tokens=decode_max_suffix_tokens
            ),
            decode=DecodeConfig(max_num_seqs=4),
        )
        self.workers = EngineWorkers(model, process, config)
        core = GatewayCore(config, model.spec, model.tokenizer, process.client(), self.workers)
        self._server = uvicorn.Server(
            uvicorn.Config(build_app(core), host="127.0.0.1", port=0, log_level="warning")
        )
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.model = model.spec.name
        self.url = f"http://127.0.0.1:{port}/v1"
        self.client = OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.workers.close()

    def register(self, text: str = DOCUMENT, **fields: Any) -> dict[str, Any]:
        body = {"text": text, "store_tier": 0.6, **fields}
        return self.client.post("/contexts", body=body, cast_to=dict[str, Any])

    def chat(
        self, messages: list[Any], headers: dict[str, str] | None = None, **fields: Any
    ) -> Any:
        extension = {
            k: fields.pop(k)
            for k in (
                "context_id",
                "read_tier",
                "policy",
                "turn_policy",
                "store_tier",
                "cache_salt",
            )
            if k in fields
        }
        return self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            extra_body={"criticalkv": extension},
            extra_headers=headers or {},
            **{**GREEDY, **fields},
        )

    def ask(self, question: str, context_id: str, **fields: Any) -> Any:
        return self.chat([user(question)], context_id=context_id, **fields)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def of_its_own(model: LoadedModel) -> LoadedModel:
    """The same weights in every run; under a digest of its own no test finds another's nodes."""
    return replace(model, spec=replace(model.spec, model_digest=secrets.token_hex(32)))
