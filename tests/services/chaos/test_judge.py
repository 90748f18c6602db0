"""The judge against transformers' own generation, and against planted answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from criticalkv.services.chaos.history import Ask, Record, Turn
from criticalkv.services.chaos.judge import Judge, KeptEntries
from criticalkv.services.chaos.model import make_model
from criticalkv.services.chaos.world import document
from criticalkv.services.evaluation.case import context_ids, question_ids
from criticalkv.services.evaluation.oracle import Greedy
from criticalkv.services.local import LocalEngine, LocalNode, LocalTurn
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.config import EvictionConfig, ModelConfig
from criticalkv.shared.model.chat import Message, Part
from criticalkv.shared.model.loader import LoadedModel, load_model

POLICY = "window+adakv+twostage"
DOCUMENTS = [document(1), document(2)]
QUESTIONS = ("Which one?", "Go on.", "Again.")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_model(tmp_path_factory.mktemp("tiny"), seed=3)
    return load_model(ModelConfig(path=str(folder)), threads=1)


class Talk:
    """A conversation with our engines, as the service holds it."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.engine = LocalEngine(model, eviction=EvictionConfig(store_tier="1"))
        self.nodes: list[LocalNode] = []
        self.kept: dict[tuple[int, str], KeptEntries] = {}
        for number, text in enumerate(DOCUMENTS):
            ids = context_ids(model.chat, text)
            self.nodes.append(self.engine.compress_tokens(ids, policy=POLICY, tier="1"))
            with self.engine.store.open_get(self.nodes[-1].node_id, tier="1") as reader:
                layers = assemble(reader.manifest, reader.tier, reader).layers
                self.kept[number, POLICY] = KeptEntries.of(reader.manifest, layers)

    def ask(self, number: int, tiers: tuple[str, ...], max_tokens: int) -> list[Record]:
        """Ask every question in turn; return what a client would note."""
        node: LocalNode | LocalTurn = self.nodes[number]
        turns: list[Turn] = []
        out = []
        for question, tier in zip(QUESTIONS, tiers, strict=False):
            pending = self.engine.manifest(node).pending_ids
            ids = [*pending, *self.prompt(question, len(turns))]
            turn = self.engine.generate(node, ids, tier=tier, max_tokens=max_tokens)
            text = self.model.chat.decode(turn.token_ids)
            asked = Turn(question, max_tokens)
            ask = Ask(number, POLICY, "handle", asked, before=tuple(turns))
            finish = "length" if len(turn.token_ids) == max_tokens else "stop"
            out.append(answer(ask, text, tier, finish))
            turns.append(replace(asked, tier=tier, answer=text))
            node = turn
        return out

    def prompt(self, question: str, turns: int) -> list[int]:
        chat = self.model.chat
        if not turns:
            return question_ids(chat, question)
        message = Message("user", (Part(question),))
        pieces = chat.continue_(("user", "assistant") * turns, False, [message])
        return [token for piece in pieces for token in piece.ids]


def answer(ask: Ask, text: str, tier: str, finish: str = "length") -> Record:
    return Record(
        0, 0, "north", "chat", "answer", 0.0, status=200, complete=True, finish=finish, text=text,
        tier=tier, ask=ask,
    )  # fmt: skip


@pytest.fixture(scope="module")
def talk(model: LoadedModel) -> Talk:
    return Talk(model)


@pytest.fixture
def judge(talk: Talk) -> Judge:
    return Judge(talk.model, DOCUMENTS, talk.kept)


TIERS = [("1", "1", "1"), ("0.05", "0.4", "0.1"), ("0.4", "0.05", "0.6")]


@pytest.mark.parametrize("tiers", TIERS, ids=str)
@pytest.mark.parametrize("max_tokens", [1, 9])
def test_our_engines_are_right(
    talk: Talk, judge: Judge, tiers: tuple[str, ...], max_tokens: int
) -> None:
    for number in range(len(DOCUMENTS)):
        for record in talk.ask(number, tiers, max_tokens):
            assert judge(record).wrong == ""


def test_at_tier_1_the_oracle_is_plain_generation(judge: Judge) -> None:
    model = judge.model
    turn = Turn("Which one?", 12)
    ids = [*context_ids(model.chat, DOCUMENTS[0]), *question_ids(model.chat, turn.question)]
    model.model.set_attn_implementation("sdpa")
    tokens = torch.tensor([ids])
    mask = torch.ones_like(tokens)  # token 0 is a line break, and would pass for padding
    out = model.model.generate(
        tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    model.model.set_attn_implementation("criticalkv")
    text = model.chat.decode(out[0, len(ids) :].tolist())
    finish = "length" if out.shape[1] == len(ids) + 12 else "stop"
    assert not judge(answer(Ask(0, POLICY, "handle", turn), text, "1", finish)).wrong


def test_every_other_answer_is_wrong(talk: Talk, judge: Judge) -> None:
    first, second, _ = talk.ask(0, ("0.1", "0.4", "1"), 9)
    foreign = talk.ask(1, ("0.1",), 9)[0]
    assert second.ask is not None
    assert first.text != foreign.text, "the texts do not tell documents apart"
    for planted in (
        replace(first, text=foreign.text),
        replace(first, text=first.text[:-1]),
        replace(first, text=first.text + "x"),
        replace(first, text=""),
        replace(first, finish="stop" if first.finish == "length" else "length"),
        replace(first, tier="1"),
        replace(second, tier="0.05"),
        replace(second, ask=replace(second.ask, before=())),
        replace(first, tier=""),
    ):
        assert judge(planted).wrong, planted


def test_a_cut_answer_is_a_beginning(talk: Talk, judge: Judge) -> None:
    whole = talk.ask(0, ("0.1",), 9)[0]
    cut = replace(whole, stream=True, cut=True, finish="", text=whole.text[:3])
    for right in (cut, replace(cut, tier=""), replace(cut, text="")):
        assert not judge(right).wrong
    for planted in (replace(cut, text="\n\n\n"), replace(cut, tier="", text="\n\n\n")):
        assert judge(planted).wrong


def test_stop_strings_cut_the_answer(talk: Talk, judge: Judge) -> None:
    whole = talk.ask(0, ("0.4",), 9)[0]
    assert whole.ask is not None
    stop = whole.text[2]
    at = whole.text.index(stop)
    ask = replace(whole.ask, stop=stop)
    assert not judge(replace(whole, ask=ask, text=whole.text[:at], finish="stop")).wrong
    assert judge(replace(whole, ask=ask)).wrong


def test_resent_history_is_a_stored_turn_or_runs_anew(judge: Judge) -> None:
    """With the tiers of the turns unknown, all that give the same text may be meant."""
    root = Ask(0, POLICY, "resent", Turn("Which one?", 6))
    said = judge._say(judge._root(root), judge._prompt(root), Turn("Which one?", 6, "0.1"))
    first = Turn("Which one?", 6, "0.1", judge._text(said.tokens))
    ask = replace(root, before=(first,), turn=Turn("Go on.", 9))
    at = replace(ask, turn=replace(ask.turn, tier="0.4"))
    chain = judge._chain(at)
    assert chain is not None
    found = judge._say(chain, judge._prompt(at), at.turn)
    anew = judge._anew(at)
    for right in (found, anew):
        finish = "stop" if right.ended else "length"
        assert not judge(answer(ask, judge._text(right.tokens), "0.4", finish)).wrong
    assert judge(answer(ask, "something else", "0.4")).wrong


def test_a_near_tie_is_exempt_from_where_it_is() -> None:
    said = Greedy((1, 2, 3), (1.0, 1e-4, 1.0), ended=False)
    assert said.clear(2e-3) == 1
    assert Greedy((1, 2), (1.0, 1.0), ended=False).clear(2e-3) == 2


def test_an_answer_after_a_near_tie_is_exempt_not_wrong(
    talk: Talk, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = talk.ask(0, ("0.1",), 9)[0]
    say = judge._say

    def unclear(*arguments: object) -> Greedy:
        said = say(*arguments)  # type: ignore[arg-type]
        return replace(said, margins=(*said.margins[:2], 1e-5, *said.margins[3:]))

    monkeypatch.setattr(judge, "_say", unclear)
    assert judge(record).exempt == ""
    assert judge(replace(record, text=record.text[:2] + "zz")).exempt == "near-tie"
    assert judge(replace(record, text="zz" + record.text[2:])).wrong


def test_a_response_goes_on_from_a_turn_that_is_known(judge: Judge) -> None:
    """Its first request carries the document, the later ones only a handle."""
    root = Ask(0, POLICY, "response", Turn("Which one?", 6, "0.1"))
    said = judge._say(judge._root(root), judge._prompt(root), root.turn)
    first = replace(root.turn, answer=judge._text(said.tokens))
    ask = replace(root, before=(first,), turn=Turn("Go on.", 9, "0.4"))
    (right,) = judge._candidates(ask)
    resent = replace(ask, form="resent")
    assert right in list(judge._candidates(resent))
    assert len(list(judge._candidates(resent))) >= 2
