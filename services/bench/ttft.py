"""Time to first token: a cold prefill against a warm turn, and the store's own speed.

Cold is the model's forward over the context, before any scoring, ours alternating with
plain transformers in the same process. Warm is a turn on a decode engine that has never
seen the node: request to first token, with the pull from a real store.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, PreTrainedModel

from criticalkv.services.bench.store_path import measure as measure_store
from criticalkv.services.decode.engine import DecodeEngine
from criticalkv.services.prefill.engine import PrefillEngine
from criticalkv.services.store.process import StoreProcess, start_store
from criticalkv.shared.cache.wire import TORCH_DTYPE
from criticalkv.shared.config import Config, DecodeConfig
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.eviction.policy import Policy, codec_of
from criticalkv.shared.identity import POLICY_DENSE, Identity, tenant_salt, tokens_digest
from criticalkv.shared.model.loader import LoadedModel, load_model
from criticalkv.shared.report import Report, median
from criticalkv.shared.requests import (
    DecodeDelta,
    DecodeRequest,
    DecodeStart,
    PrefillRequest,
    PrefillResult,
    Sampling,
)

LENGTHS = (1024, 2048, 4096)
QUICK_LENGTHS = (512,)
TIERS = ("0.1", "0.2", "0.4")
QUESTION = "\n\nWhat is this text about? Answer in one sentence."
MEANING = {
    "cold_vs_transformers_4k": "our context forward before scoring ÷ plain transformers (sdpa, "
    "DynamicCache) on the same 4,096 tokens and threads; ratio, lower is better",
    "warm_speedup_4k": "our cold context forward ÷ warm TTFT at the highest stored tier (0.4), "
    "4,096 tokens, node pulled from the store; ratio, higher is better",
    "store_get_vs_bare_grpc": "GET GB/s through the store ÷ a bare gRPC stream of the same "
    "frames without Redis; ratio, higher is better",
    "store_put_vs_bare_grpc": "PUT GB/s through the store ÷ a bare gRPC stream of the same "
    "frames without Redis; ratio, higher is better",
}


def run(config: Config, *, quick: bool, threads: int) -> Report:
    """Measure everything and return the report.

    Args:
        config: model and store settings.
        quick: one short context and few repeats.
        threads: torch threads, for ours and for plain transformers alike.
    """
    lengths, rounds = (QUICK_LENGTHS, 2) if quick else (LENGTHS, 5)
    headline: dict[str, float | None] = dict.fromkeys(MEANING)
    report = Report("ttft", quick, headline, MEANING)
    report.details["threads"], report.details["rounds"] = threads, rounds
    with _bench(config, threads) as bench, Progress(console=Console(stderr=True)) as progress:
        steps = progress.add_task("time to first token", total=len(lengths) * rounds * 2)
        for n in lengths:
            result = bench.at_length(n, rounds, lambda: progress.advance(steps))
            report.details[f"{n}"], report.samples[f"{n}"] = result
    store = measure_store(quick)
    report.details["store"] = {k: v for k, v in store.items() if k != "samples"}
    report.samples["store"] = store.get("samples")
    for key in ("store_get_vs_bare_grpc", "store_put_vs_bare_grpc"):
        headline[key] = store[key]
    if "4096" in report.details:
        headline["cold_vs_transformers_4k"] = report.details["4096"]["cold_vs_transformers"]
        headline["warm_speedup_4k"] = report.details["4096"]["warm"]["0.4"]["speedup"]
    return report


@contextmanager
def _bench(config: Config, threads: int) -> Iterator[_Bench]:
    model = load_model(config.model, threads)
    plain = AutoModelForCausalLM.from_pretrained(
        model.spec.path, dtype=TORCH_DTYPE[model.spec.dtype], attn_implementation="sdpa"
    ).eval()
    store = config.store.model_copy(update={"address": "127.0.0.1:0"})
    with start_store(store) as process:
        yield _Bench(config, model, plain, process)


class _Bench:
    def __init__(
        self, config: Config, model: LoadedModel, plain: PreTrainedModel, process: StoreProcess
    ) -> None:
        self._model = model
        self._plain = plain
        self._process = process
        self._policy = Policy.parse(config.eviction.policy).canonical()
        self._prefill = PrefillEngine(model, process.client(), config.prefill, config.eviction)

    def at_length(self, n: int, rounds: int, tick: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return details and samples for contexts of n tokens."""
        ids = self._tokens(n)
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(rounds):
            theirs.append(self._plain_forward(ids))
            ours.append(self._compress(ids, POLICY_DENSE, "1").prefill_ms / 1e3)
            tick()
        compressed = self._compress(ids, self._policy, "0.4")
        warm: dict[str, list[float]] = {tier: [] for tier in TIERS}
        pulled: dict[str, int] = {}
        for _ in range(rounds):
            for tier in TIERS:
                seconds, pulled[tier] = self._warm_turn(compressed.node_id, n, tier)
                warm[tier].append(seconds)
            tick()
        cold = median(ours)
        details = {
            "cold_s": cold,
            "transformers_s": median(theirs),
            "cold_vs_transformers": cold / median(theirs),
            "scoring_over_prefill": compressed.scoring_ms / compressed.prefill_ms,
            "full_kv_bytes": self._full_bytes(n),
            "stored_bytes": dict(zip(compressed.tiers, compressed.tier_bytes, strict=True)),
            "warm": {
                tier: {
                    "ttft_s": median(warm[tier]),
                    "speedup": cold / median(warm[tier]),
                    "bytes_pulled": pulled[tier],
                }
                for tier in TIERS
            },
        }
        return details, {"cold_s": ours, "transformers_s": theirs, "warm_s": warm}

    def _tokens(self, n: int) -> tuple[int, ...]:
        text = "\n\n".join(topics[name] for name in ("compound", "types", "specialnames"))
        ids = tuple(self._model.chat.encode_content(text)[:n])
        if len(ids) < n:
            raise ConfigError(f"the text has only {len(ids)} of {n} tokens in this tokenizer")
        return ids

    def _plain_forward(self, ids: tuple[int, ...]) -> float:
        tokens = torch.tensor([ids], device=self._model.device)
        started = time.perf_counter()
        with torch.inference_mode():
            self._plain(tokens, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started

    def _compress(self, ids: tuple[int, ...], policy: str, store_tier: str) -> PrefillResult:
        spec, salt = self._model.spec, tenant_salt(secrets.token_hex(8))
        identity = Identity(
            model_digest=spec.model_digest,
            tokenizer_digest=spec.tokenizer_digest,
            dtype=spec.dtype,
            codec=codec_of(policy),
            policy=policy,
            salt=salt,
            tokens=tokens_digest(ids),
        )
        self._salt = salt
        return self._prefill.run(
            PrefillRequest(
                node_id=identity.node_id,
                token_ids=ids,
                policy=policy,
                store_tier=store_tier,
                salt=salt,
            )
        )

    def _warm_turn(self, node_id: str, n: int, tier: str) -> tuple[float, int]:
        # A fresh engine holds nothing: everything comes from the store.
        with self._process.client() as store:
            engine = DecodeEngine(self._model, store, DecodeConfig(node_cache_mb=0))
            try:
                # As a replica does before it says ready; it still holds no node.
                engine.warm_up()
                return self._first_token(engine, node_id, n, tier)
            finally:
                engine.close()

    def _first_token(
        self, engine: DecodeEngine, node_id: str, n: int, tier: str
    ) -> tuple[float, int]:
        request = DecodeRequest(
            request_id="bench",
            parent=node_id,
            view=(tier,),
            token_ids=tuple(self._model.chat.encode_content(QUESTION)),
            salt=self._salt,
            sampling=Sampling(max_tokens=2, ignore_eos=True),
            publish=False,
        )
        started, pulled = time.perf_counter(), 0
        for event in engine.generate(request):
            if isinstance(event, DecodeStart):
                pulled = event.bytes_pulled
                if event.cached_tokens != n or not pulled:
                    raise RuntimeError("the warm turn did not come from the store")
            if isinstance(event, DecodeDelta):
                return time.perf_counter() - started, pulled
        raise RuntimeError("no token came")

    def _full_bytes(self, n: int) -> int:
        spec = self._model.spec
        size = TORCH_DTYPE[spec.dtype].itemsize
        return n * spec.num_layers * spec.num_kv_heads * (2 * spec.head_dim * size + 4)
