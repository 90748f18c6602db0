"""What a Triton test's own file finds when it runs as a script: see `triton_builds`."""

from __future__ import annotations

from typing import Any

import pytest
import triton_builds


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> Any:
    """Results of the file's `interpret`."""
    pytest.importorskip("triton")
    return triton_builds.in_process(str(request.path), "interpret", interpret=True)


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Any:
    """Builds of the file's `build`: [registers, bytes spilled, shared memory] by name."""
    pytest.importorskip("triton")
    return triton_builds.in_process(str(request.path), "build", interpret=False)
