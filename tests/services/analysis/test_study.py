"""A study of a tiny model, against attention over the caches that policies leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from criticalkv.services.analysis.comparison import (
    lower_share,
    of_kv_heads,
    perturbation_lower_share,
    reduction,
)
from criticalkv.services.analysis.findings import report_of
from criticalkv.services.analysis.kept import kept_of
from criticalkv.services.analysis.perturbation import kept_share
from criticalkv.services.analysis.query_rows import QueryRows
from criticalkv.services.analysis.study import Cell, Study
from criticalkv.services.analysis.variants import critical_of, varied
from criticalkv.services.analysis.watch import LayerView, watch
from criticalkv.services.evaluation.case import Case
from criticalkv.services.local.side_by_side import SideBySide
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.errors import PolicyError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.attention import LayerCall, attend_ragged, forward
from criticalkv.shared.model.loader import LoadedModel

Factory = Callable[..., LoadedModel]
TIERS = ("0.2", "0.5")
IDS = tuple(
    int(t) for t in torch.randint(0, 256, (130,), generator=torch.Generator().manual_seed(3))
)
CASE = Case("random", IDS[:100], IDS[100:110], IDS[110:])


class TwoCaches:
    """AttentionPlan: goes on with the full cache, and notes what a compressed one gives."""

    def __init__(self, full: RaggedCache, small: RaggedCache) -> None:
        self._full, self._small = full, small
        self.change: list[Tensor] = []

    def attend(self, call: LayerCall) -> Tensor:
        outs = [
            attend_ragged(call, cache.layers[call.layer], call.key, call.value, 100)
            for cache in (self._full, self._small)
        ]
        self.change.append(outs[0].double() - outs[1].double())
        return outs[0]


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("llama", "window+adakv+twostage:window=6"),
        ("qwen3", "h2o+model+relative:window=6,span=20"),
        ("gemma3_text", "tova+uniform+plain"),
        ("llama", "replay+model+relative:chunk=32"),
    ],
)
def test_perturbation_is_what_the_served_cache_does(
    tiny_model: Factory, family: str, policy: str
) -> None:
    """The kernel's attention over the compressed cache, projected head by head."""
    model = tiny_model(family)
    parsed = Policy.parse(policy)
    study = Study(model, {"it": parsed}, TIERS)
    study.add(CASE)
    context = SideBySide(model, CASE.context_ids)
    cache = context.compress(parsed, TIERS).cache
    assert cache.tiers == TIERS
    for tier in TIERS:
        plan = TwoCaches(context.full(), cache.at_tier(tier))
        tokens = torch.tensor([*CASE.question_ids, *CASE.answer_ids[:-1]])
        positions = torch.arange(100, 100 + tokens.numel())
        forward(model.model, tokens, positions, plan, torch.empty(0, dtype=torch.int64))
        for row, layer in enumerate(study.layers):
            w_o = model.w_o(layer).double().view(48, 4, 16).permute(1, 2, 0)
            projected = plan.change[layer][:, -len(CASE.answer_ids) :] @ w_o
            expected = projected.abs().sum(-1).mean(-1)
            actual = study.mean(Cell("it", tier, "after"), "actual_l1")[row]
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
            whole = projected.sum(0).square().sum(-1).sqrt().mean()
            layer_l2 = study.mean(Cell("it", tier, "after"), "layer_l2")[row]
            torch.testing.assert_close(layer_l2, whole, atol=1e-4, rtol=1e-4)
            assert float(expected.min()) > 1e-3
    assert study.violations == 0
    assert study.checked == len(TIERS) * len(study.layers) * 4 * (20 + 32)


def test_sliding_window_layers_are_left_out(tiny_model: Factory) -> None:
    model = tiny_model("gemma3_text")
    study = Study(model, {"it": Policy.parse("snapkv:window=6")}, ["0.5"])
    study.add(CASE)
    assert study.layers == tuple(i for i, w in enumerate(model.spec.sliding_windows) if w is None)
    assert 0 < len(study.layers) < model.spec.num_layers


def test_the_first_stage_is_the_base_with_its_share_of_the_budget(tiny_model: Factory) -> None:
    """⌊α·c⌋ of the best by attention, besides the window: 100 · 0.3 − 6 = 24, a quarter is 6."""
    context = SideBySide(tiny_model(), CASE.context_ids)
    staged = kept_of(context, Policy.parse("criticalkv:window=6,alpha=0.25"), ["0.3"])
    base = kept_of(context, Policy.parse("snapkv:window=6"), ["0.12"])
    assert torch.equal(staged.first["0.3"], base.masks["0.12"])
    assert staged.masks["0.3"].sum(-1).unique().tolist() == [30]
    assert not (staged.first["0.3"] & ~staged.masks["0.3"]).any()
    assert base.first == {}


def test_the_second_stage_minimises_its_own_bound(tiny_model: Factory) -> None:
    """Theorem 3.5, where A is one query's own: θ̂ = C − (2 − 1/σ₁)·S is lower in every head."""
    model = tiny_model(num_q_heads=4, num_kv_heads=4)
    context = SideBySide(model, CASE.context_ids)
    options = "window=1,kernel=1"
    base = kept_of(context, Policy.parse(f"snapkv:{options}"), TIERS)
    critical = kept_of(context, Policy.parse(f"criticalkv:{options},eps=0"), TIERS)
    strictly = [0]

    def look(view: LayerView) -> None:
        query = QueryRows(
            view.window.probs[:, :, -1:], view.window.values, view.window.norms, view.window.w_o
        )
        for tier in TIERS:
            first = kept_share(query, critical.first[tier][view.layer])
            shares = []
            for kept in (base, critical):
                weighed = query.probs * query.norms["l1"][:, :, None]
                mask = kept.masks[tier][view.layer][:, None, None]
                shares.append((weighed * mask).sum(-1).flatten(0, 1))
            gain = (2 - 1 / first) * (shares[1] - shares[0])
            assert (gain[first > 0.5] >= -1e-6 * shares[0][first > 0.5]).all()
            strictly[0] += int((gain > 0).sum())

    watch(model, context, CASE.question_ids, CASE.answer_ids, look)
    assert strictly[0] > 3


def test_figures_of_the_first_stage_are_reported(tiny_model: Factory) -> None:
    policy = Policy.parse("criticalkv:window=6,alpha=1")
    study = Study(tiny_model(), {"all": policy, "base": varied(policy, selector="plain")}, TIERS)
    study.add(CASE)
    for tier in TIERS:
        cell = Cell("all", tier, "after")
        assert torch.equal(study.mean(cell, "first_sigma"), study.mean(cell, "sigma"))
        assert torch.equal(
            study.mean(cell, "sigma"), study.mean(Cell("base", tier, "after"), "sigma")
        )
    report = report_of(study, "it", {"all": "base"}, {})
    assert report.headline["lower_share all 0.2"] == 0
    assert report.headline["bounds_violated"] == 0
    assert report.details["against_base"]["all"]["0.2"]["after"]["equal_share"] == 1
    row = report.details["table"]["all"]["0.5"]["after"]
    assert row["actual_l1"] < row["theta_l1"] < row["attention_only_l1"]
    assert 0 < row["first_sigma"] == row["sigma"] < 1


def test_means_are_over_texts(tiny_model: Factory) -> None:
    model = tiny_model()
    other = Case("other", IDS[10:90], IDS[:9], IDS[40:55])
    both = Study(model, {"it": Policy.parse("snapkv:window=6")}, TIERS)
    single = [Study(model, both.policies, TIERS) for _ in range(2)]
    for study, case in zip(single, (CASE, other), strict=True):
        both.add(case)
        study.add(case)
    cell = Cell("it", "0.2", "window")
    first, second = (study.mean(cell, "actual_l2") for study in single)
    torch.testing.assert_close(both.mean(cell, "actual_l2"), (first + second) / 2)


def test_shares_and_reductions() -> None:
    base, other = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([[0.5, 2.0], [0.0, 5.0]])
    assert lower_share(base, other) == 0.25
    assert of_kv_heads(torch.tensor([[1.0, 3.0, 5.0, 9.0]]), 2).tolist() == [[2.0, 7.0]]
    assert reduction(base, other).tolist() == [[0.5, 0.0], [0.0, -0.25]]


def test_the_share_of_heads_is_counted_per_tier(tiny_model: Factory) -> None:
    model, ticks = tiny_model(), []
    cases = [CASE, Case("other", IDS[10:90], IDS[:9], IDS[40:55])]
    share = perturbation_lower_share(
        model, "snapkv:window=6", TIERS, cases, tick=lambda: ticks.append(1)
    )
    names = {name: Policy.parse(f"{name}:window=6") for name in ("snapkv", "criticalkv")}
    study = Study(model, names, TIERS)
    for case in cases:
        study.add(case)
    for tier in TIERS:
        base, other = (study.mean(Cell(x, tier, "after"), "actual_l1").flatten() for x in names)
        lower = sum(float(b) < float(a) for a, b in zip(base, other, strict=True))
        assert share[tier] == pytest.approx(lower / 12)
    assert 0 < share["0.2"] < 1
    assert ticks == [1, 1]


def test_policies_vary_in_one_part() -> None:
    assert critical_of(Policy.parse("snapkv:window=9")) == Policy.parse("criticalkv:window=9")
    assert critical_of(Policy.parse("adakv")) == Policy.parse("criticaladakv")
    # Critical selectors multiply by a norm of their own.
    expected = critical_of(Policy.parse("expectedattention"))
    assert expected == Policy.parse("expected+uniform+twostage")
    assert varied(Policy.parse("criticalkv:alpha=0.25"), selector="plain") == Policy.parse("snapkv")
    assert varied(Policy.parse("criticalkv"), eps="0").eps == 0
    with pytest.raises(PolicyError, match="streaming has no attention"):
        critical_of(Policy.parse("streamingllm"))
    with pytest.raises(PolicyError, match="does not use alpha"):
        varied(Policy.parse("snapkv"), alpha="0.3")


def test_stepwise_policies_are_refused(tiny_model: Factory) -> None:
    study = Study(tiny_model(), {"it": Policy.parse("snapkv:interval=64,keep=0.5")}, TIERS)
    with pytest.raises(PolicyError, match="stepwise"):
        study.add(CASE)


def test_bounds_hold_in_every_head_of_the_real_model(demo_model: LoadedModel) -> None:
    chat = demo_model.chat
    text = chat.encode_content(
        "The city council met on Monday to discuss the new bridge. Its cost has doubled since "
        "the first plan, and residents of the old harbour fear for their gardens. " * 4
    )
    case = Case("bridge", tuple(text), tuple(chat.encode_content("\n\nSo,")), tuple(text[:12]))
    named = {name: Policy.parse(name) for name in ("snapkv:window=8", "criticaladakv:window=8")}
    study = Study(demo_model, named, ("0.1", "0.4"))
    study.add(case)
    spec = demo_model.spec
    assert study.checked == 2 * 2 * spec.num_layers * spec.num_q_heads * (12 + 32)
    assert study.violations == 0
    rows = report_of(study, "it", {}, {}).details["table"]
    for tiers in rows.values():
        small, large = (tiers[tier]["after"] for tier in ("0.1", "0.4"))
        assert large["actual_l1"] < small["actual_l1"] < small["theta_l1"]
        assert small["sigma"] < large["sigma"]
