"""This machine's address and network interface, as seen from another machine."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import sys

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def address_towards(host: str, port: int) -> str | None:
    """Return this machine's address as seen from ``host``'s network; None if it cannot be determined."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))
        address: str = probe.getsockname()[0]
        return address
    return None


def interface_to(host: str, port: int) -> str | None:
    """Return the network interface that reaches ``host``, such as ``eth0``; nothing is sent.

    Without it gloo uses the interface of the machine's own name, which on many systems is the loopback.

    Args:
        host: Name or IPv4 address.
        port: A port there.

    Returns:
        None if it cannot be determined, or if it is the loopback.
    """
    address = address_towards(host, port)
    if sys.platform != "linux" or address is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        names = [name for _, name in socket.if_nameindex() if name != "lo"]
        return next((name for name in names if _address_of(probe, name) == address), None)


def _address_of(probe: socket.socket, interface: str) -> str | None:
    """Return the IPv4 address of an interface, or None."""
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, interface.encode()[:15].ljust(256, b"\0"))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
