"""Decode: steps over ragged heads against transformers and against our own full cache.

One process, the parties take turns in every round, medians over rounds. All contexts of a
batch are different nodes in memory, with the kept entries of one real context, so that no
sequence profits from another's cache lines.

  ours     the decode engine's own steps, its threads idle otherwise
  dynamic  transformers' forward with DynamicCache, as `generate` does it, sdpa
  static   the same with StaticCache
  kept     the same with a DynamicCache of the kept fraction: what a library that prunes
           every head alike leaves, batch 1
"""

from __future__ import annotations

import gc
import math
import os
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from criticalkv.kernels import ops
from criticalkv.services.bench.copies import SALT, bench_identity, store_copies
from criticalkv.services.bench.warm_turn import measure as measure_warm
from criticalkv.services.decode.batch import BatchPlan, Member
from criticalkv.services.decode.engine import DecodeEngine
from criticalkv.services.decode.opening import ChainOpener
from criticalkv.services.decode.pages import Pages
from criticalkv.services.decode.resident import Residents
from criticalkv.services.decode.turn_kv import TurnKV
from criticalkv.services.local.memory_store import MemoryStore
from criticalkv.services.prefill.engine import PrefillEngine
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.cache.wire import TORCH_DTYPE
from criticalkv.shared.chain import ChainLoader
from criticalkv.shared.config import Config
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import NodeId
from criticalkv.shared.model.loader import LoadedModel, load_model
from criticalkv.shared.model.prepack import prepack
from criticalkv.shared.report import Report, median
from criticalkv.shared.requests import DecodeEnd, DecodeRequest, PrefillRequest, Sampling

TIERS = ("0.1", "0.2", "0.4", "1")
BATCHES = (1, 4, 8, 16)
LENGTHS = {1024: "0.4", 2048: "0.2", 4096: "0.1", 7680: "0.05"}
"""Context lengths, and the tier at which about 400 entries per head are left."""
STEPS = 6  # of a round, after those in which sequences come
FIXED_POOL_MB = 4096
GROWTH_BATCH = 4
MEANING = {
    "vs_hf_dynamic_b8_t02": "step of transformers with DynamicCache ÷ our step at tier 0.2, batch "
    "8, contexts of 4,096 tokens; ratio, higher is better",
    "vs_hf_static_b8_t02": "the same with StaticCache; ratio, higher is better",
    "vs_own_full_b8": "our step at tier 1 ÷ our step at tier 0.2, batch 8; ratio, higher is better",
    "attention_vs_own_full_b8": "our attention, all layers, at tier 1 ÷ at tier 0.2, batch 8; "
    "ratio, higher is better",
    "cost_7680_over_1k": "our step over contexts of 7,680 tokens ÷ of 1,024, about 400 entries per "
    "head in both; ratio, 1 is ideal",
    "pool_overhead": "bytes of the pages of a node of 4,096 tokens at tier 0.2 ÷ bytes of its kept "
    "entries, minus 1; fraction, lower is better",
    "warm_speedup_4k": "cold context forward ÷ warm TTFT at tier 0.2, 4,096 tokens, on a replica "
    "that does not hold the node; ratio, higher is better",
}


def run(config: Config, *, quick: bool, threads: int) -> Report:
    """Measure everything and return the report.

    Args:
        config: model and store settings.
        quick: short contexts and small batches.
        threads: torch threads, for all parties alike.
    """
    report = Report("decode", quick, dict.fromkeys(MEANING), MEANING)
    rounds, n = (2, 256) if quick else (5, 4096)
    batches, lengths = ((1, 2), {64: "0.4", 128: "0.2"}) if quick else (BATCHES, LENGTHS)
    report.details |= {"threads": threads, "rounds": rounds, "tokens": n}
    model = load_model(config.model, threads)
    bench = _Bench(config, model)
    with _progress() as progress:
        task = progress.add_task("decode", total=len(batches) + len({n, *lengths}) + 3)
        caches = {}
        for length in sorted({n, *lengths}):
            caches[length] = bench.context(length)
            progress.advance(task)
        report.details["prepacked"] = prepack(model) if config.decode.prepack else 0
        report.details["cold_ms"] = bench.cold(n, rounds)
        report.details["warm"] = measure_warm(config, model, caches[n], quick=quick)
        progress.advance(task)
        report.details["growth"] = bench.growth(lengths, caches, rounds)
        report.details["pool"] = bench.pool(caches[n])
        progress.advance(task)
        report.details["attention"] = bench.attention(caches[n], min(8, max(batches)), rounds)
        progress.advance(task)
        for batch in batches:
            report.details[f"b{batch}"] = bench.steps(caches[n], batch, rounds)
            progress.advance(task)
    report.headline.update(_headline(report.details))
    return report


def _headline(details: dict[str, Any]) -> dict[str, float | None]:
    b8 = details.get("b8")
    step = {} if b8 is None else b8["step_ms"]
    growth = details["growth"]
    return {
        "vs_hf_dynamic_b8_t02": step["dynamic"] / step["0.2"] if step else None,
        "vs_hf_static_b8_t02": step["static"] / step["0.2"] if step else None,
        "vs_own_full_b8": step["1"] / step["0.2"] if step else None,
        "attention_vs_own_full_b8": details["attention"]["full_over_02"] if step else None,
        "cost_7680_over_1k": growth["7680"]["step_ms"] / growth["1024"]["step_ms"]
        if "7680" in growth
        else None,
        "pool_overhead": details["pool"]["overhead"],
        "warm_speedup_4k": details["cold_ms"] / details["warm"]["1"]["0.2"]["ttft"]
        if step
        else None,
    }


class _Bench:
    def __init__(self, config: Config, model: LoadedModel) -> None:
        self._config = config
        self._model = model
        self._plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model.spec.path, dtype=TORCH_DTYPE[model.spec.dtype], attn_implementation="sdpa"
        ).eval()

    def context(self, length: int) -> RaggedCache:
        """Compress a real text under the default policy; return all that it has."""
        store, policy = MemoryStore(), Policy.parse(self._config.eviction.policy).canonical()
        ids = text_tokens(self._model, length)
        identity = bench_identity(self._model.spec, policy, ids)
        prefill = PrefillEngine(self._model, store, self._config.prefill, self._config.eviction)
        prefill.run(
            PrefillRequest(
                node_id=identity.node_id, token_ids=ids, policy=policy, store_tier="1", salt=SALT
            )
        )
        chain = ChainLoader(store, self._model.spec).load(identity.node_id, SALT, ("1",))
        return chain.nodes[0].cache

    def cold(self, length: int, rounds: int) -> float:
        """Milliseconds of transformers' own forward over a context."""
        tokens, samples = torch.tensor([text_tokens(self._model, length)]), []
        for _ in range(min(3, rounds)):
            started = time.perf_counter()
            with torch.inference_mode():
                self._plain(tokens, use_cache=True, logits_to_keep=1)
            samples.append(1e3 * (time.perf_counter() - started))
        return median(samples)

    def growth(
        self, lengths: dict[int, str], caches: dict[int, RaggedCache], rounds: int
    ) -> dict[str, Any]:
        """Steps at a fixed number of entries over ever longer contexts."""
        samples: dict[str, list[float]] = {str(n): [] for n in lengths}
        stores = {n: self._copies(caches[n], GROWTH_BATCH) for n in lengths}
        with self._engines({n: copies.store for n, copies in stores.items()}) as engines:
            for n, tier in lengths.items():  # everything is pulled before anything is timed
                self._ours(engines[n], stores[n], tier)
            for _ in range(rounds):
                for n, tier in lengths.items():
                    samples[str(n)] += self._ours(engines[n], stores[n], tier)
        return {
            str(n): {
                "tier": tier,
                "entries_per_head": self._entries(caches[n], tier),
                "step_ms": 1e3 * median(samples[str(n)]),
            }
            for n, tier in lengths.items()
        }

    def pool(self, cache: RaggedCache) -> dict[str, Any]:
        """What pages cost beyond the entries, and how many conversations fit."""
        spec, page_size = self._model.spec, self._config.decode.page_size
        pages = Pages(spec, self._model.device, 1 << 20, page_size)
        entry = pages.page_bytes // page_size
        heads = spec.num_layers * spec.num_kv_heads
        pool = (self._config.decode.pool_mb << 20) // pages.page_bytes
        per_tier = {}
        for tier in TIERS:
            lens = cache.tier_lens[cache.tiers.index(tier)]
            count = int((-(-lens // page_size)).sum())
            turn = heads * -(-256 // page_size)
            per_tier[tier] = {
                "entries_per_head": self._entries(cache, tier),
                "overhead": count * page_size / int(lens.sum()) - 1,
                "conversations": pool // (count + turn),
            }
        return {
            "overhead": per_tier["0.2"]["overhead"],
            "entry_bytes": entry,
            "pool_mb": self._config.decode.pool_mb,
            "turn_tokens": 256,
            "tiers": per_tier,
        }

    def attention(self, cache: RaggedCache, batch: int, rounds: int) -> dict[str, Any]:
        """The attention of one step alone, all layers, at tier 0.2 and at tier 1."""
        calls = {tier: self._attention_call(cache, batch, tier) for tier in ("0.2", "1")}
        samples: dict[str, list[float]] = {tier: [] for tier in calls}
        for _ in range(2 * rounds):
            for tier, call in calls.items():
                started = time.perf_counter()
                call()
                samples[tier].append(time.perf_counter() - started)
        step = {tier: 1e3 * median(values) for tier, values in samples.items()}
        return {"batch": batch, "ms": step, "full_over_02": step["1"] / step["0.2"]}

    def steps(self, cache: RaggedCache, batch: int, rounds: int) -> dict[str, Any]:
        """Steps of all parties over `batch` contexts."""
        copies = self._copies(cache, batch)
        dynamic, static = self._hf_cache(cache, batch, None), self._hf_cache(cache, batch, 64)
        kept = self._hf_cache(cache, 1, None, fraction=0.2) if batch == 1 else None
        samples: dict[str, list[float]] = {name: [] for name in (*TIERS, "dynamic", "static")}
        with self._engines(dict.fromkeys(TIERS, copies.store)) as engines:
            before = _resident_bytes()
            for tier in TIERS:  # everything is pulled before anything is timed
                self._ours(engines[tier], copies, tier)
            memory = {"rss_bytes": _resident_bytes() - before}
            memory["accounted_bytes"] = sum(
                e.load().used_bytes + e.load().kept_bytes for e in engines.values()
            )
            for _ in range(rounds):
                for tier in TIERS:
                    samples[tier] += self._ours(engines[tier], copies, tier)
                samples["dynamic"] += self._theirs(dynamic, batch)
                samples["static"] += self._theirs(static, batch)
                if kept is not None:
                    samples.setdefault("kept", []).extend(self._theirs(kept, 1))
        step = {name: 1e3 * median(values) for name, values in samples.items()}
        gc.collect()
        return {
            "step_ms": step,
            "tokens_per_s": {name: 1e3 * batch / ms for name, ms in step.items()},
            "memory": memory,
        }

    @contextmanager
    def _engines(self, stores: Mapping[Any, MemoryStore]) -> Iterator[dict[Any, DecodeEngine]]:
        config = self._config.decode.model_copy(
            update={"pool_mb": FIXED_POOL_MB, "node_cache_mb": FIXED_POOL_MB}
        )
        made = {name: DecodeEngine(self._model, store, config) for name, store in stores.items()}
        try:
            for engine in made.values():
                engine.warm_up()
            yield made
        finally:
            for engine in made.values():
                engine.close()

    def _ours(self, engine: DecodeEngine, nodes: _Copies, tier: str) -> list[float]:
        """Seconds of the steps in which all sequences took part."""
        engine.step_seconds.clear()
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for node_id in nodes.ids:
            request = DecodeRequest(
                request_id="bench",
                parent=node_id,
                view=(tier,),
                token_ids=(65,),
                salt=SALT,
                sampling=Sampling(max_tokens=STEPS + 4, ignore_eos=True),
                publish=False,
            )
            engine.submit(request, events.put)
        left = len(nodes.ids)
        while left:
            event = events.get(timeout=600)
            if isinstance(event, Exception):
                raise event
            left -= isinstance(event, DecodeEnd)
        return [s for members, s in engine.step_seconds if members == len(nodes.ids)][-STEPS:]

    def _theirs(self, cache: DynamicCache | StaticCache, batch: int) -> list[float]:
        """Seconds of a few steps; the cache is as before afterwards."""
        token = torch.full((batch, 1), 65)
        samples = []
        with torch.inference_mode():
            for _ in range(STEPS):
                started = time.perf_counter()
                out = self._plain(token, cache=cache, use_cache=True)
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                samples.append(time.perf_counter() - started)
        cache.crop(-STEPS)
        return samples[1:]

    def _hf_cache(
        self, cache: RaggedCache, batch: int, room: int | None, fraction: float = 1.0
    ) -> DynamicCache | StaticCache:
        """Return a full cache for a batch: static with `room` for more tokens, or dynamic."""
        hf, count = self._plain.config, int(cache.num_tokens * fraction)
        made = (
            DynamicCache(config=hf)
            if room is None
            else StaticCache(config=hf, max_cache_len=count + room)
        )
        with torch.inference_mode():
            for index, layer in enumerate(cache.layers):
                heads = self._model.spec.num_kv_heads
                by_position = [layer.head(h)[2].argsort()[:count] for h in range(heads)]
                keys = torch.stack([layer.head(h)[0][i] for h, i in enumerate(by_position)])
                values = torch.stack([layer.head(h)[1][i] for h, i in enumerate(by_position)])
                made.update(_repeated(keys, batch), _repeated(values, batch), index)
        return made

    def _attention_call(self, cache: RaggedCache, batch: int, tier: str) -> Any:
        spec, device = self._model.spec, self._model.device
        nodes = self._copies(cache, batch)
        pages = Pages(spec, device, FIXED_POOL_MB << 20, self._config.decode.page_size)
        residents = Residents(pages, 0)
        opener = ChainOpener(nodes.store, spec, pages, residents)
        heads, members = (spec.num_layers, spec.num_kv_heads), []
        for node_id in nodes.ids:
            chain = opener.measure(node_id, SALT, (tier,), lambda: None)
            opened = opener.open(chain, math.prod(heads))
            assert opened is not None
            opener.pull(opened.to_pull, lambda: None)
            kv = TurnKV(residents, pages, opened.views, chain.next_position, heads)
            kv.grow(opened.own)
            members.append(Member(kv, (65,), chain.next_position, lambda: None))
        plan = BatchPlan(pages, members, device)
        query = torch.randn(spec.num_q_heads, batch, spec.head_dim)

        def call() -> None:
            for layer in range(spec.num_layers):
                ops.paged_attention(
                    query,
                    pages.keys,
                    pages.values,
                    plan._tables[layer],
                    plan._fills[layer],
                    plan._query_cu,
                    scaling=spec.head_dim**-0.5,
                )

        return call

    def _copies(self, cache: RaggedCache, count: int) -> _Copies:
        store = MemoryStore()
        return _Copies(store, store_copies(store, self._model.spec, cache, count))

    def _entries(self, cache: RaggedCache, tier: str) -> float:
        return float(cache.tier_lens[cache.tiers.index(tier)].double().mean())


class _Copies:
    def __init__(self, store: MemoryStore, ids: list[NodeId]) -> None:
        self.store = store
        self.ids = ids


def text_tokens(model: LoadedModel, count: int) -> tuple[int, ...]:
    """Return the first tokens of a real text.

    Raises:
        ConfigError: if it is too short in this tokenizer.
    """
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tuple(model.chat.encode_content(text[: 12 * count])[:count])
    if len(ids) < count:
        raise ConfigError(f"the text has only {len(ids)} of {count} tokens in this tokenizer")
    return ids


def _repeated(rows: Tensor, batch: int) -> Tensor:
    return rows[None].expand(batch, *rows.shape).contiguous()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _progress() -> Progress:
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))
