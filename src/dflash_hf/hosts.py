"""The names that requests may call a server of this machine by."""

from __future__ import annotations

import ipaddress
import socket


def trusted_hosts(host: str) -> list[str]:
    """Returns the names that requests may call a server by which listens on `host`, for `TrustedHostMiddleware`.

    All requests to loopback come from here, also those of a page from elsewhere whose name was made to point here (DNS
    rebinding): those call it by that name. Where it listens to others too, nobody knows its names, and any will do.

    Raises:
        OSError: If there is no such host.
    """
    name = host.strip("[]").lower()
    addresses = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(name, None)]
    is_loopback = all(address.is_loopback for address in addresses)
    if not is_loopback:
        return ["*"]
    if ":" in name:  # IPv6
        name = f"[{name}]"
    return ["localhost", "127.0.0.1", "[::1]", name]
