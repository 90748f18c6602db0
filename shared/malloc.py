"""glibc's malloc, tuned for buffers of a few MiB that come and go.

With the default thresholds every 1 MiB buffer is a fresh mapping whose pages fault in
one by one; that halves the throughput of the data path.
"""

from __future__ import annotations

import ctypes
import sys

# 32 MiB is the largest threshold that glibc accepts.
_MMAP_THRESHOLD = 32 * 1024 * 1024
_TRIM_THRESHOLD = 512 * 1024 * 1024
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD),
    "MALLOC_TRIM_THRESHOLD_": str(_TRIM_THRESHOLD),
}
"""The same for a child process."""
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""For a child whose threads hand buffers to one another: they find them mapped already."""
ONE_HEAP = {**ONE_ARENA, "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
"""For a child that answers calls with many threads. What a thread keeps for itself is never
joined with its neighbours: the store's heap grew steadily, by 0.6 MiB in 100,000 calls."""


def tune_malloc(*, one_arena: bool = False) -> bool:
    """Keep freed buffers of up to 32 MiB in this process; return whether it worked.

    Args:
        one_arena: as ONE_ARENA, for this process; before it starts threads.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # musl: nothing to tune
    arenas = mallopt(-8, 1) if one_arena else 1
    return bool(mallopt(-3, _MMAP_THRESHOLD) and mallopt(-1, _TRIM_THRESHOLD) and arenas)


def trim_malloc() -> bool:
    """Give freed memory back to the system; return whether it worked."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):
        return False  # not glibc
