"""Stepwise eviction, in prefill and while generating, against the untouched model.

The oracle runs transformers' own attention under a mask that shows each token exactly what
had been kept when it ran, and chooses what is kept in plain loops over that attention.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from naive_chain import Kept, NaiveChain
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from criticalkv.services.decode import engine as engine_module
from criticalkv.services.decode.batch import BatchPlan, Member
from criticalkv.services.decode.pages import Pages
from criticalkv.services.decode.resident import Residents
from criticalkv.services.decode.stepwise_kv import StepwiseKV
from criticalkv.services.decode.turn_kv import TurnKV
from criticalkv.services.local import LocalEngine, LocalNode, LocalTurn
from criticalkv.services.local.engine import SALT
from criticalkv.services.local.memory_store import MemoryStore
from criticalkv.shared import stepwise_pass
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.chain import Chain
from criticalkv.shared.errors import CancelledError, NodeMissingError, NumericsError, PolicyError
from criticalkv.shared.eviction import stepwise as stepwise_module
from criticalkv.shared.eviction.policy import STEPWISE, Policy, parse_turn_policy
from criticalkv.shared.eviction.recent_queries import SLACK
from criticalkv.shared.eviction.scorers import SCORERS
from criticalkv.shared.eviction.stepwise import StepwiseLayer
from criticalkv.shared.model.attention import LayerCall
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import (
    DecodeDelta,
    DecodeEnd,
    DecodeRequest,
    PrefillRequest,
    Sampling,
)

TOLERANCE = 1e-3
Factory = Callable[..., LoadedModel]

LENGTHS = range(1, 71)
FAMILIES: list[tuple[str, dict[str, Any], range]] = [
    ("llama", {}, LENGTHS),
    ("qwen3", {}, LENGTHS[::3]),
    ("mistral", {"sliding_window": 12}, LENGTHS[1::3]),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        LENGTHS[2::3],
    ),
]
POLICIES = [
    "window+uniform+plain:window=4,kernel=3,interval=7,keep=0.4",
    "window+adakv+plain:window=3,kernel=5,interval=16,target=9",
    "window+adakv+twostage:window=5,interval=7,target=12",
    "window+uniform+twostage:window=8,interval=16,keep=0.5",
    "window+uniform+plain:window=10,interval=7,target=4",
    "window+adakv+critical:window=2,pooling=avg,interval=7,keep=0.3",
    "window+adakv+plain:window=9,kernel=3,interval=4,keep=0.6,safeguard=0",
]


def random_ids(n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), generator=generator).tolist()


def read(engine: LocalEngine, node: LocalNode, tier: str | None = None) -> RaggedCache:
    with engine.store.open_get(node.node_id, tier=tier) as reader:
        return assemble(reader.manifest, reader.tier, reader)


def positions_of(cache: RaggedCache) -> Kept:
    heads = range(cache.tier_lens.shape[2])
    return [[sorted(layer.head(h)[2].tolist()) for h in heads] for layer in cache.layers]


class Talk:
    """The same conversation with our engines and with the oracle. A context manager."""

    def __init__(self, model: LoadedModel) -> None:
        self.engine = LocalEngine(model)
        self.naive = NaiveChain(model)
        self.leaf: LocalNode | None = None
        self._tier = "1"
        self._patch = pytest.MonkeyPatch()
        self._logits: list[tuple[int, Tensor]] = []
        self._steps: list[tuple[int, Kept]] = []
        forward, evict = engine_module.forward, StepwiseLayer.evict

        def recording(model: Any, tokens: Tensor, positions: Tensor, *more: Any) -> Tensor:
            out = forward(model, tokens, positions, *more)
            if out.shape[0]:  # a piece in the middle of the prompt asks for none
                self._logits.append((int(positions[-1]), out[0].clone()))
            return out

        def noting(layer: StepwiseLayer) -> None:
            evict(layer)
            own = layer.survivors()
            heads = [own.head(h)[2].tolist() for h in range(model.spec.num_kv_heads)]
            if not self._steps or self._steps[-1][0] != layer.tokens:
                self._steps.append((layer.tokens, []))
            self._steps[-1][1].append(heads)

        self._patch.setattr(engine_module, "forward", recording)
        self._patch.setattr(StepwiseLayer, "evict", noting)

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        self.engine.close()

    def parent(self, ids: list[int], policy: str, tier: str) -> None:
        """Begin with a context that is compressed once and read at a tier."""
        self.leaf = self.engine.compress_tokens(ids, policy=policy)
        self._tier = tier
        before = self.naive.ancestors
        self.naive.one_piece(ids)
        self.first_parent = positions_of(read(self.engine, self.leaf, tier))
        self.naive.replace_last(before, self.first_parent)

    def context(self, ids: list[int], policy: str) -> None:
        """Prefill a stepwise node; every step must leave what the oracle chooses."""
        self._steps.clear()
        self.leaf = self.engine.compress_tokens(
            ids, policy=policy, parent=self.leaf, tier=self._tier
        )
        left = self.naive.stepwise(ids, Policy.parse(policy))
        assert self._steps == self.naive.steps
        assert positions_of(read(self.engine, self.leaf)) == left

    def turn(self, ids: list[int], policy: str, new_tokens: int) -> LocalTurn:
        """Generate under a stepwise policy; compare logits and what every step leaves."""
        self._logits.clear()
        self._steps.clear()
        pending = self.engine.manifest(self.leaf).pending_ids if self.leaf else ()
        turn = self.engine.generate(
            self.leaf,
            [*pending, *ids],
            tier=self._tier,
            max_tokens=new_tokens,
            ignore_eos=True,
            policy=policy,
        )
        published = [*pending, *ids, *turn.token_ids[:-1]]
        left = self.naive.stepwise(published, Policy.parse(policy))
        interval = Policy.parse(policy).interval
        assert self._steps == [s for s in self.naive.steps if s[0] % interval == 0]
        assert positions_of(read(self.engine, turn)) == left
        self._compare_logits(turn)
        self.leaf = turn
        return turn

    def _compare_logits(self, turn: LocalTurn) -> None:
        theirs = self.naive.run().logits
        assert theirs.std() >= 1
        for position, ours in self._logits:
            torch.testing.assert_close(ours, theirs[position], atol=TOLERANCE, rtol=0)
        best = [int(theirs[p].argmax()) for p, _ in self._logits[-len(turn.token_ids) :]]
        assert best == list(turn.token_ids)


@pytest.fixture
def local(tiny_model: Factory) -> Iterator[LocalEngine]:
    with LocalEngine(tiny_model()) as engine:
        yield engine


@pytest.mark.parametrize(
    ("family", "extra", "lengths"), FAMILIES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_every_token_sees_what_was_kept_when_it_ran(
    family: str, extra: dict[str, Any], lengths: range, tiny_model: Factory
) -> None:
    """Contexts of 1 to 70 tokens, then two turns; every second after a compressed parent."""
    heads = [(4, 2), (6, 2), (4, 1), (4, 4)]
    models = [tiny_model(family, num_q_heads=q, num_kv_heads=kv, **extra) for q, kv in heads]
    for n in lengths:
        with Talk(models[n % 4]) as talk:
            if n // 3 % 2:
                talk.parent(random_ids(40, n), "window+adakv+plain:window=4", "0.3")
            talk.context(random_ids(n, n), POLICIES[n % 7])
            talk.turn(random_ids((1, 5, 19)[n % 3], n + 1), POLICIES[(n + 1) % 7], 3)
            talk.turn(random_ids((2, 9)[n % 2], n + 2), POLICIES[(n + 2) % 7], 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_turn_shrinks_again_and_again(policy: str, tiny_model: Factory) -> None:
    with Talk(tiny_model()) as talk:
        talk.parent(random_ids(50, 1), "window+uniform+plain:window=4", "0.4")
        turn = talk.turn(random_ids(11, 2), policy, 45)
        manifest = talk.engine.manifest(turn)
        assert manifest.tiers == ("1",)
        assert not manifest.nested
        assert manifest.identity.policy == Policy.parse(policy).canonical()
        assert sum(manifest.tier_entries()) < manifest.full_entries
        assert manifest.full_entries == 55 * 3 * 2
        later = talk.turn(random_ids(3, 3), policy, 5)
        assert later.start is not None
        parent_entries = sum(len(head) for layer in talk.first_parent for head in layer)
        held = parent_entries + manifest.tier_entries()[0]
        assert later.start.retained_fraction == pytest.approx(held / ((50 + 55) * 3 * 2))


# ---------------------------------------------------- one node, whatever computed it


def difference(one: RaggedCache, two: RaggedCache) -> float:
    """Largest difference of the KV of two caches with the same entries."""
    assert positions_of(one) == positions_of(two)
    return max(
        float((getattr(a, name) - getattr(b, name)).abs().max())
        for a, b in zip(one.layers, two.layers, strict=True)
        for name in ("keys", "values")
        if getattr(a, name).numel()
    )


def rebuilt(engine: LocalEngine, node: LocalNode) -> RaggedCache:
    """Lose a node and prefill it again from what its manifest and record say."""
    manifest = engine.manifest(node)
    assert isinstance(engine.store, MemoryStore)
    ids = engine.record  # type: ignore[attr-defined]
    engine.store.delete(node.node_id)
    result = engine.prefill.run(
        PrefillRequest(
            node_id=manifest.node_id,
            token_ids=ids,
            policy=manifest.identity.policy,
            store_tier="1",
            salt=SALT,
            ancestors=manifest.ancestors,
            view=manifest.identity.view,
            pending_ids=manifest.pending_ids,
        )
    )
    again = engine.manifest(node)
    assert (again.tiers, again.nested, again.pending_ids) == (("1",), False, manifest.pending_ids)
    assert again.tier_entries() == manifest.tier_entries() == list(result.tier_entries)
    return read(engine, node)


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `rebuilt` know the token ids of the last node that was published."""
    from criticalkv.services.local.memory_store import MemoryWriter

    commit = MemoryWriter.commit

    def noting(self: Any, manifest: Any, record: Any, **more: Any) -> Any:
        LocalEngine.record = record.token_ids  # type: ignore[attr-defined]
        return commit(self, manifest, record, **more)

    monkeypatch.setattr(MemoryWriter, "commit", noting)


@pytest.mark.usefixtures("remembering")
@pytest.mark.parametrize("new_tokens", [1, 9, 30])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_generated_node_is_the_prefilled_one(
    policy: str, new_tokens: int, local: LocalEngine
) -> None:
    context = local.compress_tokens(random_ids(40, 1), policy=POLICIES[0])
    turn = local.generate(
        context, random_ids(12, 2), policy=policy, max_tokens=new_tokens, ignore_eos=True
    )
    generated = read(local, turn)
    assert difference(generated, rebuilt(local, turn)) < 1e-4


@pytest.mark.usefixtures("remembering")
@pytest.mark.parametrize(
    ("policy", "kept", "anew"),
    [
        (POLICIES[2], 3, True),
        (POLICIES[2], 9, True),
        (POLICIES[2], 20, True),
        (POLICIES[1], 12, False),
        (POLICIES[1], 14, False),
    ],
)
def test_a_stop_string_leaves_what_the_tokens_before_it_leave(
    policy: str, kept: int, anew: bool, local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed anew if an eviction has seen the tokens that are cut off."""
    runs: list[int] = []
    run = stepwise_pass.StepwisePass.run
    monkeypatch.setattr(
        stepwise_pass.StepwisePass,
        "run",
        lambda self, ids: (runs.append(len(ids)), run(self, ids))[1],
    )
    text = "abcdefghijklmnopqrstuvwxyz"[:kept] + "#" * 12
    script = iter(local.model.chat.encode_content(text))
    forward = engine_module.forward

    def forced(*args: Any) -> Tensor:
        out = forward(*args)
        prompt_is_not_done = int(args[2][-1]) < 4
        token = 0 if prompt_is_not_done else next(script)
        return torch.nn.functional.one_hot(torch.tensor([token]), out.shape[1]).float()

    monkeypatch.setattr(engine_module, "forward", forced)
    turn = local.generate(None, [1, 2, 3, 4, 5], policy=policy, max_tokens=60, stop=("#" * 12,))
    assert turn.text == text[:kept]
    assert local.manifest(turn).num_tokens == 5 + kept
    assert runs == [5 + kept] * anew
    stored = read(local, turn)
    assert difference(stored, rebuilt(local, turn)) < 1e-4


@pytest.mark.usefixtures("remembering")
def test_a_cancelled_turn_is_the_node_of_its_tokens(local: LocalEngine) -> None:
    events: queue.Queue[Any] = queue.Queue()
    request = DecodeRequest(
        request_id="r",
        token_ids=tuple(random_ids(20, 1)),
        salt=SALT,
        policy=Policy.parse(POLICIES[1]).canonical(),
        sampling=Sampling(max_tokens=1500, ignore_eos=True),
    )
    sequence = local.decode.submit(request, events.put)
    while not isinstance(events.get(timeout=10), DecodeDelta):
        pass
    sequence.cancelled.set()
    end = next(e for e in iter(lambda: events.get(timeout=10), None) if isinstance(e, DecodeEnd))
    assert end.finish_reason == "cancelled"
    assert end.node_id is not None
    node = LocalNode(end.node_id, (), False)
    stored = read(local, node)
    assert difference(stored, rebuilt(local, node)) < 1e-4


def test_a_cancelled_prefill_stops_in_the_middle_and_publishes_nothing(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled, calls = threading.Event(), []
    attend = stepwise_pass.StepwisePass.attend

    def cancelling(self: Any, call: LayerCall) -> Tensor:
        calls.append(call.layer)
        if len(calls) == 5:
            cancelled.set()
        return attend(self, call)

    monkeypatch.setattr(stepwise_pass.StepwisePass, "attend", cancelling)
    run = local.prefill.run
    monkeypatch.setattr(local.prefill, "run", lambda request: run(request, cancelled))
    with pytest.raises(CancelledError):
        local.compress_tokens(random_ids(60, 1), policy=POLICIES[0])
    assert calls == [0, 1, 2, 0, 1]
    assert not local.store._nodes  # type: ignore[attr-defined]


# ------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("tier", ["0.2", "0.6"])
@pytest.mark.parametrize("name", ["window+uniform+plain", "window+adakv+twostage"])
def test_one_long_piece_is_the_ordinary_policy(name: str, tier: str, local: LocalEngine) -> None:
    ids = random_ids(60, 1)
    ordinary = local.compress_tokens(ids, policy=f"{name}:window=4")
    stepwise = local.compress_tokens(ids, policy=f"{name}:window=4,interval=61,keep={tier}")
    assert positions_of(read(local, ordinary, tier)) == positions_of(read(local, stepwise))


@pytest.mark.parametrize("interval", [7, 16, 100])
def test_a_target_that_is_never_reached_evicts_nothing(interval: int, local: LocalEngine) -> None:
    policy = f"window+adakv+plain:window=4,interval={interval},target=60"
    dense = local.generate(None, random_ids(20, 1), max_tokens=40, ignore_eos=True)
    turn = local.generate(None, random_ids(20, 1), max_tokens=40, ignore_eos=True, policy=policy)
    assert turn.token_ids == dense.token_ids
    assert difference(read(local, turn), read(local, dense)) < 1e-4
    assert turn.node_id != dense.node_id


def test_an_interval_beyond_the_turn_changes_no_token(local: LocalEngine) -> None:
    policy = "window+uniform+plain:window=4,interval=100,target=8"
    dense = local.generate(None, random_ids(20, 1), max_tokens=40, ignore_eos=True)
    turn = local.generate(None, random_ids(20, 1), max_tokens=40, ignore_eos=True, policy=policy)
    assert turn.token_ids == dense.token_ids
    assert local.manifest(turn).lens.tolist() == [[[8, 8]] * 3]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_evicted_never_comes_back(
    policy: str, local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: dict[tuple[int, int], set[int]] = {}
    evict = StepwiseLayer.evict

    def noting(layer: StepwiseLayer) -> None:
        evict(layer)
        for head in range(2):
            kept = set(layer.survivors().head(head)[2].tolist())
            lost = gone.setdefault((id(layer), head), set())
            assert not kept & lost
            lost |= set(range(layer.tokens)) - kept
            if layer._policy.allocator == "uniform":
                budget = layer._policy.target or int(layer._policy.keep * layer.tokens)
                wanted = max(budget, min(layer._policy.window, layer.tokens), 1)
                assert len(kept) == min(layer.tokens, wanted)

    monkeypatch.setattr(StepwiseLayer, "evict", noting)
    local.compress_tokens(random_ids(90, 3), policy=policy)
    assert gone


@pytest.mark.usefixtures("remembering")
@pytest.mark.parametrize("scorer", [name for name in STEPWISE if name in SCORERS])
def test_every_stepwise_scorer_gives_one_node(scorer: str, local: LocalEngine) -> None:
    """Generated or prefilled; each head within its budget, the rules of the scorer kept."""
    options = "interval=9,target=12" + {"window": ",window=4", "h2o": ",window=4,span=16"}.get(
        scorer, ""
    )
    policy = f"{scorer}+adakv+plain:{options}"
    turn = local.generate(None, random_ids(30, 4), policy=policy, max_tokens=25, ignore_eos=True)
    generated = read(local, turn)
    assert [sum(layer) for layer in local.manifest(turn).lens[0].tolist()] == [24] * 3
    assert difference(generated, rebuilt(local, turn)) < 1e-4


# ------------------------------------------------------------------------- memory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that are made inside; views count once."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, list[int]] = {}
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return out

    def _note(self, tensor: Tensor) -> None:
        known = self._seen.get(id(tensor))
        if known is not None and known() is tensor:
            return
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        entry = self._live.setdefault(key, [0, size])
        if entry[0] == 0:
            self.now += size
            self.peak = max(self.peak, self.now)
        entry[0] += 1
        self._seen[id(tensor)] = weakref.ref(tensor)
        weakref.finalize(tensor, self._forget, key)

    def _forget(self, key: int) -> None:
        entry = self._live[key]
        entry[0] -= 1
        if entry[0] == 0:
            self.now -= entry[1]
            del self._live[key]


def peak_of(model: LoadedModel, policy: str, n: int) -> int:
    parsed = Policy.parse(policy)
    with LiveBytes() as live:
        cache = stepwise_pass.StepwisePass(model, parsed, Chain()).run(random_ids(n, 1))
    del cache
    return live.peak


def test_memory_is_what_is_kept_and_one_piece(tiny_model: Factory) -> None:
    model = tiny_model(num_layers=6)
    policy = "window+uniform+plain:window=8,interval=64,target=64"
    short, long = (peak_of(model, policy, n) for n in (256, 1536))
    assert long <= 1.02 * short
    entry = 2 * model.spec.head_dim * 4 + 4
    full = 1536 * model.spec.num_layers * model.spec.num_kv_heads * entry
    assert long < full / 3
    # And with one piece of everything the same measure sees the whole context.
    whole = peak_of(model, "window+uniform+plain:window=8,interval=1536,target=64", 1536)
    assert whole > 4 * long


def test_a_decoding_turn_holds_its_budget_and_one_piece(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    attend = StepwiseLayer.attend

    def noting(layer: StepwiseLayer, call: LayerCall) -> Tensor:
        out = attend(layer, call)
        held.append(layer.nbytes)
        return out

    monkeypatch.setattr(StepwiseLayer, "attend", noting)
    policy = "window+uniform+plain:window=4,interval=16,target=8"
    local.generate(None, random_ids(40, 1), policy=policy, max_tokens=200, ignore_eos=True)
    spec = local.model.spec
    entries = (8 + 16) * spec.num_kv_heads * (2 * spec.head_dim * 4 + 4)
    queries = (4 + 2 * SLACK) * spec.num_q_heads * spec.head_dim * 4
    assert max(held) <= entries + queries


# --------------------------------------------------------------- beside other turns


def same_where_it_is_clear(one: LocalTurn, other: LocalTurn) -> bool:
    """Compare up to the first token whose choice rounding may have changed: that is the end.

    Returns whether there was none.
    """
    chosen = [item for delta in one.deltas for item in delta.logprobs]
    assert len(chosen) == len(one.token_ids) == len(other.token_ids)
    for ours, theirs, item in zip(one.token_ids, other.token_ids, chosen, strict=True):
        if ours != theirs:
            first, second = sorted((p for _, p in item.top), reverse=True)[:2]
            assert first - second <= TOLERANCE
            return False
    return True


def test_a_turn_is_the_same_whatever_runs_beside_it(local: LocalEngine) -> None:
    context = local.compress_tokens(random_ids(50, 1), policy=POLICIES[3])
    policies = ["dense", POLICIES[1], "dense", POLICIES[6]]

    def run(n: int) -> LocalTurn:
        return local.generate(
            context,
            random_ids(9 + n, n),
            policy=policies[n],
            max_tokens=40,
            ignore_eos=True,
            logprobs=2,
        )

    alone = [run(n) for n in range(4)]
    kept = [read(local, turn) for turn in alone]
    local.decode.drop_unused()
    for turn in alone:
        local.store.delete(turn.node_id)  # type: ignore[attr-defined]
    together: list[LocalTurn | None] = [None] * 4
    threads = [
        threading.Thread(target=lambda n=n: together.__setitem__(n, run(n))) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other, cache in zip(alone, together, kept, strict=True):
        assert other is not None
        if same_where_it_is_clear(one, other):
            assert difference(read(local, other), cache) < 1e-4


def test_an_eviction_changes_no_bit_of_a_neighbour(tiny_model: Factory) -> None:
    """The same calls in one batch, the neighbour dense or shrinking: the same outputs."""
    model = tiny_model()
    pages = Pages(model.spec, model.device, 1 << 20, 16)
    heads = (model.spec.num_layers, model.spec.num_kv_heads)
    torch.manual_seed(0)
    calls = [torch.randn(8, 2, 16) for _ in range(30)]

    def turn() -> TurnKV:
        kv = TurnKV(Residents(pages, 0), pages, (), 0, heads)
        room = pages.take(kv.missing_pages(len(calls)))
        assert room is not None
        kv.grow(room)
        return kv

    def outputs(neighbour: str) -> list[Tensor]:
        policy = parse_turn_policy(neighbour)
        kvs = [turn(), turn() if policy is None else StepwiseKV(model, policy, Chain())]
        outs = []
        for at, rows in enumerate(calls):
            call = LayerCall(0, rows[:4], rows[4:6], rows[6:], 0.25, None)
            members = [Member(kv, (1,), at, lambda: None) for kv in kvs]
            outs.append(BatchPlan(pages, members, model.device).attend(call)[:, :1])
            layer = getattr(kvs[1], "_node", None)
            if layer is not None and layer._layers[0].tokens % 7 == 0:
                layer.evict(0)
        return outs

    dense, beside = outputs("dense"), outputs(POLICIES[4])
    assert all(torch.equal(a, b) for a, b in zip(dense, beside, strict=True))


def test_scores_that_are_not_finite_end_their_own_turn_only(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise NumericsError("planted")

    events: queue.Queue[Any] = queue.Queue()
    long = Sampling(max_tokens=60, ignore_eos=True)
    base: dict[str, Any] = {"token_ids": tuple(random_ids(9, 1)), "salt": SALT, "sampling": long}
    monkeypatch.setitem(stepwise_module.SCORERS, "window", broken)
    local.decode.submit(DecodeRequest(request_id="dense", **base), events.put)
    failing = DecodeRequest(request_id="r", policy=Policy.parse(POLICIES[0]).canonical(), **base)
    with pytest.raises(NumericsError):
        list(local.decode.generate(failing))
    end = next(e for e in iter(lambda: events.get(timeout=20), None) if isinstance(e, DecodeEnd))
    assert end.finish_reason == "length"
    local.decode.check_health()


def test_a_turns_policy_must_be_stepwise(local: LocalEngine) -> None:
    for policy in ("snapkv", "kvzip"):
        with pytest.raises(PolicyError, match="stepwise"):
            local.generate(None, [1, 2], policy=policy, max_tokens=1)
    with pytest.raises(NodeMissingError):
        local.generate(LocalNode("ab" * 32, (), False), [1], policy=POLICIES[0], max_tokens=1)
