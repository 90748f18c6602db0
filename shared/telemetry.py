"""Names that tell one worker from another in answers, logs and metrics."""

from __future__ import annotations

import os

from ray import serve
from ray.serve.exceptions import RayServeException


def replica_name() -> str:
    """Return this Serve replica's name, or the process id outside of Serve."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return f"pid-{os.getpid()}"
