"""An answerer that asks a running service, with requests that any client could send."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ValidationError

from criticalkv.services.evaluation.answer import FULL, Answer, Answers, Cell, History
from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.failure import bounded
from criticalkv.services.evaluation.loop_thread import LoopThread
from criticalkv.services.evaluation.prompt import Setting, first_message, gold_messages
from criticalkv.services.evaluation.reading import checked_tier
from criticalkv.shared.api_key import check_api_key
from criticalkv.shared.errors import (
    CriticalKVError,
    ModelNotFoundError,
)
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import POLICY_DENSE
from criticalkv.shared.model.chat import Message, Part

FULL_POLICY = "streamingllm"
"""Cheap; at tier 1 every policy keeps everything."""
RETRIES = 20
"""Of a request that a full or failing service refused, as long as there is time."""
FEW_RETRIES = 2
"""To learn whether there is a service at all."""


@dataclass(frozen=True)
class _Asking:
    """How a cell is asked.

    Attributes:
        policy: in its full form; one prefill serves all cells that have it.
        store_tier: highest tier of these cells.
        read_tier: this cell's own.
    """

    cell: Cell
    policy: str
    store_tier: str
    read_tier: str

    @property
    def extension(self) -> dict[str, str]:
        """The request's fields that say how; a policy that is named alone is final."""
        return {
            "policy": self.policy,
            "store_tier": self.store_tier,
            "read_tier": self.read_tier,
            "turn_policy": POLICY_DENSE,
        }


@dataclass(frozen=True)
class Reply:
    """An answer, and the id that goes on from it."""

    answer: Answer
    handle: str
    published: bool


class ServiceAnswerer:
    """See Answerer. Token ids and KL are unknown.

    Two things are as the service is configured: a cell reads the highest stored tier that is
    not above its own, or else the lowest, which the answer's `tier` says; and a question of
    more tokens than `gateway.decode_max_suffix_tokens`, its answer's prefix included, or a
    conversation of more nodes than `eviction.fold_after`, is compressed, too.

    Args:
        base_url: of the service's API, with its `/v1`.
        api_key: of the service.
        model: its name there.
        setting: whether policies see the first question.
        history: what later questions follow.
        concurrency: most requests at once.
        timeout_s: longest time until an answer has come, retries included.

    Raises:
        ConfigError: if no request can carry the key.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        model: str,
        *,
        setting: Setting = "context-only",
        history: History = "model",
        concurrency: int = 4,
        timeout_s: float = 600.0,
    ) -> None:
        self._client = AsyncOpenAI(
            base_url=base_url,
            api_key=check_api_key(api_key),
            timeout=timeout_s,
            max_retries=RETRIES,
        )
        self._model = model
        self._setting: Setting = setting
        self._history: History = history
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(concurrency)
        self._loop = LoopThread()

    def close(self) -> None:
        """Cancel what runs, and close the connections."""
        self._loop.close(self._client.close())

    def check(self, cells: Sequence[Cell]) -> None:
        """See Answerer; the service must be there, and serve the model."""
        _askings(cells)
        self._loop.start(self._check_model()).result()

    def answer(self, example: Example, cells: Iterable[Cell]) -> Iterator[tuple[Cell, Answers]]:
        """See Answerer."""
        first: dict[str, asyncio.Event] = {}
        running: dict[Future[Answers], Cell] = {}
        try:
            for asking in _askings(tuple(dict.fromkeys(cells))):
                leads = asking.policy not in first
                prefilled = first.setdefault(asking.policy, asyncio.Event())
                work = self._ask_all(example, asking, prefilled, leads=leads)
                running[self._loop.start(work)] = asking.cell
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            for future in running:
                future.cancel()

    async def _check_model(self) -> None:
        what = "the service's models"
        client = self._client.with_options(max_retries=FEW_RETRIES)
        async with bounded(what, self._timeout_s):
            served = [model.id async for model in client.models.list()]
        if self._model not in served:
            raise ModelNotFoundError(f"{what}: {', '.join(served)}, not {self._model}")

    async def _ask_all(
        self, example: Example, asking: _Asking, prefilled: asyncio.Event, *, leads: bool
    ) -> Answers:
        """Ask a cell's questions; the first of all that its policy is asked goes alone."""
        if not leads:
            await prefilled.wait()  # ends: all that stands before it has a deadline
        replies: list[Reply] = []
        try:
            for index in range(len(example.questions)):
                replies.append(await self._ask(example, index, asking, replies))
                prefilled.set()
        finally:
            prefilled.set()
        return tuple(reply.answer for reply in replies)

    async def _ask(
        self, example: Example, index: int, asking: _Asking, before: Sequence[Reply]
    ) -> Reply:
        what = f"question {index + 1} under {asking.cell.policy} at tier {asking.cell.tier}"
        goes_on = bool(before) and self._history == "model"
        if goes_on and not before[-1].published:
            raise CriticalKVError(f"{what}: the service did not store the answer before it")
        context = {"context_id": before[-1].handle} if goes_on else {}
        body = _body(self._messages(example, index), example.questions[index])
        body["extra_body"]["criticalkv"] = asking.extension | context
        async with self._places, bounded(what, self._timeout_s):
            completion = await self._client.chat.completions.create(model=self._model, **body)
        reply = _reply(what, completion)
        return same_context(what, reply, before[0].answer) if goes_on else reply

    def _messages(self, example: Example, index: int) -> list[Message]:
        """Return what a question's request says, up to the question."""
        question = example.questions[index]
        if self._history == "gold":
            return gold_messages(example, index, self._setting)
        if self._history == "none" or not index:
            return [first_message(example, question, self._setting)]
        return [Message("user", (Part(question.text),))]


def _askings(cells: Sequence[Cell]) -> list[_Asking]:
    """Return how the cells are asked.

    Raises:
        PolicyError, InvalidRequestError: naming what cannot be asked.
    """
    found = [(cell, _policy(cell), checked_tier(cell)) for cell in cells]
    highest: dict[str, str] = {}
    for _, policy, tier in found:
        highest[policy] = max(highest.get(policy, tier), tier, key=Decimal)
    return [_Asking(cell, policy, highest[policy], tier) for cell, policy, tier in found]


def _policy(cell: Cell) -> str:
    return Policy.parse(FULL_POLICY if cell.policy == FULL else cell.policy).canonical()


def _body(messages: Sequence[Message], question: Question) -> dict[str, Any]:
    """Return the fields of a greedy request, its answer's prefix included."""
    spelled = [{"role": m.role, "content": [_part(part) for part in m.parts]} for m in messages]
    extra: dict[str, Any] = {"prompt_cache_options": {"mode": "explicit"}}
    if question.answer_prefix:
        spelled.append({"role": "assistant", "content": question.answer_prefix})
        extra |= {"add_generation_prompt": False, "continue_final_message": True}
    return {
        "messages": spelled,
        "max_tokens": question.max_tokens,
        "temperature": 0,
        "extra_body": extra,
    }


def _part(part: Part) -> dict[str, Any]:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}} if part.breakpoint else {}
    return {"type": "text", "text": part.text, **mark}


class _Read(BaseModel):
    """What the service says that an answer read, and whether it stored the turn."""

    tier: str
    retained_fraction: float
    kept_bytes: int
    published: bool


def _reply(what: str, completion: ChatCompletion) -> Reply:
    try:
        read = _Read.model_validate((completion.model_extra or {}).get("criticalkv"))
    except ValidationError as error:
        raise CriticalKVError(f"{what}: the service does not say what it read") from error
    choice = completion.choices[0]
    answer = Answer(
        text=choice.message.content or "",
        finish_reason=choice.finish_reason,
        tier=read.tier,
        kept=read.retained_fraction,
        kept_bytes=read.kept_bytes,
    )
    return Reply(answer, completion.id, read.published)


def same_context(what: str, reply: Reply, first: Answer) -> Reply:
    """Return a later turn's reply with what it read of the context, without earlier turns.

    Raises:
        CriticalKVError: if the context was read at another tier than before.
    """
    answer = reply.answer
    if answer.tier != first.tier:
        raise CriticalKVError(f"{what}: read at tier {answer.tier}, before at {first.tier}")
    return replace(reply, answer=replace(answer, kept=first.kept, kept_bytes=first.kept_bytes))
