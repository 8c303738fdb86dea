"""Addresses of processes on any host: HOST:PORT, where the host is a name, an IPv4 or an [IPv6] address."""

import socket
import threading
from typing import Any

from lockstep.errors import ConfigError, NetworkError

Place = tuple[Any, ...]
"""What sockets take and return as an address."""


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
    bare = address.startswith("[") and address.endswith("]")
    complete = f"{address}:0" if bare or ":" not in address else address
    split_address(complete)
    return complete


def join_address(place: Place) -> str:
    """Return the text of the address of a socket."""
    host, port = place[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve_host(host: str, port: int, patience: float) -> tuple[socket.AddressFamily, Place]:
    """Return the address of a host, of IPv4 if it has one; takes at most `patience` seconds.

    Raises:
        NetworkError: the name cannot be resolved.
    """
    found: list[tuple[socket.AddressFamily, Place]] = []
    why = [f"no answer in {patience:g} s"]

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            why[:] = [str(getattr(error, "strerror", None) or error)]
        else:
            infos.sort(key=lambda info: info[0] != socket.AF_INET)
            found.append((infos[0][0], infos[0][4]))

    # The system waits much longer for a name server that does not respond.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience)
    if not found:
        raise NetworkError(
            f"the host {host!r} cannot be resolved ({why[0]}); correct it, or give its IP address"
        )
    return found[0]
