"""Window and replay scorers against loops over queries, heads and entries in fp64."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from naive_layer import DIM, GROUP, HEADS, SCALING, Layer, close
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.errors import NumericsError, PolicyError
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers.echo import echo
from criticalkv.shared.eviction.scorers.own import own
from criticalkv.shared.eviction.scorers.replay import ReplayScorer, first_pass_sumsq
from criticalkv.shared.eviction.scorers.window import window
from criticalkv.shared.eviction.scores import LayerScores

torch.set_num_threads(1)


def window_scores(policy: Policy, layer: Layer) -> LayerScores:
    return window(policy, layer.context())


def naive_window(layer: Layer, w: int, kernel: int) -> Tensor:
    """Mean over the window, group mean, then the max of the neighbourhood before it."""
    mean = torch.zeros(HEADS, layer.n, dtype=torch.float64)
    for kv in range(HEADS):
        for g in range(GROUP):
            for i in range(w):
                mean[kv] += layer.attention(kv * GROUP + g, i, layer.n - w + i + 1, 0)
    mean /= GROUP * w
    pooled = mean.clone()
    for kv in range(HEADS):
        for i in range(layer.n - w):
            low, high = max(0, i - kernel // 2), min(layer.n - w, i + kernel // 2 + 1)
            pooled[kv, i] = max(float(x) for x in mean[kv, low:high])
    return pooled


@pytest.mark.parametrize("parent", [None, (4, 0)], ids=["root", "child"])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 11, 23])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_window_attention(n: int, kernel: int, parent: tuple[int, ...] | None) -> None:
    w = min(4, n)
    layer = Layer(n, w, parent=parent)
    scores = window_scores(policy_of("plain", kernel=kernel), layer)
    close(scores.attention, naive_window(layer, w, kernel))
    assert scores.forced.tolist() == [i >= n - w for i in range(n)]
    assert scores.critical is None
    assert scores.relative is None


def policy_of(selector: str, **options: Any) -> Policy:
    text = ",".join(f"{k}={v}" for k, v in {"window": 4, **options}.items())
    return Policy.parse(f"window+uniform+{selector}:{text}")


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("selector", ["twostage", "critical"])
def test_window_critical(selector: str, norm: str) -> None:
    layer = Layer(13, 4)
    scores = window_scores(policy_of(selector, kernel=3, eps="0.01", norm=norm), layer)
    attention = naive_window(layer, 4, 3)
    close(scores.attention, attention)
    close(scores.critical, layer.critical(attention, 0.01, 1 if norm == "l1" else 2))


def test_window_relative() -> None:
    layer = Layer(9, 4)
    scores = window_scores(policy_of("relative"), layer)
    close(
        scores.relative,
        layer.relative(lambda h, q: layer.attention(h, q, layer.n - 4 + q + 1, 0)),
    )


def test_window_ignores_surplus_queries() -> None:
    layer = Layer(13, 9)
    short = Layer(13, 9)
    short.queries, short.out = layer.queries[:, -4:], layer.out[:, -4:]
    a, b = (window_scores(policy_of("relative"), x) for x in (layer, short))
    assert torch.equal(a.attention, b.attention)
    assert torch.equal(a.needed("relative"), b.needed("relative"))


def test_window_needs_its_queries() -> None:
    with pytest.raises(ValueError, match="window of 4"):
        window_scores(policy_of("plain"), Layer(13, 3))


def replay(policy: Policy, chunks: list[Layer]) -> LayerScores:
    return fed(policy, chunks).layer_scores(1, values=chunks[0].values, w_o=chunks[0].w_o)


def fed(policy: Policy, chunks: list[Layer]) -> ReplayScorer:
    scorer = ReplayScorer(policy, 2)
    for chunk in chunks:
        reduced = ops.attention_scores(
            chunk.queries,
            chunks[0].keys,
            scaling=SCALING,
            reductions=("max", "sumsq"),
            tail_keys=chunk.tail,
            query_weight=chunk.output_norm.square().reciprocal().float(),
            **chunks[0].parent,
        )
        scorer.add_chunk(1, reduced["max"], reduced["sumsq"])
    return scorer


def replay_chunks(n: int) -> list[Layer]:
    first, second = Layer(n, 5, tail=5), Layer(n, 3, tail=4)
    for name in ("keys", "values", "w_o", "prefix", "parent"):
        setattr(second, name, getattr(first, name))
    return [first, second]


def replay_policy(selector: str, **options: Any) -> Policy:
    text = ",".join(f"{k}={v}" for k, v in {"sinks": 2, "recent": 3, **options}.items())
    return Policy.parse(f"replay+model+{selector}:{text}")


def seen_by(chunk: Layer) -> Callable[[int, int], Tensor]:
    before = chunk.tail.shape[1] - chunk.queries.shape[1]
    return lambda h, q: chunk.attention(h, q, chunk.n, before + q + 1)


@pytest.mark.parametrize("n", [1, 4, 5, 6, 17])
@pytest.mark.parametrize("selector", ["plain", "twostage", "critical", "relative"])
def test_replay(n: int, selector: str) -> None:
    chunks = replay_chunks(n)
    scores = replay(replay_policy(selector), chunks)
    expected = torch.zeros(HEADS, n, dtype=torch.float64)
    for chunk in chunks:
        for h in range(HEADS * GROUP):
            for q in range(chunk.queries.shape[1]):
                expected[h // GROUP] = expected[h // GROUP].maximum(seen_by(chunk)(h, q))
    close(scores.attention, expected)
    assert scores.forced.tolist() == [i < 2 or i >= n - 3 for i in range(n)]
    if selector in ("twostage", "critical"):
        close(scores.critical, chunks[0].critical(expected, 1e-4, 1))
    if selector == "relative":
        close(scores.relative, sum((c.relative(seen_by(c)) for c in chunks), torch.zeros(HEADS, n)))


def test_replay_order_of_chunks_does_not_matter_for_the_maximum() -> None:
    chunks = replay_chunks(17)
    other = [chunks[1], chunks[0]]
    a, b = (replay(replay_policy("plain"), x) for x in (chunks, other))
    assert torch.equal(a.attention, b.attention)


def test_replay_without_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 0"):
        ReplayScorer(replay_policy("plain"), 1).layer_scores(
            0, values=torch.zeros(1, 1, 4), w_o=torch.zeros(4, 4)
        )


@pytest.mark.parametrize("where", ["keys", "values", "w_o", "out", "queries"])
def test_nan_is_a_typed_error(where: str) -> None:
    selector = "relative" if where == "out" else "twostage"
    layer = Layer(13, 4)
    getattr(layer, where).flatten()[-1] = torch.nan
    with pytest.raises(NumericsError):
        window_scores(policy_of(selector), layer)
    chunks = replay_chunks(9)
    getattr(chunks[0], where).flatten()[-1] = torch.nan
    with pytest.raises(NumericsError):
        replay(replay_policy(selector), chunks)


def test_silent_output_does_not_poison_relative_scores() -> None:
    layer = Layer(13, 4)
    layer.w_o.zero_()
    assert window_scores(policy_of("relative"), layer).needed("relative").eq(0).all()


def test_relative_is_the_share_of_the_output() -> None:
    """One head, one query, orthogonal values: the shares of the squared output sum to 1."""
    torch.manual_seed(0)
    n = 8
    q, keys, values = torch.randn(1, 1, n), torch.randn(1, n, n), torch.eye(n)[None]
    w_o = torch.linalg.qr(torch.randn(n, n)).Q
    out, _ = ops.ragged_attention(
        q, keys[0], values[0], torch.tensor([0, n]), keys[:, :0], values[:, :0], scaling=0.3
    )
    layer = ContextLayer(queries=q, out=out, keys=keys, values=values, w_o=w_o, scaling=0.3)
    scores = window(Policy.parse("window+uniform+relative:window=1"), layer)
    torch.testing.assert_close(scores.needed("relative").sum(), torch.tensor(1.0))


def far_options(self_weight: str) -> dict[str, int]:
    return {"distance": 3, "stride": 1} if float(self_weight) else {}


def test_both_weights_project_the_outputs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n, seen = 13, []
    layer = Layer(n, n, rotation=lambda p: tuple(x.expand(len(p), -1) for x in ROTATED)).context()
    norms = ops.output_norms

    def noting(out: Tensor, w_o: Tensor) -> Tensor:
        seen.append(out.shape[1])
        return norms(out, w_o)

    monkeypatch.setattr(ops, "output_norms", noting)
    first_pass_sumsq(replay_policy("relative", echo_weight=1, self_weight=1, stride=4), layer)
    assert seen == [n]
    seen.clear()
    first_pass_sumsq(replay_policy("relative", self_weight=1, stride=4), layer)
    assert seen == [4]


ROTATED = (torch.linspace(0, 1, DIM), torch.linspace(1, 0, DIM))


@pytest.mark.parametrize("share", [Fraction(1), Fraction(1, 4)], ids=str)
@pytest.mark.parametrize(("of_echo", "of_self"), [("0.5", "0"), ("0", "3"), ("2", "0.25")])
def test_replay_adds_the_first_pass(of_echo: str, of_self: str, share: Fraction) -> None:
    """relative = replay's ÷ share + echo_weight · echo's + self_weight · self's."""
    n = 13
    context = Layer(n, n, rotation=lambda p: tuple(x.expand(len(p), -1) for x in ROTATED))
    chunks = replay_chunks(n)
    for chunk in chunks:
        for name in ("keys", "values", "w_o", "prefix", "parent"):
            setattr(chunk, name, getattr(context, name))
    weights = {"echo_weight": of_echo, "self_weight": of_self}
    policy = replay_policy("relative", **weights, **far_options(of_self))
    scorer, first = fed(policy, chunks), first_pass_sumsq(policy, context.context())
    assert first is not None
    scorer.add_first_pass(1, first, share)
    scores = scorer.layer_scores(1, values=context.values, w_o=context.w_o)
    plain = replay(policy, chunks)
    expected = plain.needed("relative") / float(share)
    for scorer_of_part, weight, text in (
        (echo, of_echo, "echo+model+relative"),
        (own, of_self, "self+model+relative:distance=3"),
    ):
        part = scorer_of_part(Policy.parse(text), context.context()).needed("relative")
        assert bool(part.any())
        expected = expected + float(weight) * part
    torch.testing.assert_close(scores.needed("relative"), expected)
    assert torch.equal(scores.attention, plain.attention)
    assert torch.equal(scores.forced, plain.forced)


def test_a_plain_replay_adds_nothing() -> None:
    assert first_pass_sumsq(replay_policy("relative"), Layer(5, 5).context()) is None


def test_self_weight_needs_relative_scores() -> None:
    with pytest.raises(PolicyError, match="self_weight"):
        replay_policy("plain", self_weight=1)
    with pytest.raises(PolicyError, match="self_weight"):
        Policy.parse("window+model+relative:self_weight=1")
    with pytest.raises(PolicyError, match="echo_weight"):
        replay_policy("critical", echo_weight=1)
