"""A decode worker dies in the middle of an answer; the client does not notice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from decode_requests import ids, request

from criticalkv.services.decode.engine import DecodeEngine
from criticalkv.services.gateway.choices import Choices
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.local import LocalEngine, LocalNode
from criticalkv.shared.config import DecodeConfig
from criticalkv.shared.errors import CriticalKVError, WorkerLostError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.requests import DecodeDelta, DecodeEnd, DecodeRequest, DecodeStart

Event = DecodeStart | DecodeDelta | DecodeEnd
Factory = Callable[..., LoadedModel]
STEPWISE = Policy.parse("window+adakv+twostage:window=4,interval=8,target=6").canonical()


class MortalWorkers:
    """Two engines over one store; whoever decodes dies after so many events.

    Args:
        lives: events of the first, the second, … request; None = all.
    """

    def __init__(self, engines: list[DecodeEngine], lives: list[int | None]) -> None:
        self._engines = engines
        self._lives = lives
        self.requests: list[DecodeRequest] = []

    async def decode(self, item: DecodeRequest) -> AsyncGenerator[Event, None]:
        number = len(self.requests)
        self.requests.append(item)
        life = self._lives[number] if number < len(self._lives) else None
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event | CriticalKVError]()
        sequence = self._engines[number % 2].submit(
            item, lambda event: loop.call_soon_threadsafe(events.put_nowait, event) and None
        )
        running, passed = 1 + len(item.branch_seeds), 0
        try:
            while running:
                if passed == life:
                    raise WorkerLostError("killed")
                event = await asyncio.wait_for(events.get(), 60)
                if isinstance(event, CriticalKVError):
                    raise event
                passed += 1
                yield event
                running -= isinstance(event, DecodeEnd)
        finally:
            sequence.cancelled.set()


@pytest.fixture(scope="module")
def engines(tiny_model: Factory) -> Iterator[tuple[LocalEngine, list[DecodeEngine]]]:
    config = DecodeConfig(max_num_seqs=4)
    with LocalEngine(tiny_model(), decode=config) as one:
        other = DecodeEngine(one.model, one.store, config)
        yield one, [one.decode, other]
        other.close()


def asked(local: LocalEngine, **fields: Any) -> DecodeRequest:
    context = local.compress_tokens(ids(60, 3), policy="default", store_tier="0.6")
    node = LocalNode(context.node_id, (), True)
    return request(node, ("0.4",), token_ids=tuple(ids(7, 1)), **fields)


async def answer(workers: MortalWorkers, item: DecodeRequest) -> list[Event]:
    plan: Any = SimpleNamespace(parent=None)
    running = Choices(workers, SimpleNamespace(), plan, lambda _: item, Deadline.after(120))  # type: ignore[arg-type]
    events: list[Event] = []
    ended = 0
    try:
        while ended < 1 + len(item.branch_seeds):
            event, _ = await running.next()
            events.append(event)
            ended += isinstance(event, DecodeEnd)
    finally:
        await running.aclose()
    return events


def told(events: list[Event], choices: int) -> list[dict[str, Any]]:
    """What a reader knows of each choice in the end."""
    out = []
    for choice in range(choices):
        own = [e for e in events if e.choice == choice]
        deltas = [e for e in own if isinstance(e, DecodeDelta)]
        [end] = [e for e in own if isinstance(e, DecodeEnd)]
        assert own[-1] is end, "told after its end"
        out.append(
            {
                "text": "".join(d.text for d in deltas),
                "tokens": [t for d in deltas for t in d.token_ids],
                "top": [p.token_id for d in deltas for p in d.logprobs],
                "end": (end.finish_reason, end.completion_tokens, end.node_id, end.publish_error),
            }
        )
    return out


SAMPLED = {"temperature": 1.0, "seed": 3, "max_tokens": 9}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": {"max_tokens": 9}},
    "three choices": {"sampling": {**SAMPLED, "logprobs": 1}, "branch_seeds": (4, 5)},
    "three that shrink": {"sampling": SAMPLED, "branch_seeds": (4, 5), "policy": STEPWISE},
}


@pytest.mark.parametrize("name", CASES)
async def test_whenever_it_dies_the_answer_is_as_without(
    engines: tuple[LocalEngine, list[DecodeEngine]], name: str
) -> None:
    local, both = engines
    item = asked(local, **CASES[name])
    count = 1 + len(item.branch_seeds)
    events = await answer(MortalWorkers(both, []), item)
    expected = told(events, count)
    assert all(choice["end"][2] is not None for choice in expected)
    for life in range(len(events)):
        workers = MortalWorkers(both, [life])
        assert told(await answer(workers, item), count) == expected, f"dead after {life} events"
        first, *others = workers.requests
        if any(isinstance(e, DecodeDelta) for e in events[:life]):
            assert all(other.branch_seeds == () for other in others)
            assert {other.view for other in others} == {first.view}
        else:
            assert [other.branch_seeds for other in others] == [item.branch_seeds]


async def test_it_may_die_again(engines: tuple[LocalEngine, list[DecodeEngine]]) -> None:
    local, both = engines
    item = asked(local, sampling={**SAMPLED, "logprobs": 0})
    expected = told(await answer(MortalWorkers(both, []), item), 1)
    workers = MortalWorkers(both, [3, 1, 4])
    assert told(await answer(workers, item), 1) == expected
    assert [len(r.emitted) for r in workers.requests] == [0, 2, 2, 5]


async def test_a_view_that_was_lowered_for_want_of_room_stays_so(tiny_model: Factory) -> None:
    """Another view would be another node, of other tokens."""
    with LocalEngine(tiny_model(), decode=DecodeConfig(pool_mb=64)) as local:
        context = local.compress_tokens(ids(1900, 3), policy="default", store_tier="0.9")
        small = DecodeEngine(
            local.model,
            local.store,
            DecodeConfig(pool_mb=1, max_num_seqs=2, page_size=16),
        )
        fields = {"token_ids": tuple(ids(7, 1)), "min_tier": "0.05", "sampling": {"max_tokens": 6}}
        item = request(LocalNode(context.node_id, (), True), ("0.9",), **fields)
        workers = MortalWorkers([small, local.decode], [4])
        events = await answer(workers, item)
        lowered = next(e for e in events if isinstance(e, DecodeStart)).view
        small.close()
        assert float(lowered[0]) < 0.9, "there was room"
        assert (workers.requests[1].view, workers.requests[1].min_tier) == (lowered, None)
        assert isinstance(events[-1], DecodeEnd)
        assert events[-1].view == lowered
        assert events[-1].completion_tokens == 6


# ------------------------------------------------------------- real Serve, real kills

# The gateway runs in the driver, before real replicas of a tiny model: what it tells a real
# client over HTTP is what counts. A process of its own: Ray reads its address switch when
# it is first imported.
DRIVER = """
    import asyncio, json, os, signal, socket, sys, threading, time
    sys.path.insert(0, os.environ["SUPPORT"])
    from criticalkv.services.cluster import start_cluster
    from criticalkv.services.store.process import start_store
    from criticalkv.shared.config import StoreConfig, load_config

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stored = StoreConfig(address="127.0.0.1:0", data_dir=os.path.join(os.environ["FOLDER"], "s"))
    with start_store(stored) as process:
        two = {"min_replicas": 2, "max_replicas": 2}
        one = {"min_replicas": 1, "max_replicas": 1}
        config = load_config(overrides={
            "gateway": {"port": port, "implicit_breakpoint_tokens": 200},
            "store": {"address": process.address},
            "decode": {"max_num_seqs": 4, "autoscaling": two},
            "prefill": {"autoscaling": one},
        })
        with start_cluster(config):
            import httpx, uvicorn
            from ray import serve
            from criticalkv.services import app
            from criticalkv.services.decode.deployment import Decode
            from criticalkv.services.gateway.app import build_app
            from criticalkv.services.gateway.core import GatewayCore
            from criticalkv.services.gateway.ray_workers import RayWorkers
            from criticalkv.services.loopback import on_loopback
            from criticalkv.services.prefill.deployment import Prefill
            from criticalkv.shared.requests import DecodeStart
            from tiny_models import make_model

            class TinyDecode(Decode):
                def __init__(self, config):
                    sys.path.insert(0, os.environ["SUPPORT"])
                    from tiny_models import make_model
                    from criticalkv.services.decode.engine import DecodeEngine
                    from criticalkv.shared.store_client import StoreClient
                    store = StoreClient.of(config.store)
                    name = str(os.getpid())
                    self._engine = DecodeEngine(make_model(), store, config.decode, name)
                async def generate(self, request):
                    async for event in super().generate(request):
                        yield event
                        await asyncio.sleep(0.05)

            class TinyPrefill(Prefill):
                def __init__(self, config):
                    sys.path.insert(0, os.environ["SUPPORT"])
                    import tiny_models
                    from criticalkv.services.prefill import deployment
                    deployment.load_model = lambda *_: tiny_models.make_model()
                    super().__init__(config)
                async def run(self, request):
                    with open(os.path.join(os.environ["FOLDER"], "prefills"), "a") as file:
                        print(os.getpid(), file=file)
                    return await super().run(request)

            def tell(name, **what):
                print(json.dumps({"name": name, **what}), flush=True)

            def until(condition):
                deadline = time.monotonic() + 120
                while not (found := condition()):
                    assert time.monotonic() < deadline, "never happened"
                    time.sleep(0.05)
                return found

            def prefills():
                with open(os.path.join(os.environ["FOLDER"], "prefills")) as file:
                    return [int(line) for line in file]

            def deployed(make, replica, **environment):
                variables = {"SUPPORT": os.environ["SUPPORT"], "FOLDER": os.environ["FOLDER"]}
                actor = {"num_cpus": 0.1, "runtime_env": {"env_vars": variables | environment}}
                options = {"func_or_class": on_loopback(replica), "ray_actor_options": actor}
                made = make(config).options(**options)
                app = made.bind(config)
                return serve.run(app, name=made.name, route_prefix=None)

            class Seen(RayWorkers):
                pids = []
                async def decode(self, request):
                    async for event in super().decode(request):
                        if isinstance(event, DecodeStart):
                            self.pids.append((int(event.replica), len(request.emitted)))
                        yield event

            slow = {"CRITICALKV_FAILPOINTS": "prefill.layer=delay:1:0.3"}
            workers = Seen(
                deployed(app.prefill_deployment, TinyPrefill, **slow),
                deployed(app.decode_deployment, TinyDecode),
            )
            model = make_model()
            core = GatewayCore(config, model.spec, model.tokenizer, process.client(), workers)
            server = uvicorn.Server(
                uvicorn.Config(build_app(core), host="127.0.0.1", port=0, log_level="warning")
            )
            loops = []
            def run():
                loops.append(asyncio.new_event_loop())
                loops[0].run_until_complete(server.serve())
            threading.Thread(target=run, daemon=True).start()
            until(lambda: server.started)
            place = server.servers[0].sockets[0].getsockname()[1]
            client = httpx.Client(base_url=f"http://127.0.0.1:{place}/v1", timeout=180)

            def stream(**fields):
                body = {
                    "model": model.spec.name, "stream": True, "max_tokens": 40, "seed": 3,
                    "messages": [{"role": "user", "content": "why?"}],
                    "stream_options": {"include_usage": True},
                    "criticalkv": {"context_id": context, "read_tier": 0.2}, **fields,
                }
                with client.stream("POST", "/chat/completions", json=body) as response:
                    assert response.status_code == 200, response.read()
                    for line in response.iter_lines():
                        if line:
                            yield line.removeprefix("data: ")

            text = "".join(f"Line {i} says {i * 7919 % 1000}. " for i in range(20))
            context = client.post("/contexts", json={"text": text}).json()["id"]
            many = {"n": 2, "temperature": 1.0, "logprobs": True, "top_logprobs": 1}
            for name, fields in (("greedy", {"temperature": 0}), ("sampled", many)):
                whole = list(stream(**fields))
                disturbed = stream(**fields)
                lines = [next(disturbed) for _ in range(9)]
                victim, _ = workers.pids[-1]
                workers.pids.clear()
                os.kill(victim, signal.SIGKILL)
                lines += disturbed
                tell(name, whole=whole, lines=lines, victim=victim, pids=workers.pids)

            before = len(prefills())
            answers = []
            asking = threading.Thread(
                target=lambda: answers.append(client.post("/contexts", json={"text": text[::-1]}))
            )
            asking.start()
            until(lambda: len(prefills()) > before)
            time.sleep(0.3)
            os.kill(prefills()[-1], signal.SIGKILL)
            asking.join(180)
            tell("prefill", status=answers[0].status_code, pids=prefills()[before:])

            left = stream(max_tokens=400)
            lines = [next(left) for _ in range(5)]
            draining = asyncio.run_coroutine_threadsafe(workers.drain(0.5), loops[0])
            lines += left
            draining.result(60)
            refused = client.post("/chat/completions", json={
                "model": model.spec.name, "messages": [{"role": "user", "content": "why?"}],
            })
            tell("drained", lines=lines, refused=refused.status_code)
            server.should_exit = True
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happened on real Serve, by scenario."""
    folder = tmp_path_factory.mktemp("kills")
    support = Path(__file__).resolve().parents[1] / "support"
    plain = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    patient = {
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5",
        "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DRIVER)],
        capture_output=True,
        text=True,
        env=plain | patient | {"FOLDER": str(folder), "SUPPORT": str(support)},
        cwd="/",
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("name"): line for line in lines}


def of_choice(lines: list[str], index: int) -> dict[str, Any]:
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    own = [
        c["choices"][0] for c in chunks if c.get("choices") and c["choices"][0]["index"] == index
    ]
    logprobs = [p for c in own for p in (c.get("logprobs") or {}).get("content", ())]
    [end] = [c for c in own if c["finish_reason"]]
    return {
        "text": "".join(c["delta"].get("content", "") for c in own),
        "tokens": [p["token"] for p in logprobs],
        "reason": end["finish_reason"],
        "node": end["criticalkv"]["node_id"],
        "published": end["criticalkv"]["published"],
    }


@pytest.mark.parametrize(("name", "choices"), [("greedy", 1), ("sampled", 2)])
def test_a_killed_replicas_stream_goes_on_as_if_nothing_had_happened(
    found: dict[str, Any], name: str, choices: int
) -> None:
    case = found[name]
    assert case["lines"][-1] == "[DONE]"
    assert not any('"error"' in line for line in case["lines"])
    for index in range(choices):
        assert of_choice(case["lines"], index) == of_choice(case["whole"], index)
    usages = [json.loads(lines[-2])["usage"] for lines in (case["whole"], case["lines"])]
    assert usages[0] == usages[1]
    assert len(case["pids"]) == choices, "each choice goes on once, by itself"
    assert all(pid != case["victim"] and emitted for pid, emitted in case["pids"])


def test_a_killed_prefill_is_begun_again(found: dict[str, Any]) -> None:
    assert found["prefill"]["status"] == 200
    assert len(set(found["prefill"]["pids"])) == 2, "it was not killed in the middle"


def test_what_runs_when_the_service_stops_ends_with_an_error(found: dict[str, Any]) -> None:
    *_, last = found["drained"]["lines"]
    assert json.loads(last)["error"]["code"] == "cancelled"
    assert found["drained"]["refused"] == 503
