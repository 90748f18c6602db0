"""Two kinds of load: requests that come when they come, and clients that wait for answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from criticalkv.services.bench.conversations import Conversation
from criticalkv.services.bench.load_client import Asker, LoadClient, Record
from criticalkv.services.bench.trace_asks import Arrival

Gate = AbstractAsyncContextManager[object]
Tick = Callable[[], object]


def gate(most: int | None) -> Gate:
    """Return what lets so many requests run at once; None = any number."""
    return asyncio.Semaphore(most) if most else nullcontext()


async def open_loop(client: LoadClient, plan: Iterable[Arrival], gate: Gate, tick: Tick) -> None:
    """Send each request when it is due, whatever became of those before it.

    Args:
        plan: in the order of its times.
        gate: a request that waits for it is sent late.
        tick: called after each request.
    """

    async def send(arrival: Arrival) -> None:
        async with gate:
            await client.send(arrival.ask, arrival.at_s)
        tick()

    async with asyncio.TaskGroup() as tasks:
        for arrival in plan:
            await asyncio.sleep(max(0.0, arrival.at_s - client.now()))
            tasks.create_task(send(arrival))


async def closed_loop(
    client: LoadClient,
    plan: Iterable[Sequence[Conversation]],
    asker: Asker,
    gate: Gate,
    tick: Tick,
) -> None:
    """Let each client hold its conversations, turn after turn.

    Args:
        plan: the conversations of each client.
        gate: a request that waits for it is sent late.
        tick: called after each request.
    """

    async def run(own: Sequence[Conversation]) -> None:
        for conversation in own:
            await _converse(client, conversation, asker, gate, tick)

    async with asyncio.TaskGroup() as tasks:
        for own in plan:
            tasks.create_task(run(own))


async def _converse(
    client: LoadClient, conversation: Conversation, asker: Asker, gate: Gate, tick: Tick
) -> None:
    """Send all turns; one after a failure goes on from the last answer that there is."""
    before: Record | None = None
    for turn, pause_s in enumerate(conversation.pauses_s):
        await asyncio.sleep(pause_s)
        ask, due = conversation.ask(turn, before, asker), client.now()
        async with gate:
            record = await client.send(ask, due)
        before = record if record.error is None else before
        tick()
