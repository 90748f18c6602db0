"""Which addresses can only mean this machine, and its free ports."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether a host name or IP address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_local_address(address: str) -> bool:
    """Whether a gRPC address, `host:port` or `unix:path`, can only mean this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    return is_loopback(address.rpartition(":")[0])


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
