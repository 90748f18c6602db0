"""Answers in this process: of one prefill, and the ones that the untouched model gives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from near_ties import noting_margins
from tiny_models import make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from criticalkv.services.decode.engine import DecodeEngine
from criticalkv.services.evaluation import local_answerer, oracle
from criticalkv.services.evaluation.answer import FULL_CELL, Answer, Answers, Cell, History
from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.local_answerer import LocalAnswerer, wide
from criticalkv.services.evaluation.prompt import (
    Prompt,
    Setting,
    first_prompt,
    gold_prompt,
    next_ids,
)
from criticalkv.services.local import LocalEngine, LocalTurn
from criticalkv.services.local.memory_store import MemoryStore
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.config import DecodeConfig
from criticalkv.shared.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    NumericsError,
    PolicyError,
)
from criticalkv.shared.model.loader import LoadedModel

TOLERANCE = 1e-3
"""Logits nearer than this may change their order between two correct forwards."""
WINDOW = "snapkv:window=8"
STEPWISE = "snapkv:window=8,interval=40,keep=0.5"
POLICIES = ("default", WINDOW, "window+model+critical:window=8", WINDOW + ",codec=int8")
COMPRESSED = [Cell(policy, tier) for policy in POLICIES for tier in ("0.2", "0.4")]
CELLS = [FULL_CELL, *COMPRESSED, Cell(STEPWISE, "1")]


def question(text: str, **more: Any) -> Question:
    return Question(text, ("at dawn",), "string_match_all", 9, **more)


EXAMPLE = Example(
    "herons",
    "herons-1",
    "Blue herons wade at dawn; grey ones rest. " * 4,
    (
        question("\n\nWhen?", answer_prefix="They wade"),
        question("And who rests?"),
        question("Are you sure?", answer_prefix="Yes,"),
    ),
)
ONE = replace(EXAMPLE, questions=EXAMPLE.questions[:1])
Make = Callable[..., LocalAnswerer]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    torch.set_num_threads(1)
    return make_model()


@pytest.fixture(scope="module")
def theirs(model: LoadedModel) -> PreTrainedModel:
    """An untouched model: transformers' own attention and cache."""
    made = AutoModelForCausalLM.from_config(
        deepcopy(model.model.config), attn_implementation="sdpa"
    )
    made.load_state_dict(model.model.state_dict())
    return made.eval()


@pytest.fixture
def make(model: LoadedModel) -> Iterator[Make]:
    made: list[LocalAnswerer] = []

    def build(**options: Any) -> LocalAnswerer:
        made.append(LocalAnswerer(model, **options))
        return made[-1]

    yield build
    for answerer in made:
        answerer.close()


def answers(answerer: LocalAnswerer, example: Example, cells: list[Cell]) -> dict[Cell, Answers]:
    found = list(answerer.answer(example, cells))
    assert sorted(cell for cell, _ in found) == sorted(cells)
    return dict(found)


@contextmanager
def counting_contexts(model: LoadedModel, least: int = 100) -> Iterator[list[int]]:
    """Note each forward of at least so many tokens from position 0 on."""
    seen: list[int] = []

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs["position_ids"][0]
        if positions.numel() >= least and int(positions[0]) == 0:
            seen.append(positions.numel())

    hook = model.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def assert_greedy(theirs: PreTrainedModel, model: LoadedModel, ids: list[int], said: Answer) -> int:
    """Equal to their greedy generation up to the first near tie; return the tokens compared."""
    out = theirs.generate(
        torch.tensor([ids]),
        max_new_tokens=9,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = out.sequences[0, len(ids) :].tolist()
    top = torch.cat(out.logits).topk(2).values
    near = (top[:, 0] - top[:, 1] <= TOLERANCE).tolist()
    clear = near.index(True) if True in near else len(tokens)
    ended = tokens[-1] in model.spec.eos_token_ids
    tokens = tokens[:-1] if ended else tokens
    assert list(said.token_ids[:clear]) == tokens[:clear]
    if clear >= len(tokens):
        assert len(said.token_ids) == len(tokens)
        assert said.finish_reason == ("stop" if ended else "length")
    return min(clear, len(tokens))


def after(model: LoadedModel, ids: list[int], said: Answer, asked: Question) -> list[int]:
    """The conversation's tokens after an answer and one more question."""
    chat = model.chat
    return [*ids, *said.token_ids, *chat.closing_ids, *next_ids(chat, asked)]


@pytest.mark.parametrize("policy", ["full", "default", WINDOW, STEPWISE.replace("0.5", "1")])
def test_tier_1_says_what_transformers_says_turn_after_turn(
    model: LoadedModel, theirs: PreTrainedModel, make: Make, policy: str
) -> None:
    cell = Cell(policy, "1")
    found = answers(make(kl=False), EXAMPLE, [cell])[cell]
    ids = whole(first_prompt(model.chat, EXAMPLE, EXAMPLE.questions[0], "context-only"))
    compared = 0
    for said, following in zip(found, (*EXAMPLE.questions[1:], None), strict=True):
        compared += assert_greedy(theirs, model, ids, said)
        if following is not None:
            ids = after(model, ids, said, following)
    assert compared >= 20


def whole(prompt: Prompt) -> list[int]:
    return [*prompt.context_ids, *prompt.question_ids]


@pytest.mark.parametrize("history", ["gold", "none"])
@pytest.mark.parametrize("setting", get_args(Setting))
def test_each_question_after_right_answers_or_alone(
    model: LoadedModel, theirs: PreTrainedModel, make: Make, history: History, setting: Setting
) -> None:
    with counting_contexts(model) as contexts:
        found = answers(make(history=history, setting=setting, kl=False), EXAMPLE, [FULL_CELL])
    alone = history == "none" and setting == "context+question"
    assert len(contexts) == (3 if alone else 1)
    compared = 0
    for i, said in enumerate(found[FULL_CELL]):
        gold = gold_prompt(model.chat, EXAMPLE, i, setting)
        one = first_prompt(model.chat, EXAMPLE, EXAMPLE.questions[i], setting)
        compared += assert_greedy(theirs, model, whole(gold if history == "gold" else one), said)
    assert compared >= 20


def kept_by(model: LoadedModel, ids: tuple[int, ...], policy: str) -> oracle.Kept:
    """Which tokens of the context each head keeps at a tier, by a node made alone."""
    engine = LocalEngine(model)
    node = engine.compress_tokens(ids, policy=policy)
    engine.close()

    def kept(tier: str, layer: int) -> Tensor:
        with engine.store.open_get(node.node_id, tier=tier) as reader:
            cache = assemble(reader.manifest, tier, reader)
        mask = torch.zeros(model.spec.num_kv_heads, len(ids), dtype=torch.bool)
        for head in range(model.spec.num_kv_heads):
            mask[head, cache.layers[layer].head(head)[2].long()] = True
        return mask

    return kept


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_a_compressed_cell_says_what_the_masked_model_says(
    model: LoadedModel, make: Make, policy: str
) -> None:
    """And its KL to the full cache is that of the masked model."""
    cell = Cell(policy, "0.2")
    found = answers(make(), EXAMPLE, [cell, Cell(policy, "0.4"), FULL_CELL])
    prompt = first_prompt(model.chat, EXAMPLE, EXAMPLE.questions[0], "context-only")
    n, ids, compared = len(prompt.context_ids), whole(prompt), 0
    context = oracle.Block(0, n, kept=kept_by(model, prompt.context_ids, policy))
    for said, following in zip(found[cell], (*EXAMPLE.questions[1:], None), strict=True):
        blocks = [context, oracle.Block(n, len(ids), view=("0.2",))]
        right = oracle.greedy(model.model, model.spec, ids, blocks, 9)
        clear = right.clear(TOLERANCE)
        assert said.token_ids[:clear] == right.tokens[:clear]
        compared += min(clear, len(right.tokens))
        if following is not None:
            ids = after(model, ids, said, following)
    assert compared >= 20
    said = found[FULL_CELL][0]
    assert len(said.token_ids) == 9  # none of them ended it
    expected = masked_kl(model, prompt, said.token_ids, context)
    assert found[cell][0].kl == pytest.approx(expected, rel=1e-3)
    assert expected > 0.1


def masked_kl(
    model: LoadedModel, prompt: Prompt, answer: tuple[int, ...], context: oracle.Block
) -> float:
    """KL(untouched ‖ masked) over an answer."""
    ids = [*whole(prompt), *answer]
    rows = slice(len(whole(prompt)) - 1, len(ids) - 1)
    turn = oracle.Block(context.end, len(ids), view=("0.2",))
    full, masked = (
        oracle.logits(model.model, model.spec, ids, blocks)[rows].log_softmax(-1)
        for blocks in ([replace(context, kept=None), turn], [context, turn])
    )
    return float((full.exp() * (full - masked)).sum(-1).mean())


def test_kl_is_over_the_first_tokens_of_an_answer(
    model: LoadedModel, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_answerer, "KL_TOKENS", 4)
    cell = Cell(WINDOW, "0.2")
    found = answers(make(), ONE, [cell, FULL_CELL])
    prompt = first_prompt(model.chat, ONE, ONE.questions[0], "context-only")
    context = oracle.Block(
        0, len(prompt.context_ids), kept=kept_by(model, prompt.context_ids, WINDOW)
    )
    said = found[FULL_CELL][0].token_ids
    first, whole_answer = (masked_kl(model, prompt, x, context) for x in (said[:4], said))
    assert found[cell][0].kl == pytest.approx(first, rel=1e-3)
    assert first != pytest.approx(whole_answer, rel=0.01)


def test_one_forward_serves_every_cell(
    model: LoadedModel, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only turns that something follows are stored."""
    stored: list[str] = []
    publish = MemoryStore.publish

    def noting(self: MemoryStore, node_id: str, *rest: Any) -> bool:
        stored.append(node_id)
        return publish(self, node_id, *rest)

    monkeypatch.setattr(MemoryStore, "publish", noting)
    cells = CELLS[:-1]
    with counting_contexts(model) as contexts:
        answers(make(), EXAMPLE, cells)
    assert len(contexts) == 1
    assert len(stored) == len({cell.policy for cell in cells}) + 2 * len(cells)


def test_what_an_answer_says_of_its_cache(model: LoadedModel, make: Make) -> None:
    found = answers(make(), EXAMPLE, CELLS)
    prompt = first_prompt(model.chat, EXAMPLE, EXAMPLE.questions[0], "context-only")
    with LocalEngine(model) as engine:
        for cell, said in found.items():
            policy = "dense" if cell == FULL_CELL else cell.policy
            manifest = engine.manifest(engine.compress_tokens(prompt.context_ids, policy=policy))
            at = manifest.tier_index(cell.tier)
            for one in said:
                assert one.tier == cell.tier
                assert one.kept == manifest.tier_entries()[at] / manifest.full_entries
                assert one.kept_bytes == manifest.tier_bytes()[at]
            assert [one.kl is None for one in said] == [False, True, True]
    assert found[FULL_CELL][0].kl == 0
    assert found[FULL_CELL][0].kept == 1
    assert found[Cell(WINDOW, "0.2")][0].kept == pytest.approx(0.2, abs=0.01)
    assert found[Cell(STEPWISE, "1")][0].kept == pytest.approx(0.5, abs=0.01)


def test_kl_needs_no_cell_of_the_full_cache(make: Make) -> None:
    cell = Cell(WINDOW, "0.4")
    with_full = answers(make(), EXAMPLE, [cell, FULL_CELL])[cell]
    without = answers(make(), EXAMPLE, [cell])[cell]
    assert without[0].kl == pytest.approx(with_full[0].kl, rel=1e-4)
    assert answers(make(kl=False), EXAMPLE, [cell])[cell][0].kl is None


@pytest.mark.parametrize("history", get_args(History))
def test_a_cell_alone_says_what_it_says_among_many(make: Make, history: History) -> None:
    with noting_margins() as margins:
        together = answers(make(history=history, kl=False), EXAMPLE, CELLS)
        alone = make(history=history, kl=False, decode=DecodeConfig(max_num_seqs=1))
        for cell in CELLS[::3]:
            said = answers(alone, EXAMPLE, [cell])[cell]
            assert [x.token_ids for x in said] == [x.token_ids for x in together[cell]]
    assert min(margins) > 1e-4, "a near tie: another text is needed"


def test_nothing_is_left_of_an_example(make: Make) -> None:
    answerer = make()
    for number in range(4):
        example = replace(EXAMPLE, name=str(number), context=f"{number}. {EXAMPLE.context}")
        answers(answerer, example, CELLS)
        assert_nothing_left(answerer)
    running = answerer.answer(EXAMPLE, CELLS)
    next(running)
    running.close()
    assert_nothing_left(answerer)
    assert answerer._engine.decode.in_flight == 0


def assert_nothing_left(answerer: LocalAnswerer) -> None:
    until = time.monotonic() + 30
    pages = answerer._engine.decode.pages
    while pages.free < pages.total and time.monotonic() < until:
        time.sleep(0.01)
    assert pages.free == pages.total
    assert len(answerer._store) == 0


def test_a_context_that_is_too_long_harms_no_other(model: LoadedModel, make: Make) -> None:
    answerer = make()
    before = answers(answerer, EXAMPLE, CELLS)
    with counting_contexts(model) as contexts, pytest.raises(ContextLengthError):
        answers(answerer, replace(EXAMPLE, context="x" * model.spec.max_positions), CELLS)
    assert not contexts
    endless = replace(EXAMPLE.questions[0], max_tokens=model.spec.max_positions)
    with pytest.raises(ContextLengthError):
        answers(answerer, replace(EXAMPLE, questions=(endless,)), CELLS)
    assert_nothing_left(answerer)
    assert len(answers(answerer, EXAMPLE, CELLS)) == len(before)


@pytest.mark.parametrize("release_s", [0.0, 0.3])
def test_when_one_cell_fails_nobody_waits_for_the_others(
    make: Make, monkeypatch: pytest.MonkeyPatch, release_s: float
) -> None:
    generate, release = LocalEngine.generate, DecodeEngine._release

    def slowly(*args: Any) -> None:
        """What is released after its sequence has ended must go as well."""
        time.sleep(release_s)
        release(*args)

    monkeypatch.setattr(DecodeEngine, "_release", slowly)

    def failing(self: LocalEngine, *args: Any, **options: Any) -> LocalTurn:
        if options["tier"] == "0.2":
            raise NumericsError("not a number")
        return generate(self, *args, ignore_eos=True, **options)

    monkeypatch.setattr(LocalEngine, "generate", failing)
    endless = replace(EXAMPLE.questions[0], max_tokens=1500)
    cells = [Cell(WINDOW, tier) for tier in ("0.2", "0.4", "0.6")]
    answerer = make(kl=False)
    with noting_margins() as drawn, pytest.raises(NumericsError):
        answers(answerer, replace(EXAMPLE, questions=(endless,)), cells)
    assert_nothing_left(answerer)
    assert len(drawn) < 1500


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Turns at tier 0.2 and of the full cache end when this is set; at last they set it."""
    generate, released = LocalEngine.generate, threading.Event()

    def hang(self: LocalEngine, *args: Any, **options: Any) -> LocalTurn:
        if options["tier"] != "0.4":
            released.wait(15)
            released.set()
        return generate(self, *args, **options)

    monkeypatch.setattr(LocalEngine, "generate", hang)
    monkeypatch.setattr(local_answerer, "END_S", 0.1)
    yield released
    released.set()


@pytest.mark.parametrize("kl", [False, True])
def test_an_answer_that_never_comes_ends_the_example(
    make: Make, hanging: threading.Event, kl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_answerer, "TURN_S", 0.1)
    answerer = make(kl=kl)
    with pytest.raises(DeadlineError, match="no answer within") as caught:
        answers(answerer, EXAMPLE, [Cell(WINDOW, "0.2")])
    [note] = caught.value.__notes__
    assert "still run" in note  # which does not hide why they were given up
    answerer.close()
    assert not hanging.is_set()


def test_what_is_given_up_and_does_not_end_is_an_error(
    model: LoadedModel, hanging: threading.Event
) -> None:
    answerer = LocalAnswerer(model, kl=False)
    running = answerer.answer(ONE, [Cell(WINDOW, tier) for tier in ("0.2", "0.4")])
    assert next(running)[0].tier == "0.4"
    with pytest.raises(DeadlineError, match="still run after"):
        running.close()  # type: ignore[attr-defined]
    answerer.close()
    assert not hanging.is_set()


def test_what_is_still_decoded_is_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    answerer = make(kl=False)
    monkeypatch.setattr(local_answerer, "END_S", 0.1)
    monkeypatch.setattr(DecodeEngine, "in_flight", 1)
    with pytest.raises(DeadlineError, match="still run after"):
        answers(answerer, ONE, [FULL_CELL])


def test_more_is_decoded_together_than_a_service_does() -> None:
    assert wide(DecodeConfig()) == DecodeConfig(
        max_num_seqs=64, max_num_batched_tokens=2048, pool_mb=4096
    )
    given = DecodeConfig(max_num_seqs=128, max_num_batched_tokens=4096, pool_mb=9, page_size=32)
    assert wide(given) == given
    default = DecodeConfig().pool_mb
    assert wide(DecodeConfig(pool_mb=default)).pool_mb == default


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        (Cell("full", "0.5"), InvalidRequestError),
        (Cell(STEPWISE, "0.5"), InvalidRequestError),
        (Cell(WINDOW, "0"), InvalidRequestError),
        (Cell("snapkw", "0.5"), PolicyError),
        (Cell("headkv:profile=" + 64 * "a", "0.5"), PolicyError),
    ],
    ids=lambda value: getattr(value, "policy", ""),
)
def test_cells_that_cannot_be_asked_are_refused(
    make: Make, cell: Cell, error: type[Exception]
) -> None:
    answerer = make()
    answerer.check(CELLS)
    with pytest.raises(error):
        answerer.check([*CELLS, cell])
