"""The small real model: tier 1 is transformers' own full cache, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from criticalkv.services.local import LocalEngine, LocalNode, LocalTurn
from criticalkv.services.prefill.sinks import SpoolingSink
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.model.chat import Message, Part
from criticalkv.shared.model.loader import LoadedModel

# Twice this is the top-2 margin below which two correct fp32 forwards may differ.
TOLERANCE = 1e-3
DOCUMENTS = {
    "try": "What does a finally clause do?",
    "with": "How does the with statement work?",
    "exprlists": "What is an expression list?",
}


@pytest.fixture(scope="module")
def engine(demo_model: LoadedModel) -> Iterator[LocalEngine]:
    torch.set_num_threads(2)
    with LocalEngine(demo_model) as local:
        yield local


@pytest.fixture(scope="module")
def theirs(demo_model: LoadedModel) -> PreTrainedModel:
    """An untouched model: transformers' own attention and cache."""
    return AutoModelForCausalLM.from_pretrained(
        demo_model.spec.path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def full_cache_answer(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([ids]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


def assert_same_tokens(model: PreTrainedModel, ids: list[int], ours: list[int], count: int) -> None:
    """Equal to their generation; or, from the first difference on, teacher-forced equal
    wherever the top-2 margin is clear, with at most 2 % exempt."""
    if ours == full_cache_answer(model, ids, count):
        return
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *ours]])).logits[0, len(ids) - 1 : -1]
    top = logits.topk(2)
    unclear = top.values[:, 0] - top.values[:, 1] <= 2 * TOLERANCE
    exempt = unclear.nonzero().flatten().tolist()
    print(f"exempt tokens: {exempt}")
    assert len(exempt) <= 0.02 * count
    assert torch.equal(top.indices[~unclear, 0], torch.tensor(ours)[~unclear])


@pytest.mark.parametrize("topic", DOCUMENTS)
def test_two_turns_at_tier_1_are_the_full_cache(
    topic: str, engine: LocalEngine, theirs: PreTrainedModel
) -> None:
    chat = engine.model.chat
    text = topics[topic][:3000] + "\n\n"
    context = engine.compress(text)
    rendered = chat.render([message(text)], add_generation_prompt=False)
    ids = [t for piece in rendered[:-1] for t in piece.ids]
    assert len(ids) == engine.manifest(context).num_tokens
    leaf: Any = context
    for question in (DOCUMENTS[topic], "Say that again in other words."):
        pieces = chat.continue_(leaf.roles, leaf.is_open, [message(question)])
        pending = list(engine.manifest(leaf).pending_ids)
        ids += [*pending, *(t for piece in pieces for t in piece.ids)]
        turn: LocalTurn = engine.ask(leaf, question, tier=1.0, max_tokens=64, ignore_eos=True)
        assert turn.start is not None
        assert turn.start.retained_fraction == 1
        assert_same_tokens(theirs, ids, list(turn.token_ids), 64)
        ids += turn.token_ids[:-1]
        leaf = turn


def test_stored_kv_is_the_forwards_own_bit_for_bit(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    take = SpoolingSink.take

    def tee(self: SpoolingSink, layer: Any) -> None:
        seen.append((layer.call.key.clone(), layer.call.value.clone()))
        take(self, layer)

    monkeypatch.setattr(SpoolingSink, "take", tee)
    context = engine.compress(topics["with"][:1200])
    with engine.store.open_get(context.node_id) as reader:
        cache = assemble(reader.manifest, reader.tier, reader)
    for layer, (keys, values) in zip(cache.layers, seen, strict=True):
        for head in range(keys.shape[0]):
            k, v, positions = layer.head(head)
            order = positions.argsort()
            assert torch.equal(positions[order], torch.arange(keys.shape[1], dtype=torch.int32))
            assert torch.equal(k[order], keys[head])
            assert torch.equal(v[order], values[head])


CODES = {"Paris": ("7391042", 60), "Lima": ("4825167", 200), "Cairo": ("9036218", 330)}


def haystack() -> str:
    """About 680 tokens with three needles."""
    words = (topics["comparisons"] + topics["with"]).split()[:400]
    for city, (code, at) in sorted(CODES.items(), key=lambda item: -item[1][1]):
        words.insert(at, f"One of the special magic numbers for {city} is: {code}.")
    return (
        "Some special magic numbers are hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the numbers afterwards.\n" + " ".join(words)
    )


def recalled(engine: LocalEngine, context: LocalNode, tier: float) -> int:
    """How many of the three facts are answered."""
    count = 0
    for city, (code, _) in CODES.items():
        question = f"\nWhat is the special magic number for {city} mentioned in the provided text?"
        count += code in engine.ask(context, question, tier=tier, max_tokens=24).text
    return count


def test_the_default_policy_keeps_facts_that_a_window_loses(engine: LocalEngine) -> None:
    """Questions unseen at compression; the same cache read at three tiers."""
    context = engine.compress(haystack(), policy="default")
    assert recalled(engine, context, 1.0) == 3
    assert recalled(engine, context, 0.3) == 3
    assert recalled(engine, context, 0.1) >= 2
    window = engine.compress(haystack(), policy="snapkv")
    assert recalled(engine, window, 0.3) <= 1


def message(text: str) -> Message:
    return Message("user", (Part(text),))
