"""Keep a Serve replica off the network when its Ray cluster is local.

Ray 2.60 gives every replica a gRPC listener on *all* interfaces, for a transport
between deployments that is off unless asked for, and offers no setting for its
address. Serve runs a replica's `check_health` before it declares the replica healthy
and after it opened that listener, so this is where it can be closed in time.

Knows nothing of what a replica does.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from criticalkv.shared.loopback import is_loopback


def on_loopback(replica: type[Any]) -> type[Any]:
    """Return a subclass that closes its open listeners before it reports healthy."""

    class Replica(replica):  # type: ignore[misc]
        _listeners_closed = False

        async def check_health(self) -> None:
            if not self._listeners_closed:
                close_open_listeners()
                self._listeners_closed = True
            check = getattr(super(), "check_health", _healthy)
            if inspect.iscoroutinefunction(check):
                await check()
            else:
                await asyncio.to_thread(check)  # as Serve itself would: it may block

    Replica.__name__, Replica.__doc__ = replica.__name__, replica.__doc__
    return Replica


def close_open_listeners() -> list[tuple[str, int]]:
    """Stop this process listening on all interfaces, if its Ray node is on loopback.

    Returns the closed addresses. gRPC sees its acceptor fail and drops it.
    """
    import ray

    if not is_loopback(ray.util.get_node_ip_address()):
        return []
    closed = []
    for sock in _own_tcp_listeners():
        host, port = sock.getsockname()[:2]
        if ip_address(host).is_unspecified:
            sock.shutdown(socket.SHUT_RDWR)
            closed.append((host, port))
    return closed


def _own_tcp_listeners() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _duplicate(int(name)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                yield sock


def _duplicate(fd: int) -> socket.socket:
    """Open a second handle, so that closing ours leaves the owner's alone."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # not a socket
        raise


def _healthy() -> None:
    """Stand in where the class has no health check of its own."""
