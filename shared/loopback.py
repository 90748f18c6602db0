"""Which addresses can only mean this machine."""

from __future__ import annotations

import ipaddress


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
