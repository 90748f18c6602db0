"""The comparison of codecs: cells are of the right tier and codec, and the best ones are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from criticalkv.services.bench.codec import CODECS, QUESTIONS, Samples, best, closeness
from criticalkv.shared.model.loader import LoadedModel

ANSWER = 4


@pytest.fixture(scope="module")
def found(tiny_model: Callable[..., LoadedModel]) -> dict[str, Any]:
    return closeness(tiny_model(), contexts=1, questions=2, tokens=300, answer_tokens=ANSWER)


def test_quantized_caches_are_compared_with_the_unquantized_one(found: dict[str, Any]) -> None:
    assert found["prompts"] == 2
    for codec in CODECS[1:]:
        samples = found["codecs"][codec]
        assert samples["same"]["cases"] == samples["kl"]["cases"] == 2
        assert len(samples["flips"]) == round(2 * (1 - samples["same"]["mean"]))
        assert all(0 <= flip["token"] < ANSWER for flip in samples["flips"])
    assert 0 < found["codecs"]["int8"]["kl"]["mean"] < found["codecs"]["int4"]["kl"]["mean"]


def test_the_plane_has_every_tier_of_every_codec(found: dict[str, Any]) -> None:
    cells = {(cell["codec"], cell["tier"]): cell for cell in found["plane"]}
    tiers = [tier for codec, tier in cells if codec == "raw"]
    assert tiers[0] == "0.05"
    assert tiers[-1] == "1"
    assert list(cells) == [(codec, tier) for codec in CODECS for tier in tiers]
    assert cells["raw", "1"]["kl"]["mean"] == 0
    assert cells["raw", "0.05"]["kl"]["mean"] > 10 * cells["int8", "1"]["kl"]["mean"] > 0
    for codec in CODECS:
        sizes = [cells[codec, tier]["bytes"] for tier in tiers]
        assert sizes == sorted(set(sizes))
    for tier in tiers:
        assert cells["int4", tier]["bytes"] < cells["int8", tier]["bytes"]
        assert cells["int8", tier]["bytes"] < 0.6 * cells["raw", tier]["bytes"]
    sizes = found["pool_bytes"]
    assert sizes["int4"]["64"] < sizes["int8"]["64"] < sizes["raw"]["64"]


def test_a_tie_excuses_only_the_answer_that_it_parts() -> None:
    samples = Samples(same=[1.0, 0.0, 1.0, 0.0], flips=[(3, 0.3), (0, 0.019)])
    assert samples.same_or_tied == [1.0, 0.0, 1.0, 1.0]


def test_the_best_cells_are_those_that_none_beats() -> None:
    points = [(30, 3.0), (10, 5.0), (20, 6.0), (20, 4.0), (40, 3.0), (50, 0.0), (60, 1.0)]
    plane = [{"bytes": size, "kl": {"mean": kl}} for size, kl in points]
    kept = [(cell["bytes"], cell["kl"]["mean"]) for cell in best(plane)]
    assert kept == [(10, 5.0), (20, 4.0), (30, 3.0), (50, 0.0)]


def test_as_many_questions_as_a_hundred_prompts_over_ten_contexts_need() -> None:
    assert len(set(QUESTIONS)) == 10
