"""The store's calls in threads: what hangs blocks no other kind, what is lost is undone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.async_store import AsyncStore
from criticalkv.shared.store_client import StoreClient

NODE = "0" * 64


class Client:
    """Hangs in `stat`, and notes who gives leases back."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.released: list[threading.Thread] = []

    def close(self) -> None:
        pass

    def healthy(self) -> bool:
        return True

    def stat(self, _: Any) -> list[pb.NodeStat]:
        self.go_on.wait(10)
        return []

    def acquire_lease(self, *_: Any, **__: Any) -> pb.AcquireLeaseResponse:
        return pb.AcquireLeaseResponse(acquired=True, lease_token="t")

    def release_lease(self, *_: Any) -> bool:
        self.released.append(threading.current_thread())
        return True

    def finish_request(self, *_: Any) -> bool:
        return True


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def store(client: Client) -> Iterator[AsyncStore]:
    store = AsyncStore(cast(StoreClient, client), threads=2)
    yield store
    client.go_on.set()
    store.close()


async def test_health_and_releases_do_not_wait_for_calls_that_hang(
    store: AsyncStore, client: Client
) -> None:
    hung = [asyncio.create_task(store.stat([NODE])) for _ in range(4)]
    async with asyncio.timeout(3):
        assert await store.healthy()
        assert await store.release_lease(NODE, "t")
        assert await store.finish_request("a", "b", "c", b"")
    client.go_on.set()
    assert await asyncio.gather(*hung) == [[]] * 4


async def test_a_lost_lease_is_given_back_by_a_thread(store: AsyncStore, client: Client) -> None:
    asking = asyncio.create_task(store.acquire_lease(NODE, 1000))
    await asyncio.sleep(0)
    time.sleep(0.1)  # the call ends before this loop hears of it
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(3):
        while not client.released:
            await asyncio.sleep(0.01)
    assert client.released != [threading.current_thread()]
