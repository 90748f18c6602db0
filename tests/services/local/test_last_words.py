"""Turns that ran the same tokens but ended in other words are different nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from criticalkv.services.local import LocalEngine
from criticalkv.shared.identity import tokens_digest
from criticalkv.shared.model.loader import LoadedModel

DOCUMENT = list(range(32, 92))
QUESTION = [41, 42, 43]


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_another_last_word_is_another_node(
    tiny_model: Callable[..., LoadedModel], max_tokens: int
) -> None:
    """The last word has no KV yet: both turns hold the KV of the very same tokens."""
    with LocalEngine(tiny_model()) as engine:
        context = engine.compress_tokens(DOCUMENT, policy="default")
        said = {}
        for seed in range(40):
            turn = engine.generate(
                context, QUESTION, max_tokens=max_tokens, temperature=2.0, seed=seed
            )
            manifest = engine.manifest(turn)
            assert manifest.pending_ids[: len(manifest.pending_ids) - closing(engine)] == tuple(
                turn.token_ids[manifest.num_tokens - len(QUESTION) :]
            ), "the next turn would go on from words of another one"
            said[turn.token_ids] = turn.node_id
        assert len(set(said.values())) == len(said) > 5


def closing(engine: LocalEngine) -> int:
    return len(engine.model.chat.closing_ids)


def test_what_is_pending_is_part_of_the_digest_and_apart_from_the_tokens() -> None:
    digests = {
        tokens_digest([1, 2, 3]),
        tokens_digest([1, 2], [3]),
        tokens_digest([1], [2, 3]),
        tokens_digest([1, 2], [4]),
        tokens_digest([1, 2]),
    }
    assert len(digests) == 5
    assert tokens_digest([1, 2], []) == tokens_digest([1, 2])
