"""What an address that a process listens on means. Not here: binding it."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
