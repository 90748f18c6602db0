"""Decode requests name the chain, so that routing can prefer who holds it."""

from __future__ import annotations

from typing import Any

from criticalkv.services.gateway.chat import _hint
from criticalkv.shared.requests import MAX_ANCESTORS_HINT


def ask(gateway: Any, text: str, **own: Any) -> dict[str, Any]:
    answer = gateway.chat([{"role": "user", "content": text}], criticalkv=own)
    assert answer.status_code == 200, answer.text
    return answer.json()["criticalkv"]  # type: ignore[no-any-return]


def test_a_turn_names_its_parents_ancestors_root_first(gateway: Any) -> None:
    turns = [ask(gateway, "one")]
    for text in ("two", "three"):
        turns.append(ask(gateway, text, context_id=turns[-1]["handle"]))
    ids = [turn["node_id"] for turn in turns]
    asked = [(r.parent, r.ancestors_hint) for r in gateway.workers.decodes]
    assert asked == [(None, ()), (ids[0], ()), (ids[1], (ids[0],))]


def test_of_a_long_chain_the_root_and_the_end_are_named() -> None:
    chain = tuple(map(str, range(100)))
    assert _hint(chain) == ("0", *chain[-(MAX_ANCESTORS_HINT - 1) :])
    assert _hint(chain[:MAX_ANCESTORS_HINT]) == chain[:MAX_ANCESTORS_HINT]
