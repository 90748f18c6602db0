"""Context-only and context+question: what the policy sees, and what is answered."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from criticalkv.services.local import LocalEngine
from criticalkv.services.local.engine import LocalNode
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.model.loader import LoadedModel

CONTEXT = "Herons wade at dawn. " * 8


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.set_num_threads(1)
    return make_model()


def prompt(question: str) -> str:
    return f"<|im_start|>user\n{CONTEXT}\n\n{question}<|im_end|>\n<|im_start|>assistant\n"


def kept(engine: LocalEngine, node: LocalNode) -> list[list[int]]:
    with engine.store.open_get(node.node_id) as reader:
        cache = assemble(reader.manifest, reader.tier, reader)
    return [sorted(layer.positions.tolist()) for layer in cache.layers]


def test_at_tier_1_it_is_the_untouched_models_answer(model: LoadedModel) -> None:
    theirs = AutoModelForCausalLM.from_config(
        deepcopy(model.model.config), attn_implementation="sdpa"
    )
    theirs.load_state_dict(model.model.state_dict())
    theirs.eval()
    ids = model.chat.encode_template(prompt("Why?"))
    out = theirs.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with LocalEngine(model) as engine:
        turn = engine.ask_at_once(CONTEXT, "Why?", tier=1, max_tokens=12, ignore_eos=True)
        assert list(turn.token_ids) == out[0, len(ids) :].tolist()
        # And it goes on from there.
        assert engine.ask(turn, "And then?", max_tokens=3).token_ids


def test_the_question_decides_what_is_kept(model: LoadedModel) -> None:
    with LocalEngine(model) as engine:
        found = []
        for question in ("Why at dawn?", "Who wades?"):
            turn = engine.ask_at_once(
                CONTEXT, question, policy="snapkv:window=8", tier=0.3, max_tokens=2
            )
            node = LocalNode(engine.manifest(turn).ancestors[0], (), False)
            limit = len(model.chat.encode_template(prompt(""))) - 40
            found.append([[p for p in layer if p < limit] for layer in kept(engine, node)])
            n = len(model.chat.encode_template(prompt(question))) - 1
            assert engine.manifest(node).num_tokens == n
            assert len(kept(engine, node)[0]) == model.spec.num_kv_heads * int(0.3 * n)
        assert found[0] != found[1]
