"""Which tests one of several test processes runs together, in order (pytest-xdist).

A file stays together: it shares servers and models. All that start Ray stay together: two
clusters at once are too much for two cores. They come first, since they take longest.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

RAY_GROUP = "ray"
RAY = tuple(
    f"tests/services/{name}.py"
    for name in (
        "chaos/test_chaos",
        "gateway/test_ray_workers",
        "test_autoscaling",
        "test_canary",
        "test_cluster",
        "test_continuation",
        "test_demo",
        "test_routing",
        "test_serve",
        "test_two_nodes",
    )
)


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Sends the tests of a group to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    """Called where several processes are asked for (`-n 2`)."""
    return FileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put those with Ray first; all else stays in its order."""
    items.sort(key=lambda item: _group(item.path.as_posix()) != RAY_GROUP)


def _group(path: str) -> str:
    return RAY_GROUP if path.endswith(RAY) else path
