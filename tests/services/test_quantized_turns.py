"""Turns over quantized contexts, from prefill to answer, against the untouched model.

The oracle is transformers' own attention over a cache of the entries that the store gives,
expanded, each at its position; an additive −inf mask hides, per layer and head, what was
not kept.
"""

from __future__ import annotations

import queue
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from decode_requests import assert_empty, capacity, config, ids, is_end, request, tokens_of
from near_ties import TOLERANCE, first_difference, noting_margins
from torch import Tensor
from transformers import DynamicCache

from criticalkv.services.decode import engine as engine_module
from criticalkv.services.local import LocalEngine, LocalNode, LocalTurn
from criticalkv.services.local.engine import SALT
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.chain import ChainLoader
from criticalkv.shared.errors import PoolLimitError
from criticalkv.shared.identity import Identity, tokens_digest
from criticalkv.shared.model.attention import IMPLEMENTATION
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.publish import publish_cache

Factory = Callable[..., LoadedModel]
LOGIT_TOLERANCE = 1e-3
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen3", {"num_q_heads": 6, "num_kv_heads": 2}),
    ("mistral", {"sliding_window": 24}),
    ("gemma3_text", {}),
]
STEPWISE = "window+uniform+plain:window=4,interval=8,target=6"


def compress(engine: LocalEngine, count: int, codec: str, seed: int = 1, **after: Any) -> LocalNode:
    policy = f"window+adakv+twostage:window=8,codec={codec}"
    return engine.compress_tokens(ids(count, seed), policy=policy, **after)


def stored(engine: LocalEngine, turn: LocalTurn) -> list[RaggedCache]:
    """A turn's ancestors' entries at the turn's view, as the store gives them."""
    assert turn.end is not None
    loader = ChainLoader(engine.store, engine.model.spec)
    chain = loader.load(turn.end.ancestors[-1], SALT, turn.end.view)
    return [node.cache for node in chain.nodes]


def oracle(model: LoadedModel, caches: Sequence[RaggedCache], tokens: Sequence[int]) -> Tensor:
    """Logits [tokens, vocab] of the untouched model after what the caches hold."""
    spec, begin, count = model.spec, caches[-1].next_position, len(tokens)
    past, hooks = DynamicCache(), []
    for index, layer in enumerate(model.model.model.layers):
        shape = (1, spec.num_kv_heads, begin, spec.head_dim)
        keys, values = torch.zeros(shape), torch.zeros(shape)
        kept = torch.zeros(spec.num_kv_heads, begin, dtype=torch.bool)
        for cache in caches:
            for head in range(spec.num_kv_heads):
                k, v, positions = cache.layers[index].head(head)
                at = positions.long()
                keys[0, head, at], values[0, head, at], kept[head, at] = k, v, True
        past.update(keys, values, index)
        mask = _mask(kept, count, spec.sliding_windows[index])
        mask = mask.repeat_interleave(spec.group_size, 0)[None]
        hook = layer.self_attn.register_forward_pre_hook(
            lambda _m, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}),
            with_kwargs=True,
        )
        hooks.append(hook)
    untouched: Any = model.model
    untouched.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            positions = torch.arange(begin, begin + count)[None]
            given = {"cache": past, "position_ids": positions}
            logits: Tensor = untouched(torch.tensor([list(tokens)]), **given).logits[0]
    finally:
        untouched.set_attn_implementation(IMPLEMENTATION)
        for hook in hooks:
            hook.remove()
    return logits


def _mask(kept: Tensor, count: int, window: int | None) -> Tensor:
    """What `count` tokens after the kept ones see; fp32 [heads, count, all]."""
    heads, begin = kept.shape
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    visible = torch.cat([kept[:, None].expand(-1, count, -1), seen.expand(heads, -1, -1)], -1)
    if window is not None:
        at = torch.arange(begin + count)
        visible = visible & (at > at[begin:, None] - window)
    return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)


class Recorder:
    """Notes the logits that answers were drawn from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[Tensor] = []
        forward = engine_module.forward

        def recording(*args: Any) -> Tensor:
            out = forward(*args)
            self.rows += [row.clone() for row in out]
            return out

        monkeypatch.setattr(engine_module, "forward", recording)

    def turn(self, engine: LocalEngine, parent: LocalNode, count: int, tier: str) -> LocalTurn:
        """Run a turn, and compare it with the oracle, teacher-forced."""
        self.rows.clear()
        given = [*engine.manifest(parent).pending_ids, *ids(count, count)]
        turn = engine.generate(parent, given, tier=tier, max_tokens=5, ignore_eos=True)
        theirs = oracle(engine.model, stored(engine, turn), [*given, *turn.token_ids[:-1]])
        ours, theirs = torch.stack(self.rows), theirs[-5:]
        assert theirs.std() >= 1
        torch.testing.assert_close(ours, theirs, atol=LOGIT_TOLERANCE, rtol=0)
        top = theirs.topk(2)
        assert (top.values[:, 0] - top.values[:, 1] > 2 * (ours - theirs).abs().max()).all()
        assert top.indices[:, 0].tolist() == list(turn.token_ids)
        return turn


@pytest.mark.parametrize(("root", "child"), [("int8", "int4"), ("int4", "raw")])
@pytest.mark.parametrize(("family", "extra"), FAMILIES, ids=lambda v: str(v))
def test_turns_after_quantized_nodes_are_the_untouched_models(
    family: str,
    extra: dict[str, Any],
    root: str,
    child: str,
    tiny_model: Factory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A context, an attachment and a turn before it, read at several tiers."""
    recorder = Recorder(monkeypatch)
    with LocalEngine(tiny_model(family, **extra)) as engine:
        first = compress(engine, 150, root)
        second = compress(engine, 60, child, 2, parent=first, tier="0.4")
        turn = recorder.turn(engine, second, 9, "0.4")
        recorder.turn(engine, turn, 3, "0.1")
        recorder.turn(engine, first, 4, "1")
        codecs = [engine.manifest(node).identity.codec for node in (first, second, turn)]
        assert codecs == [root, child, "raw"], "turns keep the model's own dtype"
        assert_empty(engine.decode)


def expanded_twin(engine: LocalEngine, node: LocalNode) -> LocalNode:
    """A raw node with the entries that readers of a quantized one get."""
    manifest = engine.manifest(node)
    chain = ChainLoader(engine.store, engine.model.spec).load(
        node.node_id, SALT, (manifest.tiers[-1],)
    )
    tokens = [0] * manifest.num_tokens
    fields = manifest.identity.model_dump() | {
        "codec": "raw",
        "policy": "dense",
        "tokens": tokens_digest(tokens),
    }
    made = publish_cache(
        engine.store,
        Identity(**fields),
        chain.nodes[0].cache,
        token_ids=tokens,
        ancestors=(),
        attempt=secrets.token_hex(16),
    )
    return LocalNode(made.manifest.node_id, (), True)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("policy", ["dense", STEPWISE])
def test_answers_are_those_over_the_same_entries_kept_raw(
    codec: str, policy: str, tiny_model: Factory
) -> None:
    """Stepwise turns read a copy of their chain; others do not."""
    with LocalEngine(tiny_model()) as engine, noting_margins() as margins:
        node = compress(engine, 200, codec)
        for tier in ("0.3", "1"):
            given = {"tier": tier, "max_tokens": 24, "policy": policy, "ignore_eos": True}
            answers = [
                engine.generate(each, ids(7, 3), **given).token_ids
                for each in (node, expanded_twin(engine, node))
            ]
            at = first_difference(*answers)
            assert at is None or margins[-24 + at] < TOLERANCE
        assert_empty(engine.decode)


def test_what_is_stored_is_quantized(tiny_model: Factory) -> None:
    """If nothing were, all else here would pass."""
    with LocalEngine(tiny_model()) as engine:
        entries = [
            ChainLoader(engine.store, engine.model.spec)
            .load(compress(engine, 200, codec).node_id, SALT, ("1",))
            .nodes[0]
            .cache.layers[0]
            .keys
            for codec in ("raw", "int8", "int4")
        ]
    errors = [float((keys - entries[0]).norm() / entries[0].norm()) for keys in entries[1:]]
    assert 0 < errors[0] < 0.01 < errors[1] < 0.1


@pytest.fixture
def crowded(tiny_model: Factory) -> Iterator[LocalEngine]:
    with LocalEngine(tiny_model(head_dim=64), decode=config()) as engine:
        yield engine


def test_who_makes_room_goes_on_over_quantized_nodes(crowded: LocalEngine) -> None:
    """Several turns want more than the pool has: some are swapped out and come back."""
    engine, model = crowded, crowded.model
    nodes = [compress(engine, 100, codec) for codec in ("int8", "int4")]
    tokens = capacity(engine.decode, model.spec) // 5
    wanted = [request(node, ("0.4",), sampling={"max_tokens": tokens}) for node in nodes]
    with noting_margins() as margins:
        alone = [list(engine.decode.generate(one)) for one in wanted]
        ends = [margins[i * tokens : (i + 1) * tokens] for i in range(2)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: list(engine.decode.generate(one)), wanted * 2))
    assert sum(events[-1].preemptions for events in together) > 0
    for right, found, near in zip(alone * 2, together, ends * 2, strict=True):
        at = first_difference(tokens_of(right), tokens_of(found))
        assert at is None or near[at] < TOLERANCE
    assert_empty(engine.decode)


def test_choices_share_a_quantized_context(crowded: LocalEngine) -> None:
    node = compress(crowded, 100, "int8")
    sampled = {"temperature": 1.0, "seed": 5}
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    many = request(node, ("0.4",), sampling=sampled, branch_seeds=(6, 7))
    crowded.decode.submit(many, events.put)
    found: list[Any] = []
    while sum(map(is_end, found)) < 3:
        found.append(events.get(timeout=20))
    for choice, seed in enumerate((5, 6, 7)):
        one = request(node, ("0.4",), sampling={**sampled, "seed": seed})
        assert tokens_of(found, choice) == tokens_of(list(crowded.decode.generate(one)))
    assert_empty(crowded.decode)


def test_a_page_smaller_than_a_group_is_told(tiny_model: Factory) -> None:
    with LocalEngine(tiny_model(), decode=config(page_size=10)) as engine:
        node = compress(engine, 40, "int8")
        with pytest.raises(PoolLimitError, match=r"decode\.page_size to 12 or more"):
            engine.generate(node, [65], tier="0.4")
        assert_empty(engine.decode)
