"""A replay of shares, with echo and self weights, against sums in fp64.

Queries, keys, values and outputs are caught on their way through the model, in the first
pass and in each replay; what is replayed is written down here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from criticalkv.services.local import LocalEngine
from criticalkv.services.prefill import context_pass, replay_pass
from criticalkv.services.prefill.replay_pass import INSTRUCTION, ReplayPass
from criticalkv.services.prefill.sinks import SpoolingSink
from criticalkv.services.prefill.spool import Spool
from criticalkv.services.prefill.spooled_layer import SpooledLayer
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.attention import LayerCall
from criticalkv.shared.model.loader import LoadedModel

Factory = Callable[..., LoadedModel]
IDS = [int(t) for t in torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(3))]
N = len(IDS)


class Caught:
    """What attention got and gave, by layer; and which tokens the replays ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first: list[tuple[LayerCall, Tensor]] = []
        self.replays: list[tuple[LayerCall, Tensor]] = []
        self.tokens: list[list[int]] = []
        self.scores: list[Tensor] = []
        self.spooled: list[SpooledLayer] = []
        for kind, calls in (
            (context_pass.ContextPass, self.first),
            (ReplayPass, self.replays),
        ):
            monkeypatch.setattr(kind, "attend", self.noting(kind.attend, calls))
        forward, finish = replay_pass.forward, SpoolingSink.finish

        def running(model: Any, tokens: Tensor, *rest: Any) -> Tensor:
            self.tokens.append(tokens.tolist())
            return forward(model, tokens, *rest)

        def finishing(sink: SpoolingSink) -> Any:
            self.spooled = list(sink.layers)
            self.scores = [x.scores.needed("relative") for x in sink.layers if x.scores]
            return finish(sink)

        monkeypatch.setattr(replay_pass, "forward", running)
        monkeypatch.setattr(SpoolingSink, "finish", finishing)

    def noting(self, attend: Any, calls: list[tuple[LayerCall, Tensor]]) -> Any:
        def noted(plan: Any, call: LayerCall) -> Tensor:
            out: Tensor = attend(plan, call)
            calls.append((call, out))
            return out

        return noted


@pytest.fixture
def local(tiny_model: Factory) -> Iterator[LocalEngine]:
    with LocalEngine(tiny_model(num_q_heads=6)) as engine:
        yield engine


def parts_of(chunk: int, share: Fraction) -> list[list[int]]:
    """Each pass' tokens: the beginnings of chunks, as many as fit."""
    begins = [IDS[b : b + chunk] for b in range(0, N, chunk)]
    parts = [begin[: math.ceil(share * len(begin))] for begin in begins]
    passes: list[list[int]] = [[]]
    for part in parts:
        if len(passes[-1]) + len(part) > chunk:
            passes.append([])
        passes[-1] += part
    return passes


def share_of_output(
    probs: Tensor, out: Tensor, values: Tensor, w_o: Tensor, asking: Tensor
) -> Tensor:
    """Σ over asking queries and the group of (A·‖v W_O‖ / ‖o_q‖)².

    Args:
        probs: [num_kv_heads, group, m, n], what is scored.
        out: [num_q_heads, m, head_dim].
        values: [num_kv_heads, n, head_dim].
        w_o: [D_model, num_q_heads · head_dim].
        asking: bool [m].
    """
    heads, group, _, _ = probs.shape
    out, values, w_o = out.double(), values.double(), w_o.double()
    silent = (out.transpose(0, 1).flatten(1) @ w_o.T).norm(dim=-1)
    total = torch.zeros(heads, values.shape[1], dtype=torch.float64)
    for h in range(heads):
        for g in range(group):
            q = h * group + g
            columns = w_o[:, q * out.shape[2] : (q + 1) * out.shape[2]]
            norms = (values[h] @ columns.T).norm(dim=-1)
            carried = probs[h, g] * norms / silent[:, None]
            total[h] += carried.square()[asking].sum(0)
    return total


def softmaxed(query: Tensor, keys: Tensor, scaling: float, hidden: Tensor) -> Tensor:
    """[num_q_heads, m, d] × [num_kv_heads, s, d] → [num_kv_heads, group, m, s]."""
    heads, group = keys.shape[0], query.shape[0] // keys.shape[0]
    grouped = query.double().unflatten(0, (heads, group))
    logits = scaling * grouped @ keys.double()[:, None].transpose(2, 3)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def future(m: int) -> Tensor:
    return torch.ones(m, m, dtype=torch.bool).triu(1)


def moved(x: Tensor, steps: int, frequencies: Tensor) -> Tensor:
    """RoPE by `steps` positions more, fp64."""
    angle = (steps * frequencies.double()).repeat(2)
    first, second = x.double().chunk(2, dim=-1)
    return x.double() * angle.cos() + torch.cat([-second, first], dim=-1) * angle.sin()


def replayed(caught: Caught, index: int, layers: int, w_o: Tensor, instruction: int) -> Tensor:
    context = caught.first[index][0]
    total = torch.zeros(context.key.shape[:2], dtype=torch.float64)
    for call, out in caught.replays[index::layers]:
        m = call.query.shape[1]
        keys = torch.cat([context.key, call.key], dim=1)
        hidden = torch.cat([torch.zeros(m, N, dtype=torch.bool), future(m)], dim=1)
        probs = softmaxed(call.query, keys, call.scaling, hidden)[..., :N]
        total += share_of_output(probs, out, context.value, w_o, torch.arange(m) >= instruction)
    return total


def echoed(caught: Caught, index: int, w_o: Tensor, policy: Policy, frequencies: Tensor) -> Tensor:
    call, out = caught.first[index]
    total = torch.zeros(call.key.shape[:2], dtype=torch.float64)
    for begin in range(0, N, policy.echo_chunk):
        end = min(N, begin + policy.echo_chunk)
        query = moved(call.query[:, begin:end], N - begin, frequencies)
        tail = moved(call.key[:, begin:end], N - begin, frequencies)
        far = torch.tensor(
            [
                policy.echo_reach > 0
                and j >= policy.sinks
                and not begin - policy.echo_reach
                <= j
                < begin + policy.echo_chunk + policy.echo_reach
                for j in range(N)
            ]
        )
        hidden = torch.cat([far.expand(end - begin, -1), future(end - begin)], dim=1)
        keys = torch.cat([call.key.double(), tail], dim=1)
        probs = softmaxed(query, keys, call.scaling, hidden)[..., :N]
        every = torch.ones(end - begin, dtype=torch.bool)
        total += share_of_output(probs, out[:, begin:end], call.value, w_o, every)
    return total


def own(caught: Caught, index: int, w_o: Tensor, policy: Policy) -> Tensor:
    call, out = caught.first[index]
    probs = softmaxed(call.query, call.key, call.scaling, future(N))
    probs = probs * torch.ones(N, N).tril(-policy.distance)
    asking = torch.arange(N) % policy.stride == 0
    return policy.stride * share_of_output(probs, out, call.value, w_o, asking)


@pytest.mark.parametrize(
    "options",
    [
        "share=1",
        "share=0.25",
        "share=0.25,echo_weight=0.5,echo_chunk=16",
        "share=0.1,echo_weight=4,echo_chunk=32,echo_reach=8",
        "share=0.5,echo_weight=2,echo_chunk=16,self_weight=0.5,distance=8,stride=3",
    ],
)
def test_scores_and_what_is_kept(
    options: str, local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"replay+model+relative:chunk=32,{options}"
    policy, model = Policy.parse(text), local.model
    caught = Caught(monkeypatch)
    node = local.compress_tokens(IDS, policy=text, store_tier="1")
    instruction = model.chat.encode_content(INSTRUCTION)
    parts = parts_of(32, Fraction(policy.share))
    assert caught.tokens == [[*instruction, *part] for part in parts]
    replayed_share = sum(map(len, parts)) / N
    frequencies = model.model.model.rotary_emb.inv_freq
    expected = []
    for index in range(model.spec.num_layers):
        w_o = model.w_o(index)
        one = replayed(caught, index, model.spec.num_layers, w_o, len(instruction))
        if policy.echo_weight or policy.self_weight:
            one /= replayed_share
        if policy.echo_weight:
            more = echoed(caught, index, w_o, policy, frequencies)
            one += float(policy.echo_weight) * more
        if policy.self_weight:
            one += float(policy.self_weight) * own(caught, index, w_o, policy)
        expected.append(one)
    scores = torch.stack(expected)
    torch.testing.assert_close(torch.stack(caught.scores).double(), scores, rtol=1e-3, atol=1e-9)
    assert all(layer.first_pass is None for layer in caught.spooled)
    check_kept(local, node.node_id, scores, policy)


def check_kept(local: LocalEngine, node_id: str, scores: Tensor, policy: Policy) -> None:
    """The model's best by the fp64 scores; what is closer than fp32 tells may swap."""
    forced = torch.arange(N) < policy.sinks
    forced |= torch.arange(N) >= N - policy.recent
    heads = scores.shape[0] * scores.shape[1]
    for tier in ("0.2", "0.4"):
        with local.store.open_get(node_id, tier=tier) as reader:
            layers = assemble(reader.manifest, reader.tier, reader).layers
        kept = torch.zeros(scores.shape, dtype=torch.bool)
        for index, layer in enumerate(layers):
            for h in range(scores.shape[1]):
                kept[index, h, layer.head(h)[2].long()] = True
        assert int(kept.sum()) == int(Fraction(tier) * heads * N)
        assert bool(kept[..., forced].all())
        left = scores[~kept].max()
        assert scores[kept & ~forced].min() >= left - 1e-3 * left


@pytest.mark.parametrize(
    ("options", "sums"),
    [
        ("replay+model+plain", 2),
        ("replay+model+relative", 2 + 6),
        ("replay+model+relative:echo_weight=1", 2 + 6 + 6),
        ("replay+model+relative:self_weight=1", 2 + 6 + 6),
        ("window+model+plain", 0),
    ],
)
def test_the_spool_counts_what_a_replay_holds(
    options: str, sums: int, local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per token and layer: KV, and sums of 2 KV heads or 6 query heads."""
    asked: list[int] = []
    reserve = Spool.reserve

    def noting(spool: Spool, nbytes: int, *args: Any, **kwargs: Any) -> Any:
        asked.append(nbytes)
        return reserve(spool, nbytes, *args, **kwargs)

    monkeypatch.setattr(Spool, "reserve", noting)
    local.compress_tokens(IDS, policy=options)
    spec = local.model.spec
    kv = 2 * spec.num_kv_heads * spec.head_dim * 4
    assert asked == [N * spec.num_layers * (kv + 4 * sums)]
