"""Where kvpress 0.5.5 errs: its preset does the same, the paper's preset does not.

That the preset keeps what the library keeps: `tests/services/prefill/test_kvpress.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from policies import make_policy
from torch import Tensor

from criticalkv.shared.errors import NumericsError, PolicyError
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.kvpress.scorers import replayed
from criticalkv.shared.eviction.parameters import ALIASES
from criticalkv.shared.eviction.plan import Place, Plan
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profile
from criticalkv.shared.eviction.scorers.lookup import scorer_of
from criticalkv.shared.eviction.scores import LayerScores

torch.set_num_threads(1)

DIGEST = "0" * 64
UNSEEN = -40.0


def layer_of(
    attention: Sequence[float], window: int = 0, norms: Sequence[float] | None = None
) -> ContextLayer:
    """One head whose window's queries attend to what is before it as told, up to a factor.

    ‖v·W_O‖₁ is `norms`, or 1.
    """
    n = len(attention) + window
    logits = torch.tensor([math.log(a) for a in attention] + [UNSEEN] * window)
    values = torch.zeros(1, n, n)
    values[0, :, 0] = torch.tensor(norms or [1.0] * n)
    return ContextLayer(
        queries=logits.expand(1, max(1, window), n),
        out=torch.zeros(1, max(1, window), n),
        keys=torch.eye(n)[None],
        values=values,
        w_o=torch.eye(n),
        scaling=1.0,
    )


def key_layer(keys: Tensor, norms: Sequence[float]) -> ContextLayer:
    """One head with keys [n, D], whose ‖v·W_O‖₁ is `norms`."""
    values = torch.zeros(1, *keys.shape)
    values[0, :, 0] = torch.tensor(norms)
    queries = torch.zeros(1, 1, keys.shape[1])
    return ContextLayer(queries, queries, keys[None], values, torch.eye(keys.shape[1]), 1.0)


def kept(text: str, layer: ContextLayer, tier: str) -> list[int]:
    """The entries of a layer's first head that a policy keeps."""
    policy = Policy.parse(text)
    scores = scorer_of(policy)(policy, layer)
    if scores.keep_all:
        return list(range(layer.n))
    mask = Plan([scores], policy).select(tier)[0, 0]
    return [int(i) for i in mask.nonzero().flatten()]


def scored(attention: Tensor) -> LayerScores:
    """Scores that force nothing, all value norms 1."""
    return LayerScores(attention, torch.zeros(attention.shape[1], dtype=torch.bool), attention)


def budgets(text: str, layers: Sequence[Tensor], tier: str) -> list[list[int]]:
    """Entries per layer and head that a policy keeps of scores [num_kv_heads, n] a layer."""
    policy = Policy.parse(text)
    plan = Plan([scored(x) for x in layers], policy)
    lens: list[list[int]] = plan.select(tier).sum(-1).tolist()
    assert plan.budgets(tier).tolist() == lens
    return lens


@pytest.mark.parametrize(
    ("n", "tier", "theirs", "exact"),
    [(100, "0.1", 9, 10), (200, "0.1", 19, 20), (1000, "0.1", 99, 100), (100, "0.2", 19, 20)]
    + [(n, tier, k, k) for n, tier, k in ((100, "0.3", 30), (1000, "0.25", 250), (7, "0.01", 1))],
)
def test_float_budgets(n: int, tier: str, theirs: int, exact: int) -> None:
    keys = torch.rand(n, 4) + 0.1
    assert len(kept("knorm-kvpress", key_layer(keys, [1.0] * n), tier)) == theirs
    assert len(kept("knorm", key_layer(keys, [1.0] * n), tier)) == exact


def test_tier_1_keeps_everything() -> None:
    for name in ("snapkv", "criticaladakv", "pyramidkv", "tova", "knorm", "streamingllm"):
        layer = layer_of([0.3, 0.2, 0.4, 0.1], window=4)
        options = ":window=4" if "kv" in name else ""
        assert kept(f"{name}-kvpress{options}", layer, "1") == list(range(8))


def test_a_heavy_value_evicts_the_window() -> None:
    layer = layer_of([0.5, 0.4, 0.01, 0.01, 0.01, 0.01], 4, [10, 10] + [1] * 8)
    assert kept("criticalkv-kvpress:window=4,kernel=1", layer, "0.5") == [0, 1, 6, 7, 8]
    assert kept("criticalkv:window=4,kernel=1", layer, "0.5") == [0, 6, 7, 8, 9]


def test_a_budget_below_the_window() -> None:
    layer = layer_of([0.5] + [0.01] * 35, 64)
    for name in ("snapkv", "criticalkv", "adakv"):
        few = kept(f"{name}-kvpress:window=64", layer, "0.1")
        assert len(few) == 9
        assert set(few) < set(range(36, 100))
        assert kept(f"{name}:window=64", layer, "0.1") == list(range(36, 100))
    assert 99 not in kept("snapkv-kvpress:window=64", layer, "0.1")


def test_average_pooling_damps_the_first_entry() -> None:
    layer = layer_of([0.5] + [0.1] * 5, 2)
    theirs = Policy.parse("snapkv-kvpress:window=2")
    seen = scorer_of(theirs)(theirs, layer).attention[0, :3]
    torch.testing.assert_close(seen, torch.tensor([0.14, 0.16, 0.18]))
    assert kept("snapkv-kvpress:window=2", layer, "0.375") == [2, 6, 7]
    assert kept("snapkv:window=2", layer, "0.375") == [0, 6, 7]


@pytest.mark.parametrize("name", ["criticaladakv", "criticaladakv-kvpress"])
def test_contexts_do_not_share_budgets(name: str) -> None:
    """kvpress adds the budgets of a batch up; under its preset, too, a context is alone."""
    strong, weak = torch.rand(12) + 1, torch.rand(12) / 100
    one, other = torch.stack([weak, strong]), torch.stack([strong, weak])
    assert budgets(name, [one], "0.5") == [[1, 11]]
    assert budgets(name, [other], "0.5") == [[11, 1]]
    assert budgets(name, [one, other], "0.5") == [[1, 11], [11, 1]]


def test_a_safeguard_is_above_the_second_stage() -> None:
    """kvpress keeps a weak head's whole safeguard; the paper chooses its half by 𝓐."""
    weak = torch.linspace(0.02, 0.001, 20)
    attention = torch.stack([weak, torch.rand(20) + 1])
    critical = attention.clone()
    critical[0, 5] = 100
    scores = LayerScores(attention, torch.zeros(20, dtype=torch.bool), critical)
    found = [
        Plan([scores], Policy.parse(name)).select("0.5")[0, 0].nonzero().flatten().tolist()
        for name in ("criticaladakv-kvpress", "criticaladakv")
    ]
    assert found == [[0, 1], [0, 5]]


def test_negative_key_norms() -> None:
    keys = torch.diag(torch.tensor([1.0, 1.1, 1.2, 1.3, 1.4, 1.5]))
    layer = key_layer(keys, [1, 100, 1, 1, 1, 1])
    assert kept("knorm+uniform+twostage:preset=kvpress,alpha=0", layer, "0.7") == [0, 2, 3, 4]
    assert kept("knorm+uniform+twostage:alpha=0", layer, "0.7") == [0, 1, 2, 3]


def test_negative_cosines() -> None:
    angles = torch.tensor([0.0, 0.1, 0.8, 0.9, 1.0, 1.0])
    layer = key_layer(torch.stack([angles.cos(), angles.sin()], 1), [1, 100, 1, 1, 1, 1])
    assert 1 in kept("keydiff+uniform+plain:preset=kvpress", layer, "0.35")
    assert 1 not in kept("keydiff+uniform+twostage:preset=kvpress,alpha=0", layer, "0.7")
    assert 1 in kept("keydiff+uniform+twostage:alpha=0", layer, "0.35")


@pytest.mark.parametrize(("n", "theirs"), [(20, [0]), (30, [0, 1]), (50, [0, 1, 2, 3])])
def test_streaming_without_recent_entries(n: int, theirs: list[int]) -> None:
    layer = layer_of([1.0] * n)
    ours = kept("streamingllm", layer, "0.1")
    assert kept("streamingllm-kvpress", layer, "0.1") == theirs
    assert ours == ([0, 1, 2, 3, 49] if n == 50 else [0, 1, 2, 3])
    assert kept("streamingllm-kvpress", layer, "0.5")[4:] == list(range(n - n // 2 + 4, n))


MEASURED = {
    (2000, "0.45"): [900, 900, 900, 900],
    (2000, "0.5"): [1936, 1312, 688, 64],
    (2000, "0.8"): [1936, 1712, 1488, 1264],
    (251, "0.25"): [63, 63, 63, 63],
    (251, "0.7"): [187, 179, 172, 164],
    (251, "0.8"): [201, 201, 201, 201],
    (8000, "0.1"): [800, 800, 800, 800],
    (8000, "0.25"): [3900, 2633, 1367, 100],
}


def test_pyramids_that_fall_over() -> None:
    for (n, tier), expected in MEASURED.items():
        layers = [torch.rand(1, n) for _ in range(4)]
        assert budgets("pyramidkv-kvpress", layers, tier) == [[b] for b in expected]
    layers = [torch.rand(1, 2000) for _ in range(4)]
    lower, higher = (torch.tensor(budgets("pyramidkv", layers, t)) for t in ("0.45", "0.5"))
    assert bool((lower <= higher).all())
    assert (int(lower.sum()), int(higher.sum())) == (3600, 4000)
    assert len(set(lower.flatten().tolist())) == 4
    assert kept("snapkv-kvpress:window=1", layer_of([1.0] * 250, 1), "0.25")[-1] == 250
    assert len(kept("snapkv-kvpress:window=1", layer_of([1.0] * 250, 1), "0.25")) == 62


def test_kvzip_rounds_up() -> None:
    layers = [torch.rand(2, 203) for _ in range(3)]
    model, by_layer = "kvzip-kvpress", "kvziplayerwise-kvpress"
    assert sum(map(sum, budgets(model, layers, "0.1"))) == 122
    assert [sum(row) for row in budgets(by_layer, layers, "0.1")] == [41, 41, 41]
    assert sum(map(sum, budgets("kvzip", layers, "0.1"))) == 121


def test_kvzip_drops_what_no_chunk_repeats() -> None:
    """The template's tokens score 0; sinks are above every probability."""
    policy = Policy.parse("kvzip-kvpress")
    peak = torch.rand(2, 40) / 2 + 0.5
    peak[:, :12] = 0
    scores = replayed(policy, peak, torch.ones(2, 40, 4), torch.ones(8, 8))
    mask = Plan([scores], policy).select("0.7")[0]
    assert mask[:, :4].all()
    assert not mask[:, 4:12].any()


def test_duo_without_recent_entries_masks_nothing() -> None:
    importance = tuple(tuple(3.0 * la + h for h in range(3)) for la in range(15))
    profile = Profile(model_digest="a" * 64, method="test", importance=importance)
    place, layers = Place.whole(15, profile), [scored(torch.rand(3, 40)) for _ in range(15)]

    def lens(text: str) -> list[int]:
        policy = Policy.parse(f"{text},profile={DIGEST}")
        found: list[int] = Plan(layers, policy, place).select("0.5").sum(-1).flatten().tolist()
        return found

    # 22.5 heads round to 22. All importances but one are clipped to 1, and tie.
    assert lens("duo-kvpress:sinks=4,recent=6") == [10] * 22 + [40] * 23
    assert lens("duo-kvpress:sinks=4,recent=36") == [40] * 45
    assert lens("duo-kvpress:sinks=4,recent=0") == [40] * 45
    assert lens("streaming+duo+plain:sinks=4,recent=0")[:22] == [4] * 22


def test_duo_keeps_first_and_last() -> None:
    profile = Profile(model_digest="a" * 64, method="test", importance=((0.9, 0.1),))
    policy = Policy.parse(f"duo-kvpress:sinks=2,recent=3,profile={DIGEST}")
    plan = Plan([scored(torch.rand(2, 9))], policy, Place.whole(1, profile))
    full, streams = plan.select("0.5")[0].tolist()
    assert full == [True] * 9
    assert streams == [True] * 2 + [False] * 4 + [True] * 3


def rotation(positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[:, None] / torch.tensor([1.0, 10.0, 1.0, 10.0])
    return angles.cos(), angles.sin()


def test_expected_attention_counts_the_value_norm_twice() -> None:
    torch.manual_seed(0)
    shape = (1, 30, 4)
    queries, keys, values = (torch.randn(shape) for _ in range(3))
    layer = ContextLayer(queries, queries, keys, values, torch.eye(4), 0.5, rotation=rotation)

    def seen(text: str) -> Tensor:
        policy = Policy.parse(text)
        return scorer_of(policy)(policy, layer).attention[0, 4:]

    norms = values[0, 4:].norm(dim=-1)
    bare = seen("expected+uniform+plain:vnorm=false")
    for preset, factor in (("paper", 1), ("kvpress", norms)):
        twostage = seen(f"expected+uniform+twostage:preset={preset}")
        torch.testing.assert_close(twostage, bare * factor)
    offset = seen("expectedattention-kvpress:offset=0.5")
    torch.testing.assert_close(offset, (bare + 0.5) * norms)


@pytest.mark.parametrize(("name", "n"), [("snapkv", 64), ("tova", 1), ("expectedattention", 4)])
def test_too_short_a_context_is_kept(name: str, n: int) -> None:
    """kvpress fails on it."""
    layer = layer_of([0.5], n - 1) if n > 1 else layer_of([0.5])
    assert kept(f"{name}-kvpress", layer, "0.1") == list(range(n))


def test_what_is_not_finite_is_refused() -> None:
    layer = layer_of([0.5, 0.5], 2)
    layer.keys[0, 1, 1] = math.nan
    for name in ("snapkv-kvpress:window=2", "knorm-kvpress", "keydiff-kvpress", "tova-kvpress"):
        with pytest.raises(NumericsError):
            kept(name, layer, "0.5")


@pytest.mark.parametrize("alias", [alias for alias in ALIASES if alias.endswith("-kvpress")])
def test_aliases(alias: str) -> None:
    options = f":profile={DIGEST}" if alias.startswith("duo") else ""
    policy = Policy.parse(alias + options)
    assert policy.preset == "kvpress"
    assert not policy.streams_layers
    assert Policy.parse(policy.canonical()) == policy
    paper = alias.removesuffix("-kvpress")
    if paper in ALIASES:
        other = Policy.parse(paper)
        assert (policy.scorer, policy.allocator) == (other.scorer, other.allocator)
        assert policy.selector == other.selector


def test_defaults_of_its_own() -> None:
    text = Policy.parse("criticaladakv-kvpress").canonical()
    for option in ("window=64", "kernel=5", "pooling=avg", "alpha=0.5", "eps=0.0001"):
        assert option in text
    assert "chunk=2048" in Policy.parse("kvzip-kvpress").canonical()
    assert "offset" in Policy.parse("expectedattention-kvpress").canonical()
    assert "offset" not in Policy.parse("expectedattention").canonical()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("window+model+plain", "no window.model.plain; with model it has replay"),
        ("window+headkv+plain", "with headkv it has nothing"),
        ("window+pyramidkv+twostage", "with pyramidkv it has window"),
        ("window+uniform+critical", "no window.uniform.critical"),
        ("window+uniform+relative", "no window.uniform.relative"),
        ("replay+uniform+plain", "no replay"),
        ("replay+model+relative", "no replay"),
        ("h2o+uniform+plain", "no h2o"),
        ("obcache+uniform+plain", "no obcache"),
        ("defensive+adakv+plain", "no defensive"),
        ("self+uniform+plain", "no self"),
        ("snapkv:pooling=max", "no pooling with window; it does pooling=avg"),
        ("tova:recent=3", "no recent with tova"),
        ("kvzip:recent=8", "no recent with replay; it does recent=0"),
        ("kvzip:share=0.5", "no share with replay"),
        ("criticalkv:norm=l2", "no norm with twostage; it does norm=l1"),
        ("criticalkv:eps_per_token=true", "no eps_per_token"),
        ("replay+adakv+plain", "safeguard=0"),
        ("snapkv:interval=8,keep=0.5", "preset=paper"),
        ("snapkv:offset=0.1", "does not use offset"),
    ],
)
def test_what_kvpress_has_not_is_refused(text: str, why: str) -> None:
    profile = f",profile={DIGEST}" if "headkv" in text else ""
    joint = "," if ":" in text else ":"
    with pytest.raises(PolicyError, match=why):
        Policy.parse(f"{text}{joint}preset=kvpress{profile}")


def test_other_presets_have_no_offset() -> None:
    with pytest.raises(PolicyError, match="does not use offset"):
        Policy.parse("expectedattention:offset=0.1")
    assert make_policy("expected", "uniform", "plain").offset == 0
