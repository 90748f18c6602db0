"""Preset `kvpress` against what kvpress 0.5.5 itself kept, entry by entry.

The golden files hold its decisions on a tiny model and on the real one. Entries that
rounding, or a rule for ties, decides are left out of the comparison, and counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_model import Golden, golden_config, golden_model, read_golden, weights_digest
from numpy.typing import NDArray
from tiny_models import byte_tokenizer

from criticalkv.services.local import LocalEngine
from criticalkv.services.local.engine import LocalNode
from criticalkv.services.local.side_by_side import SideBySide
from criticalkv.services.prefill.context_pass import ContextPass, LayerPass
from criticalkv.services.prefill.kvpress_replay import KvpressReplayPass, Replay
from criticalkv.services.prefill.own_scores import own_scores
from criticalkv.services.prefill.spooled_layer import SpooledLayer
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.chain import Chain
from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.eviction.plan import Place, Plan
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profile, save_profile
from criticalkv.shared.eviction.scores import LayerScores
from criticalkv.shared.model.attention import IMPLEMENTATION, forward
from criticalkv.shared.model.chat import ChatTemplate
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.model.spec import spec_of

Mask = NDArray[np.bool_]
GOLDEN = Path(__file__).resolve().parents[2] / "shared/eviction/golden"
TIERS = ("0.1", "0.5", "0.8")
RATIOS = [0.9, 0.75, 0.5, 0.2]
CASES = {
    "snapkv": "snapkv-kvpress",
    "snapkv-w32": "snapkv-kvpress:window=32",
    "snapkv-w8-k7": "snapkv-kvpress:window=8,kernel=7",
    "tova": "tova-kvpress",
    "streaming_llm": "streamingllm-kvpress",
    "knorm": "knorm-kvpress",
    "keydiff": "keydiff-kvpress",
    "expected": "expectedattention-kvpress",
    "expected-mean": "expectedattention-kvpress:covariance=false",
    "expected-novnorm": "expectedattention-kvpress:vnorm=false",
    "expected-eps": "expectedattention-kvpress:offset=0.01",
    "pyramidkv": "pyramidkv-kvpress",
    "pyramidkv-w8": "pyramidkv-kvpress:window=8",
    "adakv-snapkv": "adakv-kvpress",
    "adakv-snapkv-w8": "adakv-kvpress:window=8",
    "adakv-knorm": "knorm+adakv+plain:preset=kvpress",
    "adakv-expected": "expected+adakv+plain:preset=kvpress",
    "criticalkv-snapkv": "criticalkv-kvpress",
    "criticalkv-snapkv-w8": "criticalkv-kvpress:window=8",
    "criticalkv-expected": "expected+uniform+twostage:preset=kvpress,vnorm=false",
    "criticalkv-tova": "tova+uniform+twostage:preset=kvpress",
    "criticalkv-knorm": "knorm+uniform+twostage:preset=kvpress",
    "criticaladakv-snapkv": "criticaladakv-kvpress",
    "criticaladakv-snapkv-w8": "criticaladakv-kvpress:window=8",
    "criticaladakv-expected": "expected+adakv+twostage:preset=kvpress,vnorm=false",
    "duo": "duo-kvpress",
    "kvzip": "kvzip-kvpress",
    "kvzip-layerwise": "kvziplayerwise-kvpress",
    "kvzip-chunk": "kvzip-kvpress:chunk=96",
}


@dataclass
class Side:
    """A model, its golden file, and the layers of one forward over the file's tokens."""

    model: LoadedModel
    golden: Golden
    layers: list[LayerPass] = field(default_factory=list)
    plans: dict[str, Plan] = field(default_factory=dict)

    @classmethod
    def of(cls, model: LoadedModel, name: str) -> Side:
        side = cls(model, read_golden(GOLDEN / name))
        assert list(side.golden.manifest["cases"]) == list(CASES)
        assert side.golden.manifest["model"]["weights_sha256"] == weights_digest(model.model)
        tokens = torch.tensor(side.ids)
        plan = ContextPass(model, Chain(), side, lambda: None)
        none = torch.empty(0, dtype=torch.int64)
        forward(model.model, tokens, torch.arange(len(tokens)), plan, none)
        return side

    def take(self, layer: LayerPass) -> None:
        self.layers.append(layer)

    @property
    def ids(self) -> list[int]:
        return list(self.golden.manifest["token_ids"])

    def facts(self, case: str) -> dict[str, Any]:
        return dict(self.golden.manifest["cases"][case])

    def policy(self, case: str) -> Policy:
        options = ""
        if case == "duo":
            facts = self.facts(case)
            options = f":profile={self.profile.digest},sinks={facts['sink_size']}"
            options += f",recent={facts['recent_size']}"
        return Policy.parse(CASES[case] + options)

    @property
    def profile(self) -> Profile:
        scores = self.facts("duo")["head_scores"]
        digest = self.model.spec.model_digest
        return Profile(model_digest=digest, method="test", importance=scores)

    def plan(self, case: str) -> Plan:
        if case not in self.plans:
            policy = self.policy(case)
            place = Place.whole(len(self.layers), self.profile)
            self.plans[case] = Plan(self.scores(case, policy), policy, place)
        return self.plans[case]

    def scores(self, case: str, policy: Policy) -> list[LayerScores]:
        if policy.scorer != "replay":
            return [own_scores(self.model, policy, layer, 0)[0] for layer in self.layers]
        spooled = [SpooledLayer(layer, None) for layer in self.layers]
        replay = KvpressReplayPass(self.model, policy, Chain(), spooled, lambda: None)
        replay.run_replays(self.replays(case, policy.chunk))
        return [layer.scores for layer in spooled if layer.scores is not None]

    def replays(self, case: str, chunk: int) -> list[Replay]:
        facts, n = self.facts(case), len(self.ids)
        begins = range(facts["prefix_length"], n, chunk)
        return [
            Replay(begin, min(n, begin + chunk), tuple(ids))
            for begin, ids in zip(begins, facts["replay_ids"], strict=True)
        ]

    def selected(self, policy: Policy, tier: str) -> Mask:
        plan = Plan(self.scores("", policy), policy, Place.whole(len(self.layers)))
        mask: Mask = plan.select(tier).numpy()
        return mask

    def kept(self, case: str, ratio: float) -> Mask:
        mask: Mask = self.plan(case).select(tier_of(ratio)).numpy()
        return mask


def tier_of(ratio: float) -> str:
    return str(1 - Decimal(str(ratio)))


class LetterChat(ChatTemplate):
    """Tokens that the tiny model has."""

    def encode_content(self, text: str) -> list[int]:
        return [token % 97 for token in super().encode_content(text)]

    def encode_template(self, text: str) -> list[int]:
        return [token % 97 for token in super().encode_template(text)]


@pytest.fixture(scope="module")
def tiny() -> Side:
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer()
    model = golden_model()
    model.set_attn_implementation(IMPLEMENTATION)
    spec = spec_of(
        golden_config(),
        name="golden",
        path="",
        model_digest="0" * 64,
        tokenizer_digest="0" * 64,
        dtype="float32",
        device="cpu",
    )
    return Side.of(LoadedModel(spec, model, tokenizer, LetterChat(tokenizer)), "kvpress-tiny.npz")


@pytest.fixture(scope="module")
def real(demo_model: LoadedModel) -> Side:
    return Side.of(demo_model, "kvpress-smollm2-135m.npz")


@pytest.fixture
def side(request: pytest.FixtureRequest) -> Side:
    found: Side = request.getfixturevalue(request.param)
    return found


def both(test: Any) -> Any:
    return pytest.mark.parametrize("side", ["tiny", "real"], indirect=True)(test)


def window_of(facts: dict[str, Any]) -> int:
    inner = facts if isinstance(facts["press"], str) else facts["press"]
    return int(inner.get("window_size", 0))


def places(mask: Mask) -> list[tuple[int, ...]]:
    """(layer, KV head, entry) of each."""
    return [tuple(map(int, place)) for place in np.argwhere(mask)]


ROUNDING = 16
"""Most entries, of a case at a ratio, whose scores differ by less than fp32 can tell."""
UNDERFLOWN = 256
"""The same where the tiny model's expected attention is 0 for many, and they tie."""


@both
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("case", CASES)
def test_what_kvpress_keeps(side: Side, case: str, ratio: float) -> None:
    theirs, contested = side.golden.case(case, ratio)
    ours = side.kept(case, ratio)
    assert ours.sum() == theirs.sum()
    wrong = places((ours ^ theirs) & ~contested)
    assert not wrong, f"{len(wrong)} entries differ: {wrong}"
    n, window = ours.shape[-1], window_of(side.facts(case))
    tied = places((ours ^ theirs) & contested)
    if int(n * (1 - ratio)) < window:
        # All entries of a window have one score: any may be kept, but nothing before it.
        assert not [place for place in tied if place[2] < n - window], tied
        return
    sparse = side.golden.manifest["model"]["layers"] == 3 and "expected" in case
    assert len(tied) <= (UNDERFLOWN if sparse else ROUNDING), f"{len(tied)} differ: {tied}"


@both
def test_the_comparison_leaves_little_out(side: Side) -> None:
    """Else it would show nothing: who keeps something else is seen in most cases."""
    share = []
    for case, ratio in ((case, ratio) for case in CASES for ratio in RATIOS):
        kept, contested = side.golden.case(case, ratio)
        share.append(contested.sum() / kept.size)
        if "w8" in case or case in ("tova", "streaming_llm", "expected-mean", "duo"):
            assert share[-1] < 0.01, (case, ratio)
    assert np.median(share) < 0.01


def test_a_head_keeps_as_many_of_its_tied_window(real: Side) -> None:
    for ratio in (0.9, 0.75):
        theirs, _ = real.golden.case("snapkv", ratio)
        assert (real.kept("snapkv", ratio).sum(-1) == theirs.sum(-1)).all()


@pytest.mark.parametrize("case", ["kvzip", "kvzip-layerwise", "kvzip-chunk"])
def test_the_chat_template_gives_the_same_replays(real: Side, case: str) -> None:
    policy = real.policy(case)
    replay = KvpressReplayPass(real.model, policy, Chain(), [], lambda: None)
    assert list(replay.replays(real.ids)) == real.replays(case, policy.chunk)


@pytest.mark.parametrize("tier", ["0.25", "0.5"])
def test_only_the_papers_kvzip_knows_a_prefix(real: Side, tier: str) -> None:
    """The template's tokens: kvpress drops all but the sinks before anything else."""
    start, n = real.facts("kvzip")["prefix_length"], len(real.ids)
    theirs = real.plan("kvzip").select(tier).numpy()
    assert theirs[..., :4].all()
    assert not theirs[..., 4:start].any()
    paper = Policy.parse("kvzip")
    ours = mask_of(SideBySide(real.model, real.ids).compress(paper, (tier,)).cache, n)
    assert ours[..., [0, 1, 2, 3, *range(n - 8, n)]].all()
    assert ours[..., 4:start].mean() > 0.5 * float(tier)


def mask_of(cache: RaggedCache, n: int) -> Mask:
    """The positions of a root node's entries, bool [layers, num_kv_heads, n]."""
    mask = np.zeros((len(cache.layers), cache.layers[0].cu_seqlens.numel() - 1, n), dtype=bool)
    for row, layer in zip(mask, cache.layers, strict=True):
        for h, (a, b) in enumerate(itertools.pairwise(layer.cu_seqlens.tolist())):
            row[h, layer.positions[a:b].numpy()] = True
    return mask


def stored(engine: LocalEngine, node: LocalNode) -> list[tuple[str, RaggedCache]]:
    """Every tier of a node, read back."""
    found = []
    for tier in engine.manifest(node).tiers:
        with engine.store.open_get(node.node_id, tier=tier) as reader:
            found.append((tier, assemble(reader.manifest, reader.tier, reader)))
    return found


@pytest.fixture
def engine(tiny: Side, tmp_path: Path) -> Iterator[LocalEngine]:
    save_profile(tiny.profile, tmp_path)
    config = EvictionConfig(tiers=TIERS, profiles_dir=str(tmp_path))
    with LocalEngine(tiny.model, eviction=config) as made:
        yield made


@pytest.mark.parametrize("case", CASES)
def test_nodes_hold_what_was_selected(engine: LocalEngine, tiny: Side, case: str) -> None:
    """Through ranking, store and back; and beside other policies in one process."""
    policy, n = tiny.policy(case), len(tiny.ids)
    node = engine.compress_tokens(tiny.ids, policy=policy.canonical(), store_tier=TIERS[-1])
    aside = SideBySide(tiny.model, tiny.ids).compress(policy, TIERS, tiny.profile).cache
    found = stored(engine, node)
    assert [tier for tier, _ in found] == list(aside.tiers)
    for tier, cache in found:
        mask = mask_of(cache, n)
        assert (mask == mask_of(aside.at_tier(tier), n)).all()
        if policy.scorer != "replay":
            assert (mask == tiny.plan(case).select(tier).numpy()).all()


def test_tiers_that_are_not_nested_become_one(
    engine: LocalEngine, tiny: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """PyramidKV's last layers shrink while the budget grows; its first ones are nested."""
    policy = Policy.parse("pyramidkv-kvpress:window=2")
    low, high = (tiny.selected(policy, tier) for tier in ("0.1", "0.3"))
    missing = (low & ~high).any((1, 2))
    assert missing[-1]
    assert not missing[0]
    node = engine.compress_tokens(tiny.ids, policy=policy.canonical(), store_tier="0.3")
    (tier, cache), *others = stored(engine, node)
    assert tier == "0.3"
    assert not others
    assert "not nested" in caplog.text
    assert (mask_of(cache, len(tiny.ids)) == high).all()


@pytest.mark.parametrize("case", CASES)
def test_any_length_and_after_a_parent(engine: LocalEngine, tiny: Side, case: str) -> None:
    """Also where kvpress itself fails: contexts no longer than its window or its sinks."""
    policy = tiny.policy(case).canonical()
    parent = engine.compress_tokens(tiny.ids[:70], policy=policy, store_tier="0.5")
    for n in (1, 2, 5, 9, 65):
        for before in (None, parent):
            ids = tiny.ids[70 : 70 + n]
            node = engine.compress_tokens(ids, policy=policy, store_tier="1", parent=before)
            assert node.prefill is not None
            assert node.prefill.tiers[-1] == "1"
            assert node.prefill.tier_entries[-1] == node.prefill.full_entries == 3 * 2 * n
