"""Masking and its renormalisation, against transformers' own eager attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from criticalkv.services.analysis.chosen_heads import chosen_heads
from criticalkv.services.analysis.masking import LayerRows, Mask, layer_rows, masked_forward
from criticalkv.services.analysis.removal import without_span
from criticalkv.services.analysis.renormalisation import residual, surviving_mass, undo
from criticalkv.services.analysis.span import Span
from criticalkv.services.local.side_by_side import SideBySide, answer_logprobs
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.attention import IMPLEMENTATION
from criticalkv.shared.model.loader import LoadedModel

Factory = Callable[..., LoadedModel]
N, SPAN = 61, Span(17, 29)
IDS = [int(t) for t in torch.randint(0, 256, (N,), generator=torch.Generator().manual_seed(9))]
SHAPE = {"num_q_heads": 6, "num_kv_heads": 2}
CHOICES: dict[str, dict[str, Any]] = {
    "all": {},
    "one layer": {"layers": [1]},
    "query heads": {"layers": [0, 2], "q_heads": [1, 5]},
    "a KV head": {"kv_heads": [1]},
}


@contextmanager
def eager(model: LoadedModel, masks: list[Tensor], seen: list[Tensor]) -> Iterator[None]:
    """Run each layer under its own additive mask [1, num_q_heads, n, n]; note its attention."""
    hooks = []
    for layer, mask in zip(model.model.model.layers, masks, strict=True):
        hooks.append(
            layer.self_attn.register_forward_pre_hook(
                lambda _m, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}),
                with_kwargs=True,
            )
        )
        hooks.append(
            layer.self_attn.register_forward_hook(lambda _m, _a, out: seen.append(out[1][0]))
        )
    model.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.model.set_attn_implementation(IMPLEMENTATION)
        for hook in hooks:
            hook.remove()


def oracle(
    model: LoadedModel, heads: Tensor | None, since: int = SPAN.end
) -> tuple[Tensor, list[Tensor]]:
    """Logits [n, vocab] and attention [num_q_heads, n, n] per layer of the masked model."""
    masks = []
    for layer, window in enumerate(model.spec.sliding_windows):
        visible = torch.zeros(model.spec.num_q_heads, N, N, dtype=torch.bool)
        for h in range(model.spec.num_q_heads):
            for q in range(N):
                visible[h, q, max(0, q - window + 1) if window else 0 : q + 1] = True
                if heads is not None and heads[layer, h] and q >= since:
                    visible[h, q, 17:29] = False
        masks.append(torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None])
    seen: list[Tensor] = []
    with eager(model, masks, seen), torch.inference_mode():
        logits = model.model(torch.tensor([IDS]), use_cache=False).logits[0]
    return logits, seen


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("choice", CHOICES)
def test_logits_and_rows_are_those_of_an_additive_mask(
    tiny_model: Factory, family: str, choice: str
) -> None:
    model = tiny_model(family, **SHAPE)
    heads = chosen_heads(model.spec, **CHOICES[choice])
    mask, rows = Mask(SPAN, heads), []
    logits = masked_forward(
        model, IDS, mask, logits_from=0, look=lambda call: rows.append(layer_rows(call, mask, 20))
    )
    expected, attention = oracle(model, heads)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert [row.layer for row in rows] == [0, 1, 2]
    for row in rows:
        torch.testing.assert_close(row.masked, attention[row.layer][:, 20:], atol=1e-5, rtol=1e-4)
    unmasked, plain = oracle(model, None)
    first = min(int(i) for i in heads.any(1).nonzero())
    torch.testing.assert_close(rows[first].plain, plain[first][:, 20:], atol=1e-5, rtol=1e-4)
    # Nothing before the span's end changes, everything after it does.
    torch.testing.assert_close(logits[: SPAN.end], unmasked[: SPAN.end], atol=1e-4, rtol=1e-4)
    assert float((logits - unmasked)[SPAN.end :].abs().amax(-1).min()) > 0.01


def test_a_span_can_go_from_a_finished_cache(tiny_model: Factory) -> None:
    model = tiny_model(**SHAPE)
    heads = chosen_heads(model.spec)
    logits = masked_forward(model, IDS, Mask(SPAN, heads, since=50), logits_from=45)
    expected, _ = oracle(model, heads, since=50)
    torch.testing.assert_close(logits, expected[45:], atol=1e-4, rtol=1e-4)
    early = masked_forward(model, IDS, Mask(SPAN, heads), logits_from=50)
    assert float((logits[5:] - early).abs().amax(-1).min()) > 0.01
    nobody = masked_forward(model, IDS, Mask(SPAN, heads, since=N), logits_from=45)
    assert torch.equal(nobody, masked_forward(model, IDS, logits_from=45))


@pytest.mark.parametrize("choice", CHOICES)
def test_undone_attention_is_the_unmasked_one_on_the_survivors(
    tiny_model: Factory, choice: str
) -> None:
    """In every layer with the same q and k; across two runs in the first masked layer."""
    model = tiny_model(**SHAPE)
    heads = chosen_heads(model.spec, **CHOICES[choice])
    mask = Mask(SPAN, heads)
    rows = _rows(model, mask)
    inflated = 0.0
    for row in rows:
        undone = undo(row.masked, surviving_mass(row.plain, row.kept))
        survivors = row.plain * row.kept
        torch.testing.assert_close(undone, survivors, atol=1e-6, rtol=2e-6)
        assert residual(row.plain, row.masked, row.kept) < 1e-6
        for head in range(6):
            hit = bool(heads[row.layer, head])
            assert bool((~row.kept[head]).any()) == hit
            # The hidden columns, and only for queries after the span.
            assert bool((~row.kept[head, SPAN.end :, 17:29]).all()) == hit
            assert row.kept[head, : SPAN.end].all()
        inflated = max(inflated, float((row.masked - survivors).abs().max()))
    assert inflated > 0.1
    _, plain = oracle(model, None)
    gaps = [
        float(
            (undo(row.masked, surviving_mass(row.plain, row.kept)) - plain[row.layer] * row.kept)
            .abs()
            .max()
        )
        for row in rows
    ]
    first = min(int(i) for i in heads.any(1).nonzero())
    assert max(gaps[: first + 1]) < 1e-4
    assert all(gap > 1e-3 for gap in gaps[first + 1 :])


def _rows(model: LoadedModel, mask: Mask) -> list[LayerRows]:
    rows: list[LayerRows] = []
    masked_forward(model, IDS, mask, look=lambda call: rows.append(layer_rows(call, mask, 0)))
    return rows


def test_a_head_may_lose_the_span_without_renormalisation(tiny_model: Factory) -> None:
    """One layer, one head: the output falls by the span's own Σ A_i v_i W_O."""
    model = tiny_model(num_layers=1, **SHAPE)
    heads = chosen_heads(model.spec, [0], [4])
    outs: list[Tensor] = []
    hook = model.model.model.layers[0].self_attn.register_forward_hook(
        lambda _m, _a, out: outs.append(out[0][0])
    )
    calls: list[Any] = []
    masked_forward(model, IDS, None, look=calls.append)
    masked_forward(model, IDS, Mask(SPAN, heads, renormalised=False))
    hook.remove()
    call = calls[0]
    for q in (SPAN.end - 1, SPAN.end, N - 1):
        attention = (call.query[4, q] @ call.key[1, : q + 1].T * call.scaling).softmax(-1)
        lost = attention[17:29] @ call.value[1, 17:29] @ model.w_o(0)[:, 64:80].T
        expected = lost if q >= SPAN.end else 0 * lost
        torch.testing.assert_close(outs[0][q] - outs[1][q], expected, atol=1e-5, rtol=1e-4)


def test_a_compressed_cache_without_the_span(tiny_model: Factory) -> None:
    """At full size the mask's own logits; when compressed, what remains in each tier."""
    model = tiny_model(**SHAPE)
    context, question, answer = IDS[:45], IDS[45:50], [*IDS[50:], 7]
    kv_heads = torch.tensor([[True, False], [True, True], [False, False]])
    both = SideBySide(model, context)
    cut = without_span(both.full(), SPAN, kv_heads)
    logprobs = answer_logprobs(model, [cut], question, answer)[0]
    mask = Mask(SPAN, kv_heads.repeat_interleave(3, 1), since=45)
    expected = masked_forward(model, IDS, mask, logits_from=49).log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)

    small = both.compress(Policy.parse("snapkv:window=4"), ("0.3", "0.6")).cache
    cut = without_span(small, SPAN, kv_heads)
    for tier in ("0.3", "0.6"):
        for layer, heads in enumerate(kv_heads.tolist()):
            before, after = small.at_tier(tier).layers[layer], cut.at_tier(tier).layers[layer]
            for h, loses in enumerate(heads):
                keys, values, positions = before.head(h)
                stays = torch.tensor([not (loses and 17 <= p < 29) for p in positions.tolist()])
                for have, want in zip(after.head(h), (keys, values, positions), strict=True):
                    assert torch.equal(have, want[stays])
    assert cut.kept_entries < small.kept_entries
    everywhere = without_span(small, SPAN)
    assert not any(((x.positions >= 17) & (x.positions < 29)).any() for x in everywhere.layers)


@pytest.mark.parametrize("text", ["", "3", "5:5", "7:3", "-1:4", "a:b", "1:2:3", "1 :2", "٣:٤"])
def test_spans_without_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="span"):
        Span.parse(text)


def test_masks_without_sense_are_refused(tiny_model: Factory) -> None:
    spec = tiny_model().spec
    assert Span.parse("3:9") == Span(3, 9)
    with pytest.raises(ConfigError, match="not after"):
        Mask(SPAN, chosen_heads(spec), since=28)
    with pytest.raises(ConfigError, match="ends after the last of 61"):
        masked_forward(tiny_model(), IDS, Mask(Span(50, 62), chosen_heads(spec)))
    for wrong in ({"layers": [3]}, {"q_heads": [-1]}, {"kv_heads": [0, 2]}):
        with pytest.raises(ConfigError, match="are not among"):
            chosen_heads(spec, **wrong)
    with pytest.raises(ConfigError, match="no head"):
        chosen_heads(spec, q_heads=[0], kv_heads=[1])
