"""The command line: `criticalkv serve | demo | store | profile | bench | analyze | eval | chaos`.

Reads configuration once, starts the parts in order and stops them in reverse. Imports
what a command needs only inside it: torch and Ray take seconds.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from criticalkv.services.analysis.command import app as analyze
from criticalkv.services.bench import serve_options as load
from criticalkv.services.evaluation.command import app as evaluate
from criticalkv.shared.config import Config, load_config, placed
from criticalkv.shared.errors import ConfigError, CriticalKVError
from criticalkv.shared.options import ConfigFile, Json, Model
from criticalkv.shared.output import finish

app = typer.Typer(
    help="Compute a long context once, keep its critical KV entries, decode from them anywhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench = typer.Typer(help="Benchmarks: ratios of things run alternately.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(analyze, name="analyze")
app.add_typer(evaluate, name="eval")

PolicyName = Annotated[
    str | None, typer.Option(help="Eviction policy: scorer+allocator+selector, or an alias.")
]


@app.command()
def serve(
    config: ConfigFile = None,
    model: Model = None,
    policy: PolicyName = None,
    host: Annotated[str | None, typer.Option(help="Address of the HTTP server.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the HTTP server.")] = None,
    store: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Use this running store.")
    ] = None,
    dashboard_port: Annotated[
        int | None, typer.Option(help="Show Ray's dashboard on this loopback port.")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Print what the workers log.")] = False,
) -> None:
    """Serve the API until Ctrl-C: store, gateway, prefill and decode."""
    settings = load_config(
        _text(config),
        _given(
            model={"path": model},
            eviction={"policy": policy},
            gateway={"host": host, "port": port},
            store={"address": store},
        ),
    )
    with running(
        settings, start_store=store is None, dashboard_port=dashboard_port, verbose=verbose
    ) as live:
        typer.echo(_next_steps(live))
        with suppress(KeyboardInterrupt):  # the normal end of a server
            threading.Event().wait()


@app.command()
def demo(
    config: ConfigFile = None,
    model: Model = None,
    policy: PolicyName = None,
    document: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Ask about this text file."),
    ] = None,
) -> None:
    """Start everything, hold two conversations over one document, print a table, stop."""
    from criticalkv.services import demo as demonstration

    given = _given(model={"path": model}, eviction={"policy": policy})
    demonstration.run(load_config(_text(config), given), document)


@app.command()
def store(
    config: ConfigFile = None,
    address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Listen here.")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="'embedded', or a redis://, rediss://, unix:// URL.")
    ] = None,
) -> None:
    """Run a cache store by itself until Ctrl-C or SIGTERM."""
    from criticalkv.services.store import server

    given = _given(store={"address": address, "redis_url": redis_url})
    server.main(load_config(_text(config), given).store)


@app.command()
def profile(
    config: ConfigFile = None,
    model: Model = None,
    samples: Annotated[int, typer.Option(min=1, help="Haystacks, one forward pass each.")] = 16,
    length: Annotated[int, typer.Option(metavar="TOKENS", help="Of each haystack.")] = 2048,
    seed: Annotated[int, typer.Option(help="Draws texts and facts.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Instead of eviction.profiles_dir."),
    ] = None,
) -> None:
    """Find out which heads of a model retrieve, for the allocators headkv and duo."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    from criticalkv.services.profile import command

    settings = load_config(_text(config), _given(model={"path": model}))
    folder = out or Path(settings.eviction.profiles_dir)
    made, path = command.run(settings, samples=samples, length=length, seed=seed, folder=folder)
    typer.echo(f"digest  {made.digest}\nfile    {path}")
    typer.echo(f"policy  window+headkv+plain:profile={made.digest}")
    typer.echo(f"policy  streaming+duo+plain:profile={made.digest}")


@app.command()
def chaos(
    json: Json = Path("chaos.json"),
    requests: Annotated[
        int | None, typer.Option(min=1, help="In all; 10,000 if --seconds is not given.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Of load, at most; starting comes on top.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of model, texts, load and faults.")] = 0,
    store_faults: Annotated[
        float, typer.Option(min=0, max=0.5, help="Probability of each fault, per request.")
    ] = 0.01,
    kills_per_minute: Annotated[
        float, typer.Option(min=0, max=30, help="kill -9 of prefill, decode, store, Valkey.")
    ] = 2.0,
    soak: Annotated[
        float, typer.Option(min=0, metavar="MINUTES", help="Instead: paced load without faults.")
    ] = 0.0,
    model: Annotated[
        str, typer.Option(help="'demo', a directory or a cached Hub name; default a tiny one.")
    ] = "",
    history: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep a line per request here.")
    ] = None,
) -> None:
    """Seeded load and faults against the real service; every answer is checked."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    from criticalkv.services.chaos import command, summary

    unlimited = requests is None and seconds is None
    options = command.Options(
        requests=summary.FULL_RUN if unlimited else requests,
        seconds=seconds,
        seed=seed,
        store_faults=store_faults,
        kills_per_minute=kills_per_minute,
        soak_minutes=soak,
        model=model,
        folder=history,
    )
    outcome = command.run(options)
    finish(outcome.report, json)
    for line in outcome.broken:
        typer.echo(f"broken: {line}", err=True)
    if outcome.broken:
        raise typer.Exit(1)


@bench.command()
def ttft(
    json: Json = Path("ttft.json"),
    quick: Annotated[bool, typer.Option(help="One short context; not to be compared.")] = False,
    threads: Annotated[int, typer.Option(help="Torch threads, for both sides.")] = 2,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """Cold prefill against warm turns and plain transformers; the store against bare gRPC."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    from criticalkv.services.bench import ttft as benchmark

    settings = load_config(_text(config), _given(model={"path": model}))
    report = benchmark.run(settings, quick=quick, threads=threads)
    finish(report, json)


@bench.command()
def decode(
    json: Json = Path("decode.json"),
    quick: Annotated[bool, typer.Option(help="Short contexts; not to be compared.")] = False,
    threads: Annotated[int, typer.Option(help="Torch threads, for all sides.")] = 2,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """Batched decode over ragged heads against transformers and our own full cache."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as in a replica
    from criticalkv.services.bench import decode as benchmark

    settings = load_config(_text(config), _given(model={"path": model}))
    report = benchmark.run(settings, quick=quick, threads=threads)
    finish(report, json)


@bench.command(name="store")
def bench_store(
    json: Json = Path("store.json"),
    quick: Annotated[bool, typer.Option(help="Small and few; not to be compared.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder with mooncake_conversation_first.jsonl.")
    ] = None,
) -> None:
    """The store's two read paths, metadata at scale, recovery, and hit rate against LRU."""
    from criticalkv.services.bench import store as benchmark

    report = benchmark.run(quick=quick, data=data)
    finish(report, json)


@bench.command()
def kernels(
    json: Json = Path("kernels.json"),
    quick: Annotated[bool, typer.Option(help="Small and few; not to be compared.")] = False,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 2,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with inaugural.txt and multi_news_50.jsonl, both optional."),
    ] = None,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """Operations against plain torch, codecs against unquantized caches. GPU: infra/bench/gpu.sh"""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    from criticalkv.services.bench import kernels as benchmark

    settings = load_config(_text(config), _given(model={"path": model}))
    report = benchmark.run(settings, quick=quick, threads=threads, data=data)
    finish(report, json)


@bench.command()
def eviction(
    json: Json = Path("eviction.json"),
    quick: Annotated[bool, typer.Option(help="Few short cases; not to be compared.")] = False,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 2,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with inaugural.txt and multi_news_50.jsonl, both optional."),
    ] = None,
    cases: Annotated[int, typer.Option(min=8, help="Needle cases.")] = 100,
    policy: Annotated[
        list[str] | None, typer.Option(help="Measure this instead; may be repeated.")
    ] = None,
    kvpress: Annotated[
        Path | None, typer.Option(help="Results of infra/scripts/kvpress_cases.py.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Only write the needle cases here, as JSON.")
    ] = None,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """What eviction policies cost, and how near they stay to the full cache."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    from criticalkv.services.bench import eviction as benchmark

    settings = load_config(_text(config), _given(model={"path": model}))
    if export is not None:
        benchmark.export(settings, export, data=data, cases=cases)
        return
    report = benchmark.run(
        settings,
        quick=quick,
        threads=threads,
        data=data,
        cases=cases,
        policies=policy or (),
        kvpress=kvpress,
        so_far=lambda report: report.write(json),
    )
    finish(report, json)


@bench.command(name="eval-sweep")
def eval_sweep(
    json: Json = Path("eval-sweep.json"),
    quick: Annotated[bool, typer.Option(help="Two short examples; not to be compared.")] = False,
    threads: Annotated[int, typer.Option(help="Torch threads, for both sides.")] = 2,
    kvpress_python: Annotated[
        Path | None,
        typer.Option(help="Interpreter of an environment with kvpress; without it, ours alone."),
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Spread over the tasks.")] = 8,
    length: Annotated[int, typer.Option(metavar="TOKENS", help="Of each example.")] = 1024,
    task: Annotated[list[str] | None, typer.Option(help="Of RULER; may be repeated.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="snapkv, criticalkv, adakv, criticaladakv, or one of them with -kvpress, whose "
            "rules are then the same on both sides; may be repeated."
        ),
    ] = None,
    tiers: Annotated[
        str, typer.Option(help="Kept fractions, comma-separated.")
    ] = "0.05,0.1,0.2,0.3,0.4,0.6",
    data: Annotated[Path | None, typer.Option(help="Folder with inaugural.txt, optional.")] = None,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """A sweep of policies and tiers over RULER: ours against kvpress' pipeline."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    from criticalkv.services.bench import eval_sweep as benchmark

    settings = load_config(_text(config), _given(model={"path": model}))
    report = benchmark.run(
        settings,
        quick=quick,
        threads=threads,
        kvpress_python=kvpress_python,
        tiers=tiers,
        examples=examples,
        length=length,
        tasks=task or benchmark.TASKS,
        policies=policy or benchmark.POLICIES,
        data=data,
        so_far=lambda report: report.write(json),
    )
    finish(report, json)


@bench.command(name="serve")
def bench_serve(
    goodput: load.Goodput = None,
    more_goodput: load.MoreGoodput = None,
    json: Json = Path("serve.json"),
    url: load.Url = None,
    start: load.Start = False,
    api_key: load.ApiKey = "local",
    trace: load.Trace = None,
    num: load.Num = 100,
    length_scale: load.LengthScale = 1.0,
    time_scale: load.TimeScale = 1.0,
    request_rate: load.RequestRate = None,
    skip_bad: load.SkipBad = False,
    clients: load.Clients = 4,
    turns: load.Turns = 4,
    conversations: load.Conversations = 1,
    documents: load.Documents = 2,
    context_tokens: load.ContextTokens = 1024,
    question_tokens: load.QuestionTokens = 16,
    output_tokens: load.OutputTokens = 32,
    think_time: load.ThinkTime = 0.0,
    policy: PolicyName = None,
    tier: load.Tier = None,
    max_concurrency: load.MaxConcurrency = None,
    seed: load.Seed = 0,
    timeout: load.Timeout = 600.0,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """Load on a running service: a request trace, or clients in closed loops."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    from criticalkv.services.bench import serve as benchmark

    settings = load_config(_text(config), _given(model={"path": model}))
    if trace is None and request_rate is not None:
        raise ConfigError(
            "--request-rate is of a --trace: clients in closed loops wait for answers"
        )
    closed = benchmark.Loop(
        clients=clients,
        turns=turns,
        conversations=conversations,
        documents=documents,
        context_tokens=context_tokens,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        think_time_s=think_time,
    )
    replayed = trace and benchmark.Replay(
        trace=trace,
        num=num,
        scale=benchmark.Scale(length_scale, time_scale),
        request_rate=request_rate,
        skip_bad=skip_bad,
    )
    options = benchmark.Options(
        load=replayed or closed,
        api_key=api_key,
        policy=policy,
        tier=tier,
        max_concurrency=max_concurrency,
        targets=benchmark.goodput_targets(goodput or (), more_goodput or ()),
        seed=seed,
        timeout_s=timeout,
        any_model=model is not None,
    )
    measured = benchmark.Benchmark(settings.model, options)  # before anything is started
    with _service(settings, url, start) as address:
        report = measured.run(address)
    finish(report, json)
    for code, count in report.details["errors"].items():
        typer.echo(f"failed with {code}: {count}", err=True)
    if report.details["interrupted"]:
        raise typer.Exit(130)


@contextmanager
def _service(config: Config, url: str | None, start: bool) -> Iterator[str]:
    """Yield the address of a service: a running one, or one that is started for this."""
    if url is not None and start:
        raise ConfigError("--url names a running service, --start starts one: give one of them")
    if not start:
        yield url or f"http://{config.gateway.host}:{config.gateway.port}"
        return
    from criticalkv.services.demo import beside_others

    with running(beside_others(config)) as live:
        yield f"http://{live.gateway.host}:{live.gateway.port}"


@contextmanager
def running(
    config: Config,
    *,
    start_store: bool = True,
    dashboard_port: int | None = None,
    verbose: bool = False,
) -> Iterator[Config]:
    """Run the whole service; yield the configuration with its real addresses.

    Args:
        config: all of it.
        start_store: start a store of its own if `store.address` is on this machine.
        dashboard_port: serve Ray's dashboard on this loopback port.
        verbose: print what the workers log.
    """
    from criticalkv.services.cluster import start_cluster

    with _store(_preflight(config, start_store), start_store) as ready:
        typer.echo("Starting Ray Serve …", err=True)
        with start_cluster(ready, dashboard_port=dashboard_port, show_logs=verbose):
            _deploy(ready)
            try:
                yield ready
            finally:
                typer.echo("Leaving …" if _joins_cluster() else "Stopping …", err=True)


def _deploy(config: Config) -> None:
    from ray import serve
    from ray.exceptions import RayError

    from criticalkv.services.app import APP_NAME, build

    typer.echo("Loading the model in every worker …", err=True)
    try:
        serve.run(build(config), name=APP_NAME)
    except (RuntimeError, RayError) as error:
        raise CriticalKVError(
            f"the service did not start: {_cause(error)} (`criticalkv serve --verbose` shows "
            "what the workers say)"
        ) from error


def _cause(error: Exception) -> str:
    """The last line that says something: Ray's messages end in the worker's traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)


def _preflight(config: Config, start_store: bool) -> Config:
    """Find what is wrong, and fetch what is missing, before any process starts."""
    from criticalkv.services.gateway.auth import Authenticator

    Authenticator(config.gateway)
    config = placed(config)
    if not _starts_store(config, start_store):
        _check_store(config)
    elif _joins_cluster():
        raise ConfigError(
            "RAY_ADDRESS is set: the workers of that cluster need a store that they reach. Give "
            "one with --store HOST:PORT or store.address, or unset RAY_ADDRESS to run everything "
            "on this machine",
            param="store.address",
        )
    if _joins_cluster():
        return config  # that cluster brings its own model
    _check_port(config)
    from criticalkv.shared.model.spec import load_spec  # seconds: after the quick checks

    name = load_spec(config.model).name
    return config.model_copy(update={"model": config.model.model_copy(update={"name": name})})


def _joins_cluster() -> bool:
    return bool(os.environ.get("RAY_ADDRESS"))


def _starts_store(config: Config, wanted: bool) -> bool:
    from criticalkv.shared.loopback import is_loopback

    return wanted and is_loopback(config.store.address.rpartition(":")[0])


def _check_store(config: Config) -> None:
    from criticalkv.shared.store_client import StoreClient

    address = config.store.address
    host, _, port = address.rpartition(":")
    is_tcp = bool(host) and port.isdecimal() and 0 < int(port) < 65536
    if not is_tcp and not address.startswith(("unix:", "unix-abstract:")):
        raise ConfigError(
            f"store.address {address!r} is not HOST:PORT or unix:PATH", param="store.address"
        )
    with StoreClient.of(config.store) as client:
        if not client.healthy():
            raise ConfigError(
                f"no store answers at store.address {address}: start it with `criticalkv store "
                f"--address {address}`, and check store.tls_ca and store.token_file",
                param="store.address",
            )


def _check_port(config: Config) -> None:
    # Ray's proxy binds with SO_REUSEPORT, so two services would share a port in silence.
    host, port = config.gateway.host, config.gateway.port
    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind) as probe:
            # Connections that have ended are no obstacle; somebody who listens is.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        what = "is in use" if error.errno == errno.EADDRINUSE else f"fails: {error.strerror}"
        raise ConfigError(
            f"gateway.port {port} on {host} {what}; choose another with --port, or stop what "
            "uses it",
            param="gateway.port",
        ) from error


@contextmanager
def _store(config: Config, wanted: bool) -> Iterator[Config]:
    from criticalkv.services.store.process import start_store

    if not _starts_store(config, wanted):
        yield config
        return
    typer.echo("Starting the store …", err=True)
    with start_store(config.store) as child:
        address = config.store.model_copy(update={"address": child.address})
        yield config.model_copy(update={"store": address})


def _next_steps(config: Config) -> str:
    base = f"http://{config.gateway.host}:{config.gateway.port}"
    name = config.model.name or "NAME"
    end = (
        "Ctrl-C ends this command only: the application keeps running on that cluster until\n"
        "`serve shutdown` or a redeployment ends it."
        if _joins_cluster()
        else "Ctrl-C stops everything."
    )
    return f"""
CriticalKV is up at {base}. Try, in another terminal:

  curl {base}/v1/models
  curl {base}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

or in Python:

  from openai import OpenAI
  client = OpenAI(base_url="{base}/v1", api_key="local")
  context = open("document.txt").read()
  answer = client.chat.completions.create(model="{name}", messages=[
      {{"role": "system", "content": context}},   # compressed and kept from 1,024 tokens on
      {{"role": "user", "content": "What is it about?"}},
  ])
  print(answer.choices[0].message.content, answer.usage.prompt_tokens_details)

{end}
"""


def _given(**sections: dict[str, Any]) -> dict[str, Any]:
    """Keep the flags that were given: absent ones must not hide file or environment."""
    kept = {
        name: {key: value for key, value in fields.items() if value is not None}
        for name, fields in sections.items()
    }
    return {name: fields for name, fields in kept.items() if fields}


def _text(path: Path | None) -> str | None:
    return str(path) if path else None


def main() -> None:
    """Run the command line; configuration mistakes end in one line, not a traceback."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except ConfigError as error:
        typer.echo(f"criticalkv: {error.message}", err=True)
        sys.exit(2)
    except CriticalKVError as error:
        typer.echo(f"criticalkv: {error.message}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
