"""Decoding over evicted caches equals the untouched model under an additive −inf mask.

The oracle is transformers' own eager attention over the whole token sequence, with a
mask per layer, per head and per query token: a context's tokens see everything before
them, a turn's tokens see what the turn's view kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policies import make_profile
from torch import Tensor

from criticalkv.services.decode import engine as decode_engine
from criticalkv.services.decode import places
from criticalkv.services.decode.sequence import Sequence
from criticalkv.services.evaluation import oracle
from criticalkv.services.local import LocalEngine, LocalNode, LocalTurn
from criticalkv.shared.cache.ragged import RaggedLayer
from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.eviction.profile import save_profile
from criticalkv.shared.model.loader import LoadedModel

TOLERANCE = 1e-3
Factory = Callable[..., LoadedModel]

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 24}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ("qwen3", {}),
    ("gemma3_text", {}),
    (
        "gemma3_text",
        {
            "sliding_window": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    ("phi3", {}),
    ("phi3", {"sliding_window": 24}),
    ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
]
HEADS = [(4, 4), (4, 2), (6, 2), (4, 1)]
POLICIES = [
    "window+uniform+plain",
    "window+adakv+twostage",
    "window+model+critical",
    "replay+uniform+twostage",
    "replay+model+relative",
]
SCORED = [
    "echo+model+relative:echo_chunk=64,self_weight=0.5,distance=16",
    "echo+adakv+twostage:echo_chunk=64,echo_reach=64",
    "self+adakv+twostage:distance=16",
    "self+model+relative:distance=16,stride=3",
    "replay+model+relative:chunk=128,share=0.25",
    "replay+model+relative:chunk=128,share=0.125,echo_weight=4,echo_chunk=64,self_weight=0.5",
]
PROFILED = ["window+headkv+twostage", "replay+headkv+relative", "streaming+duo+plain"]


@dataclass
class Block:
    """Consecutive tokens of the sequence, and how later tokens see them.

    `kept[layer][head]` is the set of positions kept at each tier, by tier.
    """

    start: int
    end: int
    node: LocalNode


class Conversation:
    """Contexts and turns over one engine, with everything the oracle needs."""

    def __init__(
        self,
        model: LoadedModel,
        monkeypatch: pytest.MonkeyPatch,
        eviction: EvictionConfig | None = None,
        engine: LocalEngine | None = None,
    ) -> None:
        self.model = model
        self.engine = engine or LocalEngine(model, eviction=eviction)
        self.tokens: list[int] = []
        self.blocks: list[Block] = []
        self.views: list[tuple[str, ...]] = []
        self.logits: list[Tensor] = []
        forward = decode_engine.forward

        def recording(*args: Any) -> Tensor:
            out = forward(*args)
            self.logits.append(out[0].clone())
            return out

        monkeypatch.setattr(decode_engine, "forward", recording)

    @property
    def leaf(self) -> LocalNode | None:
        return self.blocks[-1].node if self.blocks else None

    def add(self, node: LocalNode, count: int, view: tuple[str, ...]) -> None:
        start = self.blocks[-1].end if self.blocks else 0
        self.blocks.append(Block(start, start + count, node))
        self.views.append(view)

    def context(self, ids: list[int], policy: str, tier: str | None = None) -> None:
        node = self.engine.compress_tokens(ids, policy=policy, parent=self.leaf, tier=tier)
        self.tokens += ids
        self.add(node, len(ids), self.engine.manifest(node).identity.view)

    def turn(self, ids: list[int], tier: str | None, new_tokens: int) -> None:
        """Run a turn and compare it with the oracle."""
        self.logits.clear()
        turn = self.generate(ids, tier, new_tokens)
        self.append(ids, turn)
        ours = torch.stack(self.logits)
        theirs = self.oracle()[-new_tokens:]
        assert theirs.std() >= 1
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
        check_tokens(list(turn.token_ids), ours, theirs)

    @property
    def pending(self) -> list[int]:
        return list(self.engine.manifest(self.leaf).pending_ids) if self.leaf else []

    def generate(self, ids: list[int], tier: str | None, new_tokens: int) -> LocalTurn:
        turn = self.engine.generate(
            self.leaf,
            [*self.pending, *ids],
            tier=tier,
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=0,
        )
        assert len(turn.token_ids) == new_tokens
        return turn

    def append(self, ids: list[int], turn: LocalTurn) -> None:
        assert turn.end is not None
        published = [*self.pending, *ids, *turn.token_ids][:-1]
        self.tokens += published
        self.add(turn, len(published), turn.end.view)

    def oracle(self) -> Tensor:
        """Logits [len(tokens), vocab] of the untouched model under the mask."""
        blocks = [
            oracle.Block(block.start, block.end, view, partial(self.kept, block))
            for block, view in zip(self.blocks, self.views, strict=True)
        ]
        return oracle.logits(self.model.model, self.model.spec, self.tokens, blocks)

    def kept(self, block: Block, tier: str, layer: int) -> Tensor:
        """Which tokens of a block each head kept at a tier: bool [num_kv_heads, n]."""
        cache = pristine(self.engine, block.node, tier)
        heads = self.model.spec.num_kv_heads
        out = torch.zeros(heads, block.end - block.start, dtype=torch.bool)
        for head in range(heads):
            out[head, cache[layer].head(head)[2].long() - block.start] = True
        return out


def pristine(engine: LocalEngine, node: LocalNode, tier: str) -> tuple[RaggedLayer, ...]:
    """Read a node outside the loader that mutations tamper with."""
    from criticalkv.shared.cache.wire import assemble

    with engine.store.open_get(node.node_id, tier=tier) as reader:
        return assemble(reader.manifest, reader.tier, reader).layers


def check_tokens(generated: list[int], ours: Tensor, theirs: Tensor) -> None:
    """Teacher-forced equality. A token could differ rightly only where the oracle's top-2
    margin is below twice the error that was just measured; none of ours is that close."""
    top = theirs.topk(2)
    assert (top.values[:, 0] - top.values[:, 1] > 2 * (ours - theirs).abs().max()).all()
    assert top.indices[:, 0].tolist() == generated


def random_ids(n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), generator=generator).tolist()


@pytest.fixture
def conversation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Conversation]]:
    made: list[Conversation] = []

    def make(
        model: LoadedModel,
        eviction: EvictionConfig | None = None,
        engine: LocalEngine | None = None,
    ) -> Conversation:
        made.append(Conversation(model, monkeypatch, eviction, engine))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


@pytest.mark.parametrize(("family", "extra"), FAMILIES, ids=lambda v: str(v))
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"q{h[0]}kv{h[1]}")
def test_three_turns_at_different_tiers(
    family: str,
    extra: dict[str, Any],
    heads: tuple[int, int],
    tiny_model: Factory,
    conversation: Callable[..., Conversation],
) -> None:
    model = tiny_model(family, num_q_heads=heads[0], num_kv_heads=heads[1], **extra)
    talk = conversation(model)
    talk.context(random_ids(90, 1), "replay+model+relative")
    for seed, (question, tier) in enumerate([(17, "0.1"), (1, "0.4"), (2, "0.05")]):
        talk.turn(random_ids(question, seed), tier, 4)


@pytest.mark.parametrize("policy", [*POLICIES, *SCORED])
@pytest.mark.parametrize("tier", ["0.05", "0.2", "0.6", "1"])
def test_every_policy_and_tier(
    policy: str, tier: str, tiny_model: Factory, conversation: Callable[..., Conversation]
) -> None:
    talk = conversation(tiny_model())
    talk.context(random_ids(500, 2), policy)
    talk.turn(random_ids(17, 3), tier, 3)


@pytest.mark.parametrize("policy", PROFILED)
@pytest.mark.parametrize("tier", ["0.05", "0.4", "1"])
def test_budgets_by_profile(
    policy: str,
    tier: str,
    tiny_model: Factory,
    conversation: Callable[..., Conversation],
    tmp_path: Path,
) -> None:
    model = tiny_model()
    drawn = make_profile(model.spec.num_layers, model.spec.num_kv_heads)
    profile = drawn.model_copy(update={"model_digest": model.spec.model_digest})
    save_profile(profile, tmp_path)
    talk = conversation(model, EvictionConfig(profiles_dir=str(tmp_path)))
    talk.context(random_ids(300, 2), f"{policy}:profile={profile.digest}")
    talk.turn(random_ids(17, 3), tier, 3)


QUESTIONS = (1, 2, 17)


@pytest.mark.parametrize(("family", "extra"), FAMILIES, ids=str)
def test_short_contexts(
    family: str,
    extra: dict[str, Any],
    tiny_model: Factory,
    conversation: Callable[..., Conversation],
) -> None:
    """Lengths from 1 to 70; layouts, policies, questions and tiers take turns."""
    models = [tiny_model(family, num_q_heads=q, num_kv_heads=kv, **extra) for q, kv in HEADS]
    for n in range(1, 71, 3 if family in ("gemma3_text", "phi3") else 1):
        talk = conversation(models[n % 4])
        talk.context(random_ids(n, n), POLICIES[n % 5])
        for turn in range(3):
            talk.turn(random_ids(QUESTIONS[(n + turn) % 3], n), ("0.2", "0.05", "0.6")[turn], 2)


@pytest.mark.parametrize(("family", "extra"), FAMILIES, ids=str)
def test_500_tokens_and_three_turns(
    family: str,
    extra: dict[str, Any],
    tiny_model: Factory,
    conversation: Callable[..., Conversation],
) -> None:
    talk = conversation(tiny_model(family, num_q_heads=6, num_kv_heads=2, **extra))
    talk.context(random_ids(500, 2), "replay+model+relative")
    for question, tier in zip(QUESTIONS, ("0.1", "0.4", "0.05"), strict=True):
        talk.turn(random_ids(question, question), tier, 3)


@pytest.mark.parametrize("policy", ["default", "window+adakv+twostage", "echo+model+relative"])
@pytest.mark.parametrize(("family", "extra"), FAMILIES, ids=str)
def test_families_under_the_usual_policies(
    family: str,
    extra: dict[str, Any],
    policy: str,
    tiny_model: Factory,
    conversation: Callable[..., Conversation],
) -> None:
    talk = conversation(tiny_model(family, **extra))
    talk.context(random_ids(200, 4), policy)
    for question, tier in ((17, "0.1"), (1, "0.3")):
        talk.turn(random_ids(question, question), tier, 3)


# Context, policy, tier, question: what is decoded together.
COMPANY: list[tuple[int, str, str | None, int]] = [
    (90, "default", "0.1", 17),
    (300, "window+adakv+twostage", "0.4", 1),
    (7, "replay+model+relative", "0.05", 2),
    (0, "", None, 33),
    (150, "default", "1", 40),
    (41, "window+uniform+plain", "0.2", 5),
]
TOGETHER = 16
"""Tokens of each turn, more than any is late."""


@pytest.mark.parametrize(("family", "extra"), FAMILIES, ids=str)
def test_sequences_of_unequal_length_decoded_together(
    family: str,
    extra: dict[str, Any],
    tiny_model: Factory,
    conversation: Callable[..., Conversation],
) -> None:
    """Each gets what it gets alone, and what the oracle says."""
    model = tiny_model(family, **extra)
    with LocalEngine(model) as engine:
        talks = [conversation(model, engine=engine) for _ in COMPANY]
        questions = [random_ids(question, 50 + i) for i, (*_, question) in enumerate(COMPANY)]
        tiers = [tier for _, _, tier, _ in COMPANY]
        for seed, (talk, (context, policy, _, _)) in enumerate(zip(talks, COMPANY, strict=True)):
            if context:
                talk.context(random_ids(context, seed), policy)
        todo = list(zip(talks, questions, tiers, strict=True))
        alone = [talk.generate(ids, tier, TOGETHER) for talk, ids, tier in todo]
        with in_company(engine, len(talks)), ThreadPoolExecutor(len(talks)) as pool:
            turns = list(pool.map(lambda one: one[0].generate(one[1], one[2], TOGETHER), todo))
        assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in alone]
        for talk, ids, turn in zip(talks, questions, turns, strict=True):
            talk.append(ids, turn)
            check_logprobs(turn, talk.oracle()[-TOGETHER:])


@contextmanager
def in_company(engine: LocalEngine, count: int) -> Iterator[None]:
    """Let no step begin before `count` requests are in; one step must serve them all."""
    all_in, submit, sampled = threading.Semaphore(0), engine.decode.submit, [0]

    def counting(*args: Any) -> Sequence:
        sequence = submit(*args)
        all_in.release()
        return sequence

    def waiting(_model: object, _args: object, kwargs: dict[str, Any]) -> None:
        if sampled == [0]:
            for _ in range(count):
                assert all_in.acquire(timeout=30)
            time.sleep(0.1)  # their chains are loaded by other threads
        sampled.append(kwargs["logits_to_keep"].numel())

    hook = engine.model.model.register_forward_pre_hook(waiting, with_kwargs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.decode, "submit", counting)
        try:
            yield
        finally:
            hook.remove()
    assert max(sampled) == count


def check_logprobs(turn: LocalTurn, theirs: Tensor) -> None:
    """Greedy tokens and their log probabilities, teacher-forced, are the oracle's."""
    assert theirs.std() >= 1
    ours = torch.tensor([one.logprob for delta in turn.deltas for one in delta.logprobs])
    rows = torch.arange(len(turn.token_ids))
    wanted = theirs.log_softmax(-1)[rows, list(turn.token_ids)]
    torch.testing.assert_close(ours, wanted, atol=TOLERANCE, rtol=0)
    top = theirs.topk(2)
    assert (top.values[:, 0] - top.values[:, 1] > 2 * (ours - wanted).abs().max()).all()
    assert top.indices[:, 0].tolist() == list(turn.token_ids)


def test_empty_heads(tiny_model: Factory, conversation: Callable[..., Conversation]) -> None:
    talk = conversation(tiny_model())
    talk.context(random_ids(20, 4), "replay+model+plain:sinks=0,recent=0")
    node = talk.leaf
    assert node is not None
    assert (talk.engine.manifest(node).lens[0] == 0).any(), "no head is empty"
    talk.turn(random_ids(5, 5), "0.05", 4)


def test_chain_of_ragged_nodes_read_at_different_tiers(
    tiny_model: Factory, conversation: Callable[..., Conversation]
) -> None:
    talk = conversation(tiny_model())
    talk.context(random_ids(100, 6), "replay+model+relative")
    talk.context(random_ids(60, 7), "window+adakv+twostage", tier="0.3")
    talk.turn(random_ids(3, 8), "0.1", 3)
    talk.turn(random_ids(3, 9), "0.8", 3)


def test_sliding_window_chain(
    tiny_model: Factory, conversation: Callable[..., Conversation]
) -> None:
    talk = conversation(tiny_model("mistral", sliding_window=16))
    talk.context(random_ids(50, 6), "replay+model+relative")
    talk.context(random_ids(7, 7), "replay+model+relative", tier="0.3")
    talk.turn(random_ids(3, 8), "0.1", 3)


def test_conversation_without_context(
    tiny_model: Factory, conversation: Callable[..., Conversation]
) -> None:
    talk = conversation(tiny_model())
    talk.turn(random_ids(9, 1), None, 3)
    talk.turn(random_ids(2, 2), None, 3)


def test_branches_do_not_see_each_other(
    tiny_model: Factory, conversation: Callable[..., Conversation]
) -> None:
    talk = conversation(tiny_model())
    talk.context(random_ids(80, 1), "replay+model+relative")
    state = (list(talk.tokens), list(talk.blocks), list(talk.views))
    talk.turn(random_ids(3, 2), "0.2", 3)
    talk.tokens, talk.blocks, talk.views = (list(part) for part in state)
    talk.turn(random_ids(4, 3), "0.2", 3)


# -- the same comparison must fail for each planted fault ---------------------------


def run_default(talk: Conversation) -> None:
    talk.context(random_ids(90, 1), "replay+model+relative")
    talk.turn(random_ids(5, 2), "0.4", 3)


def tamper(monkeypatch: pytest.MonkeyPatch, change: Callable[[RaggedLayer], RaggedLayer]) -> None:
    read = places.read_layers
    monkeypatch.setattr(places, "read_layers", lambda reader: map(change, read(reader)))


def test_fault_off_by_one_position(
    tiny_model: Factory,
    conversation: Callable[..., Conversation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Sequence.first_position.fget
    assert right is not None
    monkeypatch.setattr(Sequence, "first_position", property(lambda self: right(self) + 1))
    with pytest.raises(AssertionError):
        run_default(conversation(tiny_model()))


def test_fault_position_counts_kept_entries(
    tiny_model: Factory,
    conversation: Callable[..., Conversation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kept(self: Sequence) -> int:
        return self.chain.entries_per_head + self.forwarded

    monkeypatch.setattr(Sequence, "first_position", property(kept))
    with pytest.raises(AssertionError):
        run_default(conversation(tiny_model()))


def test_fault_swapped_entry(
    tiny_model: Factory,
    conversation: Callable[..., Conversation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swap(layer: RaggedLayer) -> RaggedLayer:
        keys = layer.keys.clone()
        keys[[0, 1]] = keys[[1, 0]]
        return replace(layer, keys=keys)

    tamper(monkeypatch, swap)
    with pytest.raises(AssertionError):
        run_default(conversation(tiny_model()))


def test_fault_permuted_heads(
    tiny_model: Factory,
    conversation: Callable[..., Conversation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def permute(layer: RaggedLayer) -> RaggedLayer:
        (k0, v0, p0), (k1, v1, p1) = layer.head(0), layer.head(1)
        cu = torch.tensor([0, len(p1), len(p0) + len(p1)], dtype=torch.int32)
        return RaggedLayer(torch.cat([k1, k0]), torch.cat([v1, v0]), torch.cat([p1, p0]), cu)

    tamper(monkeypatch, permute)
    with pytest.raises(AssertionError):
        run_default(conversation(tiny_model()))
