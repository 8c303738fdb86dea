"""Addresses of processes on any host: HOST:PORT, where the host is a name, an IPv4 or an [IPv6] address."""

import contextlib
import errno
import ipaddress
import socket
import threading
from typing import Any

from lockstep.errors import ConfigError, NetworkError

SocketAddress = tuple[Any, ...]
"""The form in which sockets take and return an address."""

RESOLVES_WITHIN = 5.0
"""Seconds for the name service, unless a caller has another limit."""


def split_address(address: str) -> tuple[str, int]:
    """Return host and port.

    Raises:
        ConfigError: the address is malformed.
    """
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare) != (bare != host) or not (port.isascii() and port.isdigit()):
        raise ConfigError(
            f"{address!r} is not an address; expected HOST:PORT, such as 10.0.0.1:12345 or [::1]:12345"
        )
    if len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"the port of {address} is more than 65535")
    return bare, int(port)


def with_port(address: str) -> str:
    """Return an address with a port: 0, for any free one, if it has none.

    Raises:
        ConfigError: the address is malformed.
    """
    if address.isdecimal():
        raise ConfigError(
            f"{address} is a port without an address; expected ADDRESS:{address}, with the address at which "
            "other hosts reach this one"
        )
    bare = address.startswith("[") and address.endswith("]")
    complete = f"{address}:0" if bare or ":" not in address else address
    split_address(complete)
    return complete


def join_address(address: SocketAddress) -> str:
    """Return the text of the address of a socket."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(number: str) -> bool:
    """Whether only processes of this host can reach an IP address."""
    address = ipaddress.ip_address(number.partition("%")[0])
    # Before Python 3.13, `is_loopback` does not recognize IPv4 addresses that are written as IPv6 ones.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_here(family: socket.AddressFamily, address: SocketAddress) -> bool:
    """Whether the IP address in a socket address is one of this host.

    Raises:
        OSError: it cannot be used.
    """
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return False
    return True


def resolve_host(
    host: str, port: int, patience: float = RESOLVES_WITHIN
) -> tuple[socket.AddressFamily, SocketAddress]:
    """Return the address of a host, preferably of IPv4; takes at most `patience` seconds.

    Raises:
        NetworkError: the name cannot be resolved.
    """
    resolved = look_up(host, port, patience)
    if isinstance(resolved, str):
        raise NetworkError(
            f"the host {host!r} cannot be resolved ({resolved}); correct it, or give its IP address"
        )
    return resolved


def look_up(
    host: str, port: int, patience: float = RESOLVES_WITHIN
) -> tuple[socket.AddressFamily, SocketAddress] | str:
    """Return the address of a host as `resolve_host` does, or why it cannot be resolved."""
    with contextlib.suppress(OSError, UnicodeError):
        # An IP address does not need a name server, nor a thread that a busy machine starts late.
        return _preferred(host, port, socket.AI_NUMERICHOST)
    addresses: list[tuple[socket.AddressFamily, SocketAddress]] = []
    why = [f"no answer in {patience:g} s"]

    def ask() -> None:
        try:
            addresses.append(_preferred(host, port))
        except (OSError, UnicodeError) as error:
            why[:] = [str(getattr(error, "strerror", None) or error)]

    # The system waits much longer for a name server that does not respond.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience)
    return addresses[0] if addresses else why[0]


def _preferred(host: str, port: int, flags: int = 0) -> tuple[socket.AddressFamily, SocketAddress]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    family, _, _, _, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
    return family, address
