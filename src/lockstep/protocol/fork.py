"""The messages between an agent and its fork server: JSON, one per packet."""

from typing import Self

import msgspec

from lockstep.errors import ConfigError

READY = b"ready"
"""The first packet of the fork server, sent once it can fork a worker without delay."""

MAX_REQUEST = 160 * 1024
"""The size limit of an encoded request in bytes."""


class ForkServerSetup(msgspec.Struct, frozen=True):
    """The settings of a fork server at its start.

    Attributes:
        agent: process id of the agent.
        connection: inherited descriptor of the socket to the agent.
        imports: modules to import, in this order.
        folder: the folder in which the script searches for modules first; None if no modules are imported.
    """

    agent: int
    connection: int
    imports: tuple[str, ...] = ()
    folder: str | None = None

    def written(self) -> str:
        """Return the value of the environment variable that passes it."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse the result of `written`.

        Raises:
            ConfigError: the text is invalid.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{error}; workers are started by `lockstep run`") from None


class ForkRequest(msgspec.Struct, frozen=True):
    """Requests a fork; the descriptors of the worker are sent with it.

    Attributes:
        environment: the differences of the worker's environment from the fork server's; None removes a
            variable.
    """

    environment: dict[str, str | None]


def encode_fork(request: ForkRequest) -> bytes:
    """Return the packet of a request.

    Raises:
        OSError: it is too large, or has no UTF-8 encoding.
    """
    try:
        packet = msgspec.json.encode(request)
    except UnicodeEncodeError:
        raise OSError("its own part of the environment is not UTF-8") from None
    if len(packet) > MAX_REQUEST:
        raise OSError(f"its own part of the environment has more than {MAX_REQUEST} bytes")
    return packet


def decode_fork(packet: bytes) -> ForkRequest:
    """Return the request in a packet.

    Raises:
        ValueError: the packet is not an encoded request.
    """
    try:
        return msgspec.json.decode(packet, type=ForkRequest)
    except RecursionError as error:
        raise ValueError(str(error)) from None
