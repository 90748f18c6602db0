"""Every scorer that looks at a layer, against its formula in loops over fp64 numbers."""

from __future__ import annotations

import cmath
import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from naive_layer import DIM, HEADS, SCALING, WIDTH, Layer, close, only_head
from torch import Tensor

from criticalkv.kernels import ops, reference
from criticalkv.shared.errors import NumericsError, PolicyError
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.parameters import used_parameters
from criticalkv.shared.eviction.policy import MAY_BE_RELATIVE, STEPWISE, Policy
from criticalkv.shared.eviction.scorers import SCORERS
from criticalkv.shared.eviction.scores import LayerScores

torch.set_num_threads(1)

# Small enough that every length matters at n = 23.
SETTINGS = {
    "window": 5,
    "kernel": 3,
    "span": 9,
    "sinks": 2,
    "recent": 3,
    "future": 6,
    "distance": 4,
    "echo_chunk": 16,
    "stride": 1,
}
FACTOR = 1.25
"""As yarn's attention factor: cos and sin carry it."""


def policy_of(scorer: str, selector: str = "plain", **options: Any) -> Policy:
    """A policy with SETTINGS where its parts use them."""
    parts = {"scorer": scorer, "allocator": "uniform", "selector": selector}
    used = used_parameters(parts | options)
    chosen = {k: v for k, v in {**SETTINGS, **options}.items() if k in used}
    text = ",".join(f"{key}={value}" for key, value in chosen.items())
    return Policy.parse(f"{scorer}+uniform+{selector}:{text}")


def angle(position: int, i: int) -> float:
    return position * 7.0 ** (-2 * i / DIM)


def rotation(positions: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE with a factor."""
    rows = [[angle(int(p), i % (DIM // 2)) for i in range(DIM)] for p in positions]
    angles = torch.tensor(rows, dtype=torch.float64).view(-1, DIM)
    return (FACTOR * angles.cos()).float(), (FACTOR * angles.sin()).float()


def layer_of(n: int, parent: tuple[int, ...] | None = (4, 0), group: int = 3) -> Layer:
    return Layer(n, n, parent=parent, group=group, first=0 if parent is None else 6,
                 rotation=rotation)  # fmt: skip


def score(policy: Policy, layer: Layer | ContextLayer) -> LayerScores:
    context = layer.context() if isinstance(layer, Layer) else layer
    return SCORERS[policy.scorer](policy, context)


def zeros(layer: Layer) -> Tensor:
    return torch.zeros(layer.heads, layer.n, dtype=torch.float64)


def pooled(row: list[float], kernel: int, kind: str) -> list[float]:
    out = []
    for i in range(len(row)):
        near = row[max(0, i - kernel // 2) : i + kernel // 2 + 1]
        out.append(max(near) if kind == "max" else sum(near) / kernel)
    return out


def heads_of(layer: Layer, kv: int) -> range:
    return range(kv * layer.group, (kv + 1) * layer.group)


def last(layer: Layer, count: int) -> set[int]:
    return set(range(max(0, layer.n - count), layer.n))


def window(policy: Policy, layer: Layer) -> tuple[Tensor, set[int]]:
    width, out = min(policy.window, layer.n), zeros(layer)
    for kv in range(layer.heads):
        for h in heads_of(layer, kv):
            for back in range(width):
                out[kv] += layer.causal(h, back) / (layer.group * width)
        before = layer.n - width
        out[kv, :before] = torch.tensor(pooled(out[kv, :before].tolist(), policy.kernel, "max"))
    return out, last(layer, width)


def h2o(policy: Policy, layer: Layer) -> tuple[Tensor, set[int]]:
    out = zeros(layer)
    for kv in range(layer.heads):
        for h in heads_of(layer, kv):
            for back in range(min(policy.span, layer.n)):
                out[kv] += layer.causal(h, back) / layer.group
    return out, last(layer, policy.window)


def tova(policy: Policy, layer: Layer) -> tuple[Tensor, set[int]]:
    out = zeros(layer)
    for h in range(layer.heads * layer.group):
        out += layer.causal(h, 0) / (layer.heads * layer.group)
    return out, last(layer, policy.recent)


def streaming(policy: Policy, layer: Layer) -> tuple[Tensor, set[int]]:
    row = torch.arange(1, layer.n + 1, dtype=torch.float64)
    return row.expand(layer.heads, -1), set(range(min(policy.sinks, layer.n)))


def knorm(_: Policy, layer: Layer) -> tuple[Tensor, set[int]]:
    out = zeros(layer)
    for kv in range(layer.heads):
        for i in range(layer.n):
            out[kv, i] = 1 / (1 + math.sqrt(sum(float(x) ** 2 for x in layer.keys[kv, i])))
    return out, set()


def keydiff(_: Policy, layer: Layer) -> tuple[Tensor, set[int]]:
    out = zeros(layer)
    for kv in range(layer.heads):
        mean = torch.zeros(DIM, dtype=torch.float64)
        for k in layer.keys[kv].double():
            mean += k / k.norm() / layer.n
        for i, k in enumerate(layer.keys[kv].double()):
            out[kv, i] = (1 - float(k @ mean) / float(k.norm() * mean.norm())) / 2
    return out, set()


def expected(policy: Policy, layer: Layer) -> tuple[Tensor, set[int]]:
    """With RoPE as multiplication of complex numbers, one pair of dimensions each."""
    out, half, sinks = zeros(layer), DIM // 2, policy.sinks
    if layer.n <= sinks:
        return out, set(range(layer.n))
    begin, end = layer.first, layer.first + layer.n
    turn = [
        sum(FACTOR * cmath.exp(1j * angle(p, i)) for p in range(end, end + policy.future))
        / policy.future
        for i in range(half)
    ]
    matrix = torch.zeros(DIM, DIM, dtype=torch.float64)
    for i, c in enumerate(turn):
        matrix[i, i] = matrix[i + half, i + half] = c.real
        matrix[i, i + half], matrix[i + half, i] = -c.imag, c.imag
    for h in range(layer.heads * layer.group):
        kv, flat = h // layer.group, []
        for t in range(sinks, layer.n):
            q = layer.queries[h, t].double()
            pairs = [
                complex(q[i], q[i + half]) * cmath.exp(-1j * angle(begin + t, i)) / FACTOR
                for i in range(half)
            ]
            flat.append(torch.tensor([z.real for z in pairs] + [z.imag for z in pairs]).double())
        mean = sum(flat, torch.zeros(DIM, dtype=torch.float64)) / len(flat)
        spread = torch.zeros(DIM, DIM, dtype=torch.float64)
        for q in flat:
            spread += torch.outer(q - mean, q - mean) / len(flat)
        mean, spread = matrix @ mean, matrix @ spread @ matrix.T
        logits = []
        for k in [*layer.keys[kv, sinks:].double(), *layer.prefix[kv].double()]:
            quadratic = float(k @ spread @ k) if policy.covariance else 0.0
            logits.append(SCALING * float(k @ mean) + SCALING**2 * quadratic / 2)
        attention = torch.tensor(logits, dtype=torch.float64).softmax(0)
        for t in range(sinks, layer.n):
            norm = float(layer.values[kv, t].double().norm()) if policy.vnorm else 1.0
            if policy.selector == "twostage":
                norm = 1.0
            out[kv, t] += attention[t - sinks] * norm / layer.group
    return out, set(range(sinks))


def obcache(policy: Policy, layer: Layer) -> tuple[Tensor, set[int]]:
    width, out = min(policy.window, layer.n), zeros(layer)
    for kv in range(layer.heads):
        for h in heads_of(layer, kv):
            for back in range(width):
                a = layer.causal(h, back)
                q, o = layer.queries[h, -1 - back].double(), layer.out[h, -1 - back].double()
                for j in range(layer.n - back):
                    v = layer.values[kv, j].double()
                    z = SCALING * float(q @ layer.keys[kv, j].double())
                    term = a[j] ** 2 * (v @ v)
                    term += (a[j] * z) ** 2 * ((v - o) @ (v - o))
                    term += 2 * a[j] ** 2 * z * (v @ v - v @ o)
                    out[kv, j] += term / layer.group
        before = layer.n - width
        out[kv, :before] = torch.tensor(pooled(out[kv, :before].tolist(), policy.kernel, "max"))
    return out, last(layer, width)


def defensive(policy: Policy, layer: Layer) -> tuple[Tensor, set[int]]:
    width, out = min(policy.window, layer.n), zeros(layer)
    before = layer.n - width
    for kv in range(layer.heads):
        peak = [0.0] * before
        for h in heads_of(layer, kv):
            for back in range(width):
                row = layer.causal(h, back)[:before].tolist()
                smooth = pooled(row, policy.kernel, "avg")
                for j in range(before):
                    peak[j] = max(peak[j], smooth[j] * sum(row) / sum(smooth))
        for j in range(before):
            out[kv, j] = max(peak[j], sum(peak) / before)
    if policy.selector == "plain":
        for j in range(before):
            norms = [sum(layer.norm(kv, j, 1)) for kv in range(layer.heads)]
            for kv in range(layer.heads):
                out[kv, j] *= norms[kv] / sum(norms)
    return out, last(layer, width)


def own(policy: Policy, layer: Layer) -> tuple[Tensor, set[int]]:
    out = zeros(layer)
    for h in range(layer.heads * layer.group):
        for t in range(layer.n):
            for j in range(layer.n):
                if t - j >= policy.distance:
                    a = float(layer.causal(h, layer.n - 1 - t)[j])
                    out[h // layer.group, j] = max(float(out[h // layer.group, j]), a)
    return out, set(range(min(policy.sinks, layer.n))) | last(layer, policy.recent)


def behind(x: Tensor, steps: int) -> Tensor:
    """A rotated vector `steps` positions later, fp64 [DIM]."""
    half, out = DIM // 2, torch.zeros(DIM, dtype=torch.float64)
    for i in range(half):
        turned = complex(float(x[i]), float(x[i + half])) * cmath.exp(1j * angle(steps, i))
        out[i], out[i + half] = turned.real, turned.imag
    return out


def echoes(policy: Policy, layer: Layer, h: int, t: int) -> Tensor:
    """Attention of query t of query head h from behind the context, fp64 [n]."""
    kv, begin = h // layer.group, t // policy.echo_chunk * policy.echo_chunk
    steps = layer.n - begin
    tail = [behind(layer.keys[kv, j], steps) for j in range(begin, t + 1)]
    keys = torch.cat([layer.keys[kv].double(), torch.stack(tail), layer.prefix[kv].double()])
    logits = SCALING * keys @ behind(layer.queries[h, t], steps)
    for j in range(layer.n):
        far = max(begin - j, j - (begin + policy.echo_chunk - 1))
        if policy.echo_reach and far > policy.echo_reach and j >= policy.sinks:
            logits[j] = -math.inf
    return logits.softmax(0)[: layer.n]


def echo(policy: Policy, layer: Layer) -> tuple[Tensor, set[int]]:
    out = zeros(layer)
    for h in range(layer.heads * layer.group):
        for t in range(layer.n):
            out[h // layer.group] = out[h // layer.group].maximum(echoes(policy, layer, h, t))
    return out, set(range(min(policy.sinks, layer.n))) | last(layer, policy.recent)


ORACLES: dict[str, Callable[[Policy, Layer], tuple[Tensor, set[int]]]] = {
    "window": window,
    "h2o": h2o,
    "tova": tova,
    "streaming": streaming,
    "knorm": knorm,
    "keydiff": keydiff,
    "expected": expected,
    "obcache": obcache,
    "defensive": defensive,
    "echo": echo,
    "self": own,
}
WITH_ATTENTION = [name for name in ORACLES if name != "streaming"]


def forced_of(scores: LayerScores) -> set[int]:
    assert scores.forced.dim() == 1
    return set(torch.nonzero(scores.forced).flatten().tolist())


def test_every_scorer_has_an_oracle() -> None:
    assert set(ORACLES) == set(SCORERS)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("parent", [None, (4, 0)], ids=["root", "child"])
@pytest.mark.parametrize("n", [1, 2, 4, 5, 6, 23])
@pytest.mark.parametrize("scorer", ORACLES)
def test_scores(scorer: str, n: int, parent: tuple[int, ...] | None, group: int) -> None:
    assert HEADS * group * DIM != WIDTH
    policy, layer = policy_of(scorer), layer_of(n, parent, group)
    scores = score(policy, layer)
    attention, forced = ORACLES[scorer](policy, layer)
    close(scores.attention, attention)
    assert bool((scores.attention >= 0).all())
    assert forced_of(scores) == forced
    assert scores.critical is None
    assert scores.relative is None


@pytest.mark.parametrize("scorer", WITH_ATTENTION)
def test_critical_scores(scorer: str) -> None:
    policy, layer = policy_of(scorer, "twostage", eps="0.01"), layer_of(13)
    scores = score(policy, layer)
    attention, _ = ORACLES[scorer](policy, layer)
    close(scores.attention, attention)
    close(scores.critical, layer.critical(attention, 0.01, 1))


@pytest.mark.parametrize(
    ("scorer", "options"),
    [
        ("expected", {"covariance": "false"}),
        ("expected", {"vnorm": "false"}),
        ("expected", {"sinks": 0}),
        ("self", {"distance": 1}),
        ("self", {"distance": 64}),
        ("echo", {"echo_chunk": 128}),
        ("echo", {"echo_reach": 1}),
        ("h2o", {"span": 1}),
        ("h2o", {"span": 500}),
        ("tova", {"recent": 0}),
        ("defensive", {"kernel": 1}),
        ("obcache", {"window": 1}),
    ],
    ids=str,
)
def test_parameters(scorer: str, options: dict[str, Any]) -> None:
    policy, layer = policy_of(scorer, **options), layer_of(13)
    scores = score(policy, layer)
    attention, forced = ORACLES[scorer](policy, layer)
    close(scores.attention, attention)
    assert forced_of(scores) == forced


@pytest.mark.parametrize("scorer", ["h2o", "self", "echo"])
def test_relative_scores(scorer: str) -> None:
    policy, layer = policy_of(scorer, "relative"), layer_of(18)

    def seen(h: int, q: int) -> Tensor:
        if scorer == "echo":
            return echoes(policy, layer, h, q)
        a = layer.causal(h, layer.n - 1 - q)
        if scorer == "h2o":
            return a * float(q >= layer.n - policy.span)
        near = torch.arange(layer.n) > q - policy.distance
        return a.masked_fill(near, 0)

    close(score(policy, layer).relative, layer.relative(seen))


def far(policy: Policy, layer: Layer, stride: int) -> Callable[[int, int], Tensor]:
    """Attention of the own queries, of each `stride`-th, to entries far enough before them."""

    def seen(h: int, q: int) -> Tensor:
        a = layer.causal(h, layer.n - 1 - q) * float(q % stride == 0)
        return a.masked_fill(torch.arange(layer.n) > q - policy.distance, 0)

    return seen


def test_each_strideth_own_query_asks() -> None:
    policy, layer = policy_of("self", "relative", stride=3), layer_of(23)
    scores = score(policy, layer)
    close(scores.relative, layer.relative(far(policy, layer, 3)))
    peaks = [[far(policy, layer, 3)(h, q) for q in range(23)] for h in range(layer.heads * 3)]
    expected = torch.stack([torch.stack(rows).amax(0) for rows in peaks]).unflatten(0, (2, 3))
    close(scores.attention, expected.amax(1))


@pytest.mark.parametrize("reach", [1, 3, 20, 40])
@pytest.mark.parametrize("selector", ["plain", "relative"])
def test_echo_may_see_what_is_near(selector: str, reach: int) -> None:
    policy, layer = policy_of("echo", selector, echo_reach=reach), layer_of(55)
    scores = score(policy, layer)
    if selector == "plain":
        close(scores.attention, echo(policy, layer)[0])
    else:
        expected = layer.relative(lambda h, q: echoes(policy, layer, h, q))
        close(scores.relative, expected)


def test_echo_adds_own_queries() -> None:
    policy, layer = policy_of("echo", "relative", stride=2, self_weight="0.5"), layer_of(18)
    expected = layer.relative(lambda h, q: echoes(policy, layer, h, q))
    expected += 0.5 * 2 * layer.relative(far(policy, layer, 2))
    close(score(policy, layer).relative, expected)


def test_echo_does_not_depend_on_where_the_context_stands() -> None:
    here, there = layer_of(18).context(), replace(layer_of(18).context(), first_position=1000)
    policy = policy_of("echo", "relative")
    a, b = score(policy, here).relative, score(policy, there).relative
    assert a is not None
    assert b is not None
    assert torch.equal(a, b)


def test_scorers_without_single_queries_have_no_relative_scores() -> None:
    for scorer in set(SCORERS) - set(MAY_BE_RELATIVE):
        with pytest.raises(PolicyError, match="relative"):
            policy_of(scorer, "relative")


@pytest.mark.parametrize("selector", ["twostage", "critical"])
def test_streaming_has_nothing_to_multiply(selector: str) -> None:
    with pytest.raises(PolicyError, match="streaming has no attention"):
        policy_of("streaming", selector)


READS = {
    "queries": {"window", "h2o", "tova", "expected", "obcache", "defensive", "self", "echo"},
    "keys": set(ORACLES) - {"streaming"},
    "values": set(ORACLES),
    "w_o": set(ORACLES) - {"streaming"},
    "out": {"obcache", "h2o", "window", "self", "echo"},
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize(
    ("scorer", "where"), [(s, where) for where, names in READS.items() for s in sorted(names)]
)
@pytest.mark.parametrize("index", [0, -1])
def test_not_finite_is_a_typed_error(scorer: str, where: str, value: float, index: int) -> None:
    selector = {"w_o": "twostage", "out": "relative"}.get(where, "plain")
    if scorer == "obcache" and where == "out":
        selector = "plain"
    layer = layer_of(6)
    tensor = getattr(layer, where)
    # Not every scorer reads every query, but all read the last one.
    part = tensor[:, -1] if where in ("queries", "out") else tensor
    part[(index,) * part.dim()] = value
    with pytest.raises(NumericsError):
        score(policy_of(scorer, selector), layer)


def test_keys_that_would_be_silently_ignored_are_refused() -> None:
    """−∞ · q is a logit of −∞ for positive q: attention 0, everything finite."""
    layer = layer_of(6, None)
    layer.queries.abs_()
    layer.keys[0, 0, 0] = -math.inf
    for scorer in ("window", "h2o", "tova", "obcache", "defensive", "self", "echo", "knorm"):
        with pytest.raises(NumericsError):
            score(policy_of(scorer), layer)
    with pytest.raises(NumericsError):
        score(policy_of("expected", covariance="false"), layer)


@pytest.mark.parametrize("scorer", sorted(set(ORACLES) - {"tova", "defensive"}))
def test_a_head_does_not_see_the_others(scorer: str) -> None:
    """What one head scores is the same alone, and wherever it stands."""
    policy, layer = policy_of(scorer), layer_of(23).context()
    together = score(policy, layer).attention
    for h in range(HEADS):
        alone = score(policy, only_head(layer, h)).attention
        torch.testing.assert_close(together[h : h + 1], alone, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("scorer", WITH_ATTENTION)
def test_blocks_do_not_matter(scorer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, layer = policy_of(scorer, "twostage"), layer_of(23)
    whole = score(policy, layer)
    monkeypatch.setattr(reference, "_block_elements", lambda _: 150)
    module = importlib.import_module("criticalkv.shared.eviction.scorers.expected")
    monkeypatch.setattr(module, "COLUMNS", 4)
    monkeypatch.setattr(module, "QUERIES", 4)
    parts = score(policy, layer)
    torch.testing.assert_close(parts.attention, whole.attention, rtol=1e-5, atol=1e-8)
    assert parts.critical is not None
    torch.testing.assert_close(parts.critical, whole.critical, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("scorer", "columns"), [("self", 208), ("echo", 208 + 16)])
def test_all_queries_never_make_a_square(
    scorer: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All n queries are read, but no intermediate holds n × n attention weights."""
    seen: list[int] = []
    rows = reference._every_column

    def noting(*args: Any, **kwargs: Any) -> Any:
        for block in rows(*args, **kwargs):
            seen.append(block.probs.numel())
            yield block

    monkeypatch.setattr(reference, "_every_column", noting)
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 4096)
    n = 208
    score(policy_of(scorer, "relative"), layer_of(n, None, group=1))
    assert sum(seen) == HEADS * n * columns
    assert max(seen) <= 4096


def test_coming_queries_are_read_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean and covariance never hold all queries in fp32."""
    module = importlib.import_module("criticalkv.shared.eviction.scorers.expected")
    seen: list[int] = []
    turned = module.turned

    def noting(x: Tensor, *more: Tensor) -> Tensor:
        seen.append(x.shape[1])
        return turned(x, *more)

    layer = layer_of(23)
    whole = score(policy_of("expected"), layer).attention
    monkeypatch.setattr(module, "turned", noting)
    monkeypatch.setattr(module, "QUERIES", 5)
    torch.testing.assert_close(score(policy_of("expected"), layer).attention, whole)
    queries = [count for count in seen if count != DIM]  # the others turn the mean rotation
    assert queries == 2 * [5, 5, 5, 5, 1]


def test_all_chunks_turn_by_one_look_at_the_rotation() -> None:
    asked: list[Tensor] = []

    def noting(positions: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(positions)
        return rotation(positions)

    layer = replace(layer_of(55).context(), rotation=noting)
    score(policy_of("echo"), layer)
    assert [positions.tolist() for positions in asked] == [[55, 39, 23, 7]]


@pytest.mark.parametrize("sinks", [0, 2, 20, 60])
@pytest.mark.parametrize("reach", [1, 16, 30])
def test_echo_sees_sinks_and_what_is_near(sinks: int, reach: int) -> None:
    policy, layer = policy_of("echo", sinks=sinks, echo_reach=reach), layer_of(55)
    close(score(policy, layer).attention, echo(policy, layer)[0])


def test_echo_without_attention_has_none() -> None:
    """Where nobody reads it, it is zeros and not some other sum."""
    scores = score(policy_of("echo", "relative"), layer_of(18))
    assert scores.attention.shape == (HEADS, 18)
    assert scores.attention.eq(0).all()


def in_dtype(layer: ContextLayer, dtype: torch.dtype) -> ContextLayer:
    names = ("queries", "out", "keys", "values", "w_o", "prefix_keys")
    tensors = {name: getattr(layer, name) for name in names}
    return replace(layer, **{k: None if t is None else t.to(dtype) for k, t in tensors.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("scorer", ORACLES)
def test_half_precision_is_scored_in_fp32(scorer: str, dtype: torch.dtype) -> None:
    """Nothing is rounded again: scores are those of the same tensors in fp32."""
    selectors = ["plain"] if scorer == "streaming" else ["plain", "twostage"]
    layer = in_dtype(layer_of(23).context(), dtype)
    exact = in_dtype(layer, torch.float32)
    for selector in [*selectors, *(["relative"] if scorer in MAY_BE_RELATIVE else [])]:
        policy = policy_of(scorer, selector)
        half, full = score(policy, layer), score(policy, exact)
        for name in ("attention", "critical", "relative"):
            one, two = getattr(half, name), getattr(full, name)
            assert (one is None) == (two is None)
            if one is not None:
                assert one.dtype == torch.float32
                torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("scorer", ["knorm", "keydiff"])
def test_maps_keep_the_order(scorer: str) -> None:
    torch.manual_seed(1)
    layer = Layer(50, 1)
    layer.keys *= torch.logspace(-3, 3, 50)[None, :, None]
    scores = score(policy_of(scorer), layer).attention
    for kv in range(HEADS):
        keys = layer.keys[kv].double()
        raw = -keys.norm(dim=-1)
        if scorer == "keydiff":
            unit = keys / keys.norm(dim=-1, keepdim=True)
            raw = -torch.cosine_similarity(keys, unit.mean(0)[None])
        assert scores[kv].argsort().tolist() == raw.argsort().tolist()


def test_zero_keys_have_no_direction() -> None:
    layer = Layer(6, 6)
    layer.keys[0] = 0
    assert score(policy_of("keydiff"), layer).attention[0].eq(0.5).all()
    assert score(policy_of("knorm"), layer).attention[0].eq(1).all()


@pytest.mark.parametrize("scorer", ["window", "obcache", "defensive"])
def test_a_window_needs_its_queries(scorer: str) -> None:
    with pytest.raises(ValueError, match="window of 5"):
        score(policy_of(scorer), Layer(13, 4))


def test_h2o_sums_over_the_queries_there_are() -> None:
    policy, layer = policy_of("h2o"), layer_of(13).context()
    few = replace(layer, queries=layer.queries[:, -3:], out=layer.out[:, -3:])
    expected = score(policy_of("h2o", span=3), layer)
    assert torch.equal(score(policy, few).attention, expected.attention)


# What earlier steps left: heads of different length, right-aligned.


def stepwise(kept: int, padding: tuple[int, int], group: int = 3) -> ContextLayer:
    """A layer of which earlier steps have kept some: the last 6 tokens are all there."""
    base = Layer(kept, min(6, kept), group=group, first=7)
    positions = torch.zeros(HEADS, kept, dtype=torch.int64)
    for h, pad in enumerate(padding):
        old = max(0, kept - pad - 6)
        generator = torch.Generator().manual_seed(h)
        tokens = torch.randperm(20, generator=generator)[:old].sort().values.tolist()
        tokens = [*tokens, *range(20, 26)][-(kept - pad) :]
        positions[h, pad:] = torch.tensor(tokens) + base.first
    layer = base.context()
    # Its own entry must not be a sink because of what stands at its place.
    return replace(layer, positions=positions, padding=torch.tensor(padding))


@pytest.mark.parametrize("padding", [(0, 0), (3, 0), (0, 4), (2, 5)], ids=str)
@pytest.mark.parametrize("kept", [6, 16])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("scorer", sorted(set(STEPWISE) - {"tova"}))
def test_padding(scorer: str, padding: tuple[int, int], kept: int, group: int) -> None:
    selector = "plain" if scorer == "streaming" else "twostage"
    policy, layer = policy_of(scorer, selector), stepwise(kept, padding, group)
    together = score(policy, layer)
    assert together.forced.shape == together.attention.shape == (HEADS, kept)
    for h, pad in enumerate(padding):
        alone = score(policy, only_head(layer, h, pad))
        torch.testing.assert_close(
            together.attention[h, pad:], alone.attention[0], rtol=1e-5, atol=1e-8
        )
        assert together.forced[h, pad:].tolist() == alone.forced.flatten().tolist()
        assert together.attention[h, :pad].eq(0).all()
        assert not together.forced[h, :pad].any()
        if selector == "twostage":
            assert together.critical is not None
            assert alone.critical is not None
            torch.testing.assert_close(
                together.critical[h, pad:], alone.critical[0], rtol=1e-5, atol=1e-8
            )
            assert together.critical[h, :pad].eq(0).all()


@pytest.mark.parametrize("scorer", sorted(set(STEPWISE) - {"streaming", "tova"}))
def test_eps_per_token_counts_the_head_s_own_entries(scorer: str) -> None:
    """Padding is no entry: ε/n is what it would be for the head alone."""
    policy = policy_of(scorer, "critical", eps="0.5", eps_per_token="true")
    layer = stepwise(16, (3, 5))
    together = score(policy, layer)
    assert together.critical is not None
    for h, pad in enumerate((3, 5)):
        alone = score(policy, only_head(layer, h, pad))
        assert alone.critical is not None
        torch.testing.assert_close(
            together.critical[h, pad:], alone.critical[0], rtol=1e-5, atol=1e-8
        )


@pytest.mark.parametrize("padding", [(0, 0), (3, 0), (2, 5)], ids=str)
def test_tova_adds_up_tokens_not_columns(padding: tuple[int, int]) -> None:
    policy, layer = policy_of("tova"), stepwise(16, padding)
    assert layer.positions is not None
    by_token: dict[int, float] = {}
    for h, pad in enumerate(padding):
        alone = only_head(layer, h, pad)
        reduced = ops.attention_scores(
            alone.queries[:, -1:],
            alone.keys,
            scaling=SCALING,
            prefix_keys=alone.prefix_keys,
            prefix_cu=alone.prefix_cu,
        )["mean"][0].sum(0)
        for i, a in enumerate(reduced.tolist()):
            token = int(layer.positions[h, pad + i])
            by_token[token] = by_token.get(token, 0.0) + a / (HEADS * layer.group_size)
    scores = score(policy, layer)
    for h, pad in enumerate(padding):
        expected = [by_token[int(p)] for p in layer.positions[h, pad:]]
        torch.testing.assert_close(scores.attention[h, pad:], torch.tensor(expected))
        assert scores.attention[h, :pad].eq(0).all()
        assert scores.forced[h].tolist() == [i >= 13 for i in range(16)]


def test_sinks_are_tokens_not_slots() -> None:
    """A head that has lost the node's first token has one sink fewer."""
    layer = stepwise(16, (3, 0))
    positions = torch.arange(16).expand(2, 16).clone() + layer.first_position
    positions[1] += 1
    forced = score(policy_of("streaming"), replace(layer, positions=positions)).forced
    assert forced[0].nonzero().flatten().tolist() == []
    assert forced[1].nonzero().flatten().tolist() == [0]
