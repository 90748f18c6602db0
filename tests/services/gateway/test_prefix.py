"""Answers that go on after what the client says they begin with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.prompt import Setting, first_prompt, gold_messages, gold_prompt
from criticalkv.shared.errors import WorkerLostError
from criticalkv.shared.model.chat import Message as Said

Message = dict[str, Any]
GO_ON = {"add_generation_prompt": False, "continue_final_message": True}
ASK = {"role": "user", "content": "who?"}
PREFIX = {"role": "assistant", "content": "It is"}
BEGUN = "<|im_start|>assistant\nIt is"
EXAMPLE = Example(
    "task",
    "task-0",
    "d" * 70,
    (
        Question("\nq0?", ("a0",), "string_match_all", 8, " Answer:"),
        Question("q1?", ("a1", "b1"), "string_match_all", 8, " Here:"),
    ),
)


def plain(message: Said) -> Message:
    """Spell a message as a client does."""
    parts: list[Message] = [{"type": "text", "text": part.text} for part in message.parts]
    for part, own in zip(message.parts, parts, strict=True):
        if part.breakpoint:
            own["prompt_cache_breakpoint"] = {"mode": "explicit"}
    return {"role": message.role, "content": parts}


def go_on(gateway: Any, messages: list[Message], **fields: Any) -> Any:
    answer = gateway.chat(messages, **GO_ON, **fields)
    assert answer.status_code == 200, answer.text
    return answer


def run_last(gateway: Any) -> str:
    ids = list(gateway.workers.decodes[-1].token_ids)
    return str(gateway.core.template._special.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("setting", ["context-only", "context+question"])
@pytest.mark.parametrize("index", [0, 1])
def test_the_tokens_are_those_that_an_evaluation_runs_itself(
    gateway: Any, setting: Setting, index: int
) -> None:
    question, chat = EXAMPLE.questions[index], gateway.core.template
    prefix = {"role": "assistant", "content": question.answer_prefix}
    messages = [plain(message) for message in gold_messages(EXAMPLE, index, setting)]
    go_on(gateway, [*messages, prefix], prompt_cache_options={"mode": "explicit"})
    expected = gold_prompt(chat, EXAMPLE, index, setting)
    (prefill,), (decode,) = gateway.workers.prefills, gateway.workers.decodes
    assert prefill.token_ids == expected.context_ids
    assert (decode.token_ids, decode.parent) == (expected.question_ids, prefill.node_id)
    assert decode.begun == len(question.answer_prefix)  # bytes are tokens here
    if not index:
        assert expected == first_prompt(chat, EXAMPLE, question, setting)


def test_the_answer_is_the_rest_and_the_turn_has_both(gateway: Any) -> None:
    gateway.workers.say = lambda _: " Ada."
    answer = go_on(gateway, [ASK, PREFIX]).json()
    assert answer["choices"][0]["message"]["content"] == " Ada."
    assert answer["usage"]["completion_tokens"] == len(" Ada.")
    turn = answer["criticalkv"]["node_id"]
    whole = {"role": "assistant", "content": "It is Ada."}
    then = {"role": "user", "content": "why?"}
    gateway.chat([ASK, whole, then])
    gateway.chat([then], criticalkv={"context_id": answer["id"]})
    assert [d.parent for d in gateway.workers.decodes[1:]] == [turn, turn]
    next_user = "<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert run_last(gateway) == next_user
    assert gateway.workers.decodes[1].token_ids == gateway.workers.decodes[2].token_ids
    for other in ("It is", " Ada.", "It is Ada"):
        gateway.chat([ASK, {**whole, "content": other}, then])
        assert gateway.workers.decodes[-1].parent is None


def test_without_the_fields_a_final_answer_is_closed(gateway: Any) -> None:
    assert gateway.chat([ASK, PREFIX]).status_code == 200
    assert run_last(gateway).endswith(f"{BEGUN}<|im_end|>\n<|im_start|>assistant\n")
    assert gateway.workers.decodes[-1].begun == 0


def test_parts_of_the_message_are_one_text(gateway: Any) -> None:
    parts = [{"type": "text", "text": text} for text in ("It", " is")]
    go_on(gateway, [ASK, {**PREFIX, "content": parts}])
    assert run_last(gateway) == f"<|im_start|>user\nwho?<|im_end|>\n{BEGUN}"


def test_special_tokens_in_it_are_text(gateway: Any) -> None:
    go_on(gateway, [ASK, {**PREFIX, "content": "<|im_end|>"}])
    decode, template = gateway.workers.decodes[-1], gateway.core.template
    assert list(decode.token_ids[-decode.begun :]) == template.encode_content("<|im_end|>")
    assert decode.begun == len("<|im_end|>")


@pytest.mark.parametrize("said", [[], [ASK]], ids=["prefix alone", "after a message"])
def test_it_follows_a_stored_context_and_a_stored_turn(gateway: Any, said: list[Message]) -> None:
    context = gateway.post("/v1/contexts", {"text": "d" * 80}).json()["id"]
    asked = "\n\nwho?" if said else ""
    answer = go_on(gateway, [*said, PREFIX], criticalkv={"context_id": context}).json()
    assert run_last(gateway) == f"{asked}<|im_end|>\n{BEGUN}"
    go_on(gateway, [*said, PREFIX], criticalkv={"context_id": answer["id"]})
    asked = "<|im_start|>user\nwho?<|im_end|>\n" if said else ""
    assert run_last(gateway) == f"<|im_end|>\n{asked}{BEGUN}"
    assert gateway.workers.decodes[-1].parent == answer["criticalkv"]["node_id"]


def test_a_long_suffix_is_not_cut_before_it(gateway: Any) -> None:
    """Else the question, not the answer's first words, would be compressed."""
    document = {"type": "text", "text": "d" * 70, "prompt_cache_breakpoint": {"mode": "explicit"}}
    user = {"role": "user", "content": [document, {"type": "text", "text": "q" * 30}]}
    go_on(gateway, [user, {**PREFIX, "content": "p" * 20}])
    assert gateway.workers.decodes[-1].begun == 20
    assert run_last(gateway).startswith("q" * 30)
    go_on(gateway, [user, {**PREFIX, "content": "p" * 90}])
    decode = gateway.workers.decodes[-1]
    assert len(decode.token_ids) == decode.begun == 64  # the rest went to prefill


def test_every_choice_goes_on_after_it_whoever_dies(gateway: Any) -> None:
    workers = gateway.workers
    workers.say = lambda request: f" {request.sampling.seed}!"
    workers.fail_with = WorkerLostError("died")

    def fail(after: int | None) -> None:
        workers.fail_after = after

    workers.before_decode = [lambda: fail(1), lambda: fail(None)]
    text = go_on(gateway, [ASK, PREFIX], n=2, seed=5, stream=True).text
    assert text.endswith("data: [DONE]\n\n")
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    said = {
        i: "".join(c["delta"].get("content", "") for c in choices if c["index"] == i)
        for i in (0, 1)
    }
    assert said == {0: " 5!", 1: " 6!"}
    first, *others = workers.decodes
    assert [len(other.emitted) for other in others] == [1, 1]
    assert {(d.token_ids, d.begun) for d in others} == {(first.token_ids, len("It is"))}
    for choice in choices[:2]:
        handle = choice["criticalkv"]["handle"]
        gateway.chat([ASK], criticalkv={"context_id": handle})
        turn = workers.decodes[-1].parent
        again = {"role": "assistant", "content": f"It is{said[choice['index']]}"}
        gateway.chat([ASK, again, ASK])
        assert workers.decodes[-1].parent == turn
