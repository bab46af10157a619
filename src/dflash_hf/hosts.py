"""This module lists the host names by which requests may address a server on this machine."""

from __future__ import annotations

import ipaddress
import socket


def trusted_hosts(host: str) -> list[str]:
    """Returns the host names by which requests may address a server that listens on `host`.

    The names are for `TrustedHostMiddleware`. All requests to loopback come from this machine. They include requests
    of a foreign web page whose name was made to point to loopback (DNS rebinding), and such requests use the name of
    that page. If the server also listens on other addresses, its names are not known, so any name is accepted.

    Raises:
        OSError: If there is no host of this name.
    """
    name = host.strip("[]").lower()
    addresses = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(name, None)]
    is_loopback = all(address.is_loopback for address in addresses)
    if not is_loopback:
        return ["*"]
    if ":" in name:  # IPv6
        name = f"[{name}]"
    return ["localhost", "127.0.0.1", "[::1]", name]
