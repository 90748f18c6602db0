"""Likelihoods of a text's continuation: the untouched model's own, and the masked model's."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_model
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModelForCausalLM

from criticalkv.services.evaluation import forced, oracle
from criticalkv.services.evaluation.answer import FULL_CELL, Cell
from criticalkv.services.evaluation.likelihood import Likelihood
from criticalkv.services.evaluation.perplexity import Perplexity, Window, Windows
from criticalkv.services.evaluation.reading import read_each
from criticalkv.services.local import LocalEngine
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.errors import ConfigError, NumericsError, PolicyError
from criticalkv.shared.model.loader import LoadedModel

TOLERANCE = 1e-4
"""Nats per token, between two correct fp32 forwards."""
POLICY = "criticalkv:window=8"
LOW, TOP = Cell(POLICY, "0.2"), Cell(POLICY, "1")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.set_num_threads(1)
    return make_model("qwen3")


@pytest.fixture(scope="module")
def window(model: LoadedModel) -> Window:
    return next(Windows(model).take(1, 150, continuation=40))


@pytest.fixture(scope="module")
def found(model: LoadedModel, window: Window) -> dict[Cell, Likelihood]:
    meter = Perplexity(model)
    meter.check([FULL_CELL, LOW, TOP])
    made = dict(meter.measure(window, [LOW, FULL_CELL, TOP]))
    assert len(meter._store) == 0
    meter.close()
    return made


def nll(logprobs: Tensor, window: Window) -> float:
    return -float(logprobs.gather(1, torch.tensor(window.answer_ids)[:, None]).mean())


def test_tier_1_is_transformers_own_likelihood(
    model: LoadedModel, window: Window, found: dict[Cell, Likelihood]
) -> None:
    theirs = AutoModelForCausalLM.from_config(
        deepcopy(model.model.config), attn_implementation="sdpa"
    )
    theirs.load_state_dict(model.model.state_dict())
    ids = [*window.context_ids, window.next_id, *window.answer_ids]
    with torch.inference_mode():
        logits = theirs.eval()(torch.tensor([ids])).logits[0, 150 : 150 + 40]
    expected = nll(logits.log_softmax(-1), window)
    for cell in (FULL_CELL, TOP):
        assert found[cell].nll == pytest.approx(expected, abs=TOLERANCE)
        assert found[cell].kl == pytest.approx(0, abs=1e-6)
        assert found[cell].agreement == 1
        assert (found[cell].tokens, found[cell].kept) == (40, 1)


def test_a_compressed_cache_is_the_masked_model(
    model: LoadedModel, window: Window, found: dict[Cell, Likelihood]
) -> None:
    with LocalEngine(model) as engine:
        node = engine.compress_tokens(window.context_ids, policy=POLICY)
        manifest = engine.manifest(node)
        with engine.store.open_get(node.node_id, tier="0.2") as reader:
            cache = assemble(reader.manifest, reader.tier, reader)

    def kept(_tier: str, layer: int) -> Tensor:
        mask = torch.zeros(model.spec.num_kv_heads, 150, dtype=torch.bool)
        for head in range(model.spec.num_kv_heads):
            mask[head, cache.layers[layer].head(head)[2].long()] = True
        return mask

    ids = [*window.context_ids, window.next_id, *window.answer_ids]
    rest = oracle.Block(150, len(ids), view=("0.2",))
    full, masked = (
        oracle.logits(model.model, model.spec, ids, [block, rest])[150:190].log_softmax(-1)
        for block in (oracle.Block(0, 150), oracle.Block(0, 150, kept=kept))
    )
    low = found[LOW]
    assert low.nll == pytest.approx(nll(masked, window), abs=TOLERANCE)
    assert abs(low.nll - found[FULL_CELL].nll) > 10 * TOLERANCE
    kl = float((full.exp() * (full - masked)).sum(-1).mean())
    assert low.kl == pytest.approx(kl, rel=1e-3)
    assert low.kl > 0.1
    same = (full.argmax(-1) == masked.argmax(-1)).float().mean()
    assert low.agreement == pytest.approx(float(same))
    assert low.kept == manifest.tier_entries()[manifest.tier_index("0.2")] / manifest.full_entries
    assert low.kept_bytes == manifest.tier_bytes()[manifest.tier_index("0.2")]


@pytest.mark.parametrize(("size", "batches"), [(0, [1, 1, 1]), (2, [2, 1]), (3, [3])])
def test_batches_of_any_size_say_the_same(
    model: LoadedModel,
    window: Window,
    size: int,
    batches: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What each cache says alone."""
    with LocalEngine(model) as engine:
        readings = read_each(engine, window.context_ids, [LOW, FULL_CELL, TOP])
        caches = {cell: reading.cache(engine) for cell, reading in readings.items()}
    own, sizes = forced.answer_logprobs, []
    asked = [window.next_id], window.answer_ids
    alone = {cell: own(model, [cache], *asked)[0] for cell, cache in caches.items()}

    def noting(model: LoadedModel, caches: list[RaggedCache], *rest: Any) -> Tensor:
        sizes.append(len(caches))
        return own(model, caches, *rest)

    monkeypatch.setattr(forced, "answer_logprobs", noting)
    monkeypatch.setattr(forced, "LOGIT_BYTES", size * 4 * 40 * model.model.config.vocab_size)
    rows = dict(forced.forced(model, caches.items(), *asked))
    assert list(rows) == [LOW, FULL_CELL, TOP]
    assert sizes == batches
    for cell, row in rows.items():
        torch.testing.assert_close(row, alone[cell], rtol=TOLERANCE, atol=TOLERANCE)
    assert not torch.allclose(rows[LOW], rows[FULL_CELL], atol=0.1)


def test_windows_are_pieces_of_the_text_that_do_not_overlap(
    model: LoadedModel, tmp_path: Path
) -> None:
    text = "".join(f"{n:05d}" for n in range(400))
    (tmp_path / "inaugural.txt").write_text(text)
    windows = list(Windows(model, tmp_path).take(10, 100, continuation=30, seed=3))
    starts = set()
    for number, window in enumerate(windows):
        ids = (*window.context_ids, window.next_id, *window.answer_ids)
        assert len(window.context_ids) == 100
        assert len(window.answer_ids) == 30
        assert window.name == f"perplexity-100-{number}"
        said = window.example(model)
        assert said.context == model.chat.decode(ids)
        assert (said.name, said.questions, said.length) == (window.name, (), 100)
        starts.add(text.index(said.context))
    assert len(starts) == 10
    assert all(start % 131 == 0 for start in starts)
    assert windows[:4] == list(Windows(model, tmp_path).take(4, 100, continuation=30, seed=3))
    assert windows != list(Windows(model, tmp_path).take(10, 100, continuation=30, seed=4))
    with pytest.raises(ConfigError, match="15 windows"):
        next(Windows(model, tmp_path).take(16, 100, continuation=30))


def test_a_context_begins_as_the_tokenizer_begins_a_text() -> None:
    model = make_model()
    bos = model.tokenizer.bos_token_id
    plain = next(Windows(model).take(1, 50, continuation=5))
    assert bos not in plain.context_ids
    model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    window = next(Windows(model).take(1, 50, continuation=5))
    assert window.context_ids.count(bos) == 1
    assert window.context_ids[0] == bos
    assert len(window.context_ids) == 50


@pytest.fixture
def meter(model: LoadedModel) -> Iterator[Perplexity]:
    made = Perplexity(model)
    yield made
    made.close()


def test_no_more_windows_and_policies_than_there_are(meter: Perplexity, window: Window) -> None:
    with pytest.raises(PolicyError):
        meter.check([Cell("snapkw", "0.2")])
    running = meter.measure(window, [LOW, TOP])
    assert next(running)[0] == LOW
    running.close()  # type: ignore[attr-defined]
    assert len(meter._store) == 0


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_what_is_not_finite_is_an_error(
    model: LoadedModel, window: Window, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the cell, not a KL of 0; those before it stand."""
    own = forced.answer_logprobs

    def broken(*given: Any) -> Tensor:
        rows = own(*given)
        rows[1, -1, 3] = value
        return rows

    monkeypatch.setattr(forced, "answer_logprobs", broken)
    meter = Perplexity(model)
    found = meter.measure(window, [FULL_CELL, LOW])
    assert next(found)[0] == FULL_CELL
    with pytest.raises(NumericsError, match=rf"{POLICY} at tier 0\.2: log probabilities"):
        next(found)
    meter.close()
