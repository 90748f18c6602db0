"""Fixtures that several folders share."""

from __future__ import annotations

from collections.abc import Iterator

import groups
import pytest
import skips

from criticalkv.services.store.process import StoreProcess, start_store
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.store_client import StoreClient

# Hooks, which pytest finds here by their names.
pytest_collection_modifyitems = groups.pytest_collection_modifyitems
pytest_xdist_make_scheduler = groups.pytest_xdist_make_scheduler
pytest_configure = skips.pytest_configure
pytest_sessionfinish = skips.pytest_sessionfinish
pytest_terminal_summary = skips.pytest_terminal_summary


@pytest.fixture(scope="session")
def store_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A real store with a real Valkey, one for the whole run."""
    config = StoreConfig(
        address="127.0.0.1:0",
        data_dir=str(tmp_path_factory.mktemp("store")),
        memory_limit_mb=512,
        lease_ttl_s=2,
        read_deadline_s=5.0,
        janitor_interval_s=0.2,
    )
    with start_store(config) as process:
        yield process


@pytest.fixture
def store(store_process: StoreProcess) -> Iterator[StoreClient]:
    """A client of that store."""
    with store_process.client() as client:
        yield client
