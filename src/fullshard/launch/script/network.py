"""Addresses and ports of this machine, and its interface towards another machine."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import sys

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def interface_to(host: str, port: int) -> str | None:
    """Return the network interface that reaches ``host``, such as ``eth0``; nothing is sent.

    Without it gloo uses the interface of the machine's own name, which on many systems is the loopback.

    Args:
        host: Name or IPv4 address.
        port: A port there.

    Returns:
        None if it cannot be determined, or if it is the loopback.
    """
    if sys.platform != "linux":
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port or 1))
            address = probe.getsockname()[0]
            names = [name for _, name in socket.if_nameindex() if name != "lo"]
            return next((name for name in names if _address_of(probe, name) == address), None)
    except OSError:
        return None


def _address_of(probe: socket.socket, interface: str) -> str | None:
    """Return the IPv4 address of an interface, or None."""
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, interface.encode()[:15].ljust(256, b"\0"))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def is_here(host: str) -> bool:
    """Return whether a name or address is this machine's."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def port_is_free(port: int) -> bool:
    """Return whether a TCP port of this machine is free; 0 always is."""
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        return True
    return False


def address_towards(host: str, port: int) -> str | None:
    """Return this machine's address as seen from ``host``'s network; None if it cannot be determined."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))
        return probe.getsockname()[0]
    return None
