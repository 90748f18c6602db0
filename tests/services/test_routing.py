"""The routing hint and draining, on real Serve with two tiny decode replicas.

Runs in a process of its own: Ray reads its address switch when it is first imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from criticalkv.shared.config import Config

# Replicas that hold the nodes they are given, and stream as long as they are asked to. The
# checks run in the driver, whose handle has the router; what they find goes to a line each.
APPLICATION = """
    import asyncio, json, os, signal, socket, sys, time
    from dataclasses import dataclass
    from criticalkv.services.cluster import start_cluster
    from criticalkv.services.loopback import on_loopback
    from criticalkv.shared.config import load_config

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = load_config(overrides={"gateway": {"port": port}, "decode": {"max_num_seqs": 30}})

    @dataclass
    class Request:
        parent: str | None = None
        ancestors_hint: tuple = ()
        events: int = 1
        pause_s: float = 0.0

    class Decode:
        def __init__(self):
            from criticalkv.shared.telemetry import replica_name
            self.name, self.nodes, self.closed = replica_name(), [], 0
        async def generate(self, request):
            try:
                yield self.name, os.getpid()
                for number in range(1, request.events):
                    await asyncio.sleep(request.pause_s)
                    yield number
            finally:
                self.closed += 1
        async def told(self):
            return self.name, self.closed
        async def hold(self, name, nodes):
            if name == self.name:
                self.nodes += nodes
            return self.name
        async def record_routing_stats(self):
            return {"nodes": self.nodes[-512:]}

    async def all_of(handle, request):
        return [event async for event in handle.generate.remote(request)]

    async def first(handle, request):
        return (await all_of(handle, request))[0]

    async def until(condition, limit_s=60):
        deadline = time.monotonic() + limit_s
        while not await condition():
            assert time.monotonic() < deadline, "never happened"
            await asyncio.sleep(0.1)
        return True

    with start_cluster(config):
        from ray import serve
        from criticalkv.services import app
        app.ROUTING_STATS_PERIOD_S = 0.5
"""


def drive(checks: str, **environment: str) -> list[Any]:
    """Run checks in a driver of their own; return what they printed."""
    code = textwrap.dedent(APPLICATION) + textwrap.indent(textwrap.dedent(checks), "    ")
    # Replicas of a busy machine take longer to say how many requests they have.
    environment["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "5"
    environment["RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "5"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | environment,
        cwd="/",
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


CHECKS = """
deployment = app.decode_deployment(config).options(
    func_or_class=on_loopback(Decode), ray_actor_options={"num_cpus": 0.1}
)
handle = serve.run(deployment.bind(), name="fixed", route_prefix=None).options(stream=True)

async def main():
    plain = handle.options(stream=False)
    tell = lambda name, **what: print(json.dumps({"name": name, **what}), flush=True)

    tell("alone", names=[(await first(handle, Request()))[0] for _ in range(20)])
    went = {}
    for turn in range(5):
        for parent in map(str, range(16)):
            went.setdefault(parent, []).append((await first(handle, Request(parent)))[0])
    tell("same parent", went=went)
    names = sorted({name for of in went.values() for name in of})

    # Two of one replica's, two of the other's, in turn: none is given another one's place.
    some = [[p for p, of in went.items() if of[0] == name][:2] for name in names]
    mixed = [parent for pair in zip(*some) for parent in pair]
    at_once = await asyncio.gather(*(first(handle, Request(p)) for p in mixed * 2))
    tell("at once", expected=[went[p][0] for p in mixed * 2], names=[n for n, _ in at_once])

    # The end of the chain is new, its root is not.
    chained = [await first(handle, Request(f"new {i}", ("0", "-"))) for i in range(8)]
    tell("same root", expected=went["0"][0], names=[name for name, _ in chained])

    # Never asked for: only what a replica tells leads there. Each node is asked for once.
    nodes = [f"told {i}" for i in range(400)]
    holder = names[0]
    while holder not in [(await plain.hold.remote(holder, nodes)) for _ in range(2)]:
        pass
    led = 0
    for node in nodes:
        name, _ = await first(handle, Request(node))
        led = led + 1 if name == holder else 0
        if led == 25:
            break
        await asyncio.sleep(0.02)
    tell("told", in_a_row=led)

    router = handle._router._asyncio_router.request_router
    async def nothing_runs():
        return not any(router._given.values())
    await until(nothing_runs)
    hot = [handle.generate.remote(Request("0", events=40, pause_s=0.1)) for _ in range(20)]
    opened = await asyncio.gather(*(anext(aiter(stream)) for stream in hot))
    tell("hot", preferred=went["0"][0], names=[name for name, _ in opened])
    ends = await asyncio.gather(*(last(stream) for stream in hot))
    tell("hot ended", ends=ends)

    stream = handle.generate.remote(Request("1", events=10_000, pause_s=0.05))
    name, _ = await anext(aiter(stream))
    before = await count_closed(plain, name)
    stream.cancel()
    closed = await until(lambda: closed_since(plain, name, before))
    tell("cancelled", closed=closed, counted=await until(nothing_runs))

    victims = [handle.generate.remote(Request("2", events=600, pause_s=0.1)) for _ in range(3)]
    opened = [await anext(aiter(stream)) for stream in victims]
    victim, pid = opened[0]
    for parent in went:
        stream = handle.generate.remote(Request(parent, events=60, pause_s=0.1))
        if (await anext(aiter(stream)))[0] != victim:
            break
        stream.cancel()
    survivor = asyncio.create_task(last(stream))
    os.kill(pid, signal.SIGKILL)
    after = [(await first(handle, Request("2")))[0] for _ in range(10)]
    lost = await asyncio.gather(*(last(stream) for stream in victims), return_exceptions=True)
    back = await until(lambda: new_name(handle, names))
    tell(
        "killed",
        victim=victim,
        victims=[name for name, _ in opened],
        after=after,
        lost=[isinstance(error, Exception) for error in lost],
        survivor=await survivor,
        back=back,
        counted=await until(nothing_runs),
    )

async def last(stream):
    event = None
    async for event in stream:
        pass
    return event

async def count_closed(plain, name):
    while True:
        who, closed = await plain.told.remote()
        if who == name:
            return closed

async def closed_since(plain, name, before):
    return await count_closed(plain, name) > before

async def new_name(handle, names):
    return (await first(handle, Request()))[0] not in names

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What happened, by scenario."""
    return {line.pop("name"): line for line in drive(CHECKS)}


def test_without_a_hint_both_replicas_are_used(found: dict[str, Any]) -> None:
    assert len(set(found["alone"]["names"])) == 2


def test_turns_over_one_node_go_to_one_replica(found: dict[str, Any]) -> None:
    went = found["same parent"]["went"]
    assert {len(set(names)) for names in went.values()} == {1}
    assert len({names[0] for names in went.values()}) == 2, "one replica got everything"


def test_requests_that_come_at_once_do_not_swap_replicas(found: dict[str, Any]) -> None:
    assert found["at once"]["names"] == found["at once"]["expected"]
    assert len(set(found["at once"]["names"])) == 2


def test_a_new_turn_goes_where_its_root_is(found: dict[str, Any]) -> None:
    assert set(found["same root"]["names"]) == {found["same root"]["expected"]}


def test_what_replicas_tell_leads_there(found: dict[str, Any]) -> None:
    assert found["told"]["in_a_row"] == 25


def test_a_hot_node_spills_over_to_the_other_replica(found: dict[str, Any]) -> None:
    """One more than the slack: the last one that it was still preferred for."""
    counts = Counter(found["hot"]["names"])
    assert len(counts) == 2
    assert max(counts.values()) - min(counts.values()) <= Config().decode.routing_slack + 1
    assert found["hot ended"]["ends"] == [39] * 20


def test_a_cancelled_call_stops_its_replica(found: dict[str, Any]) -> None:
    assert found["cancelled"] == {"closed": True, "counted": True}


def test_a_dead_preferred_replica_loses_only_what_it_ran(found: dict[str, Any]) -> None:
    killed = found["killed"]
    assert set(killed["victims"]) == {killed["victim"]}
    assert killed["lost"] == [True] * 3
    assert killed["victim"] not in killed["after"]
    assert len(killed["after"]) == 10
    assert killed["survivor"] == 59
    assert killed["back"]
    assert killed["counted"], "requests count that have ended"


DRAIN = """
class Scaled(Decode):
    async def record_autoscaling_stats(self):
        names = ("pool_bytes", "used_bytes", "queued_bytes", "waiting", "waiting_tokens")
        return {**dict.fromkeys(names, 0), "running": float(open(demand).read())}

scaled = load_config(overrides={"decode": {"max_num_seqs": 30, "autoscaling": {
    "min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0.2, "downscale_delay_s": 1.0,
    "report_interval_s": 0.3,
}}})
demand = os.path.join(os.environ["FOLDER"], "demand")

def need(running):
    with open(demand + "~", "w") as file:
        file.write(str(running))
    os.replace(demand + "~", demand)

async def states():
    found = serve.status().applications["scaled"].deployments["decode"].replica_states
    return {str(getattr(state, "value", state)): count for state, count in found.items()}

async def main(handle):
    names = set()
    async def two():
        names.add((await first(handle, Request()))[0])
        return len(names) == 2
    async def one():
        return await states() == {"RUNNING": 1}
    async def stopping():
        return (await states()).get("STOPPING", 0) == 1
    assert await one()
    need(100)
    await until(two)
    streams = {}
    while set(streams) != names:
        task = handle.generate.remote(Request(events=300, pause_s=0.05))
        streams.setdefault((await anext(aiter(task)))[0], task)
    need(0)
    ends = [asyncio.create_task(last(stream)) for stream in streams.values()]
    await until(stopping)
    running = [not end.done() for end in ends]
    print(json.dumps({"running": running, "ends": await asyncio.gather(*ends)}), flush=True)
    await until(one)

async def last(stream):
    async for event in stream:
        pass
    return event

need(0)
deployment = app.decode_deployment(scaled).options(
    func_or_class=on_loopback(Scaled), ray_actor_options={"num_cpus": 0.1}
)
handle = serve.run(deployment.bind(), name="scaled", route_prefix=None)
asyncio.run(main(handle.options(stream=True)))
"""


def test_a_replica_that_is_removed_ends_its_streams_first(tmp_path: Path) -> None:
    [result] = drive(DRAIN, FOLDER=str(tmp_path))
    assert result["running"] == [True, True], "nothing was running when it was stopped"
    assert result["ends"] == [299, 299]
