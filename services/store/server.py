"""The store's process: assembles the parts, listens, and stops in order.

Run as `python -m criticalkv.services.store.server` it reads a StoreConfig as JSON from
standard input (secrets do not belong in arguments); see `process.start_store`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as aio_health

from criticalkv.services.store.aliases import Aliases
from criticalkv.services.store.books import Books
from criticalkv.services.store.eviction import Evictor
from criticalkv.services.store.get import Reader
from criticalkv.services.store.guarded import GuardedData
from criticalkv.services.store.handles import Handles
from criticalkv.services.store.janitor import Janitor
from criticalkv.services.store.leases import Leases
from criticalkv.services.store.metadata_room import MetadataRoom
from criticalkv.services.store.metrics import METRICS
from criticalkv.services.store.nodes import Nodes
from criticalkv.services.store.offer import Offer
from criticalkv.services.store.order import Order
from criticalkv.services.store.put import Writer
from criticalkv.services.store.redis_data import RedisData, check_url, policy_of
from criticalkv.services.store.requests import Requests
from criticalkv.services.store.running_calls import RunningCalls
from criticalkv.services.store.security import Security
from criticalkv.services.store.segments import Segments
from criticalkv.services.store.service import SERVICE, Service
from criticalkv.services.store.shrinking import Shrinker
from criticalkv.services.store.tasks import Background, repeat
from criticalkv.services.store.topology import data_client
from criticalkv.services.store.valkey import Valkey, die_with_parent
from criticalkv.shared.breaker import Breaker
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import ConfigError, CriticalKVError, StoreUnavailableError
from criticalkv.shared.frames import MAX_MESSAGE_BYTES
from criticalkv.shared.malloc import tune_malloc
from criticalkv.shared.redis_location import Deployment, Location

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 5.0
"""Limit of one try of whatever Redis is asked; a caller's own deadline may end it sooner."""
WATCH_S = 1.0
GRACE_S = 2.0
"""How long running calls may take after the order to stop."""
OPTIONS = [
    ("grpc.so_reuseport", 0),  # or a second server would share the port in silence
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients ping every 10 s; more often than this is answered by hanging up.
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class Store:
    """A running store.

    Attributes:
        address: where it listens, with the real port.
        valkey: the embedded server, or None if a URL was configured.
    """

    def __init__(self, address: str, valkey: Valkey | None) -> None:
        self.address = address
        self.valkey = valkey


async def serve(
    config: StoreConfig,
    ready: Callable[[], None] | None = None,
    *,
    listening: Callable[[Store], None] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or cancellation.

    Args:
        config: address, Redis and limits.
        ready: called once calls are answered.
        listening: called before `ready`, with the real address.

    Raises:
        ConfigError: if the configuration is unsafe or the address is taken.
        StoreUnavailableError: if Redis does not answer, or the embedded one has ended.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
            loop.add_signal_handler(signum, stop.set)
    async with running(config) as store:
        if listening is not None:
            listening(store)
        if ready is not None:
            ready()
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), WATCH_S)
            if store.valkey is not None and store.valkey.process.poll() is not None:
                raise StoreUnavailableError("the embedded Valkey has ended; start the store again")


@asynccontextmanager
async def running(config: StoreConfig, *, order: Order | None = None) -> AsyncIterator[Store]:
    """Run a store inside this event loop. Raises as `serve`.

    Args:
        order: which nodes shrink and go first; None = the least valuable.
    """
    security = Security(config)
    embedded = config.redis_url == "embedded"
    valkey = Valkey(config.data_dir, _maxmemory(config)) if embedded else None
    deployment = (
        Deployment.of(valkey.store) if valkey else check_url(config.redis_url, config.redis_ca)
    )
    breaker = Breaker("Redis")
    data = GuardedData(data_client(deployment, REDIS_TIMEOUT_S), breaker, REDIS_TIMEOUT_S)
    redis = RedisData(deployment, REDIS_TIMEOUT_S, breaker=breaker, on_lost=data.forget)
    segments = Segments(data)
    background = Background()
    try:
        await redis.check(embedded)
        offer = Offer(
            valkey.reader if valkey else _reader(config),
            None if deployment.kind == "single" else data.location_of,
        )
        parts = (security, redis, segments, offer, background, order)
        with contextlib.closing(offer):
            async with _listening(config, *parts) as address:
                yield Store(address, valkey)
    finally:
        await background.drain(GRACE_S)
        segments.close()
        await redis.close()
        if valkey is not None:
            valkey.stop()


@asynccontextmanager
async def _listening(
    config: StoreConfig,
    security: Security,
    redis: RedisData,
    segments: Segments,
    offer: Offer,
    background: Background,
    order: Order | None,
) -> AsyncIterator[str]:
    books = Books(redis, config.memory_limit_mb << 20, order)
    room = MetadataRoom(config)
    room.look(await redis.memory_infos(), await books.total())
    nodes = Nodes(redis, books, config, room)
    shrinker = Shrinker(redis, nodes, books, config)
    janitor = Janitor(redis, nodes, books, shrinker, int(config.read_deadline_s * 1000))
    evictor = Evictor(nodes, books, janitor, shrinker, config)
    writer = Writer(redis, segments, nodes, books, evictor, background, config)
    service = Service(
        security,
        writer,
        Reader(segments, nodes),
        nodes,
        Handles(redis, nodes, config, room),
        Requests(redis, config, room),
        Aliases(redis, nodes, config, room),
        Leases(redis, config),
        offer,
        RunningCalls(config.max_concurrent_rpcs),
        config.node_ttl_s * 1000,
        config.read_deadline_s,
    )
    server = grpc.aio.server(
        options=OPTIONS,
        compression=grpc.Compression.NoCompression,
        maximum_concurrent_rpcs=config.max_concurrent_rpcs,
    )
    server.add_generic_rpc_handlers((service.handler(),))
    health = aio_health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    address = _bind(server, config.address, security)
    await server.start()
    if config.metrics_port:
        METRICS.serve(config.metrics_port)
    watch = _Watch(redis, books, room, health)
    tasks = [
        asyncio.create_task(janitor.run(config.janitor_interval_s)),
        asyncio.create_task(evictor.run()),
        asyncio.create_task(repeat(WATCH_S, watch.look, "reaching Redis")),
    ]
    await _set_health(health, True)
    log.info("the store listens on %s", address)
    try:
        yield address
    finally:
        for task in tasks:
            task.cancel()
        await health.enter_graceful_shutdown()
        await server.stop(GRACE_S)
        await asyncio.gather(*tasks, return_exceptions=True)


class _Watch:
    """Health follows Redis: a store that cannot reach it serves nobody."""

    def __init__(
        self,
        redis: RedisData,
        books: Books,
        room: MetadataRoom,
        health: aio_health.HealthServicer,
    ) -> None:
        self._redis = redis
        self._books = books
        self._room = room
        self._health = health
        self._policy = "noeviction"

    async def look(self) -> None:
        try:
            held, infos = await self._books.total(), await self._redis.memory_infos()
        except CriticalKVError:
            await _set_health(self._health, False)
            raise
        METRICS.held.set(held)
        self._note_policy(policy_of(infos))
        self._room.look(infos, held)
        await _set_health(self._health, True)

    def _note_policy(self, policy: str) -> None:
        METRICS.redis_evicts.set(policy != "noeviction")
        if policy not in ("noeviction", self._policy):
            log.warning("Redis evicts by itself now (maxmemory-policy %s): nodes get lost", policy)
        self._policy = policy


async def _set_health(health: aio_health.HealthServicer, serving: bool) -> None:
    kinds = health_pb2.HealthCheckResponse
    for name in ("", SERVICE):
        await health.set(name, kinds.SERVING if serving else kinds.NOT_SERVING)


def _bind(server: grpc.aio.Server, address: str, security: Security) -> str:
    try:
        if security.credentials is not None:
            port = server.add_secure_port(address, security.credentials)
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            f"store.address {address} cannot be used: {error}", param="store.address"
        ) from error
    if address.startswith("unix"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"


def _reader(config: StoreConfig) -> Location | None:
    if not config.redis_reader_url:
        return None
    param = "store.redis_reader_url"
    return Location.parse(config.redis_reader_url, config.redis_ca, param).check(param)


def _maxmemory(config: StoreConfig) -> int:
    # Above the store's own limit: token records, handles and values being received.
    limit = config.memory_limit_mb << 20
    return limit + limit // 4 + (256 << 20)


def main(config: StoreConfig) -> None:
    """Serve until SIGTERM or SIGINT, then stop Valkey as well. Raises as `serve`."""
    tune_malloc(one_arena=True)
    asyncio.run(serve(config))


def _child() -> None:
    parser = argparse.ArgumentParser(description="Run the store for its parent process.")
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != arguments.parent:
        raise SystemExit("the parent has ended already")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    config = StoreConfig.model_validate_json(sys.stdin.buffer.read())

    def report(line: str) -> None:
        with contextlib.suppress(OSError), os.fdopen(arguments.ready_fd, "w") as out:
            out.write(line)

    tune_malloc(one_arena=True)
    try:
        asyncio.run(serve(config, listening=lambda store: report(f"ok {store.address}")))
    except CriticalKVError as error:
        report(f"{error.code} {error.message}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    _child()
