"""What the agent tells the parent of its workers, and asks of it: to fork one. JSON, a packet each."""

from typing import Self

import msgspec

from lockstep.errors import ConfigError

READY = b"ready"
"""What the parent says first: from now on a worker is forked at once."""

MAX_REQUEST = 160 * 1024
"""Bytes that no request exceeds."""


class ForkServerSetup(msgspec.Struct, frozen=True):
    """What the parent is told when it is started.

    Attributes:
        agent: process id of the agent.
        connection: inherited descriptor of the socket to the agent.
        imports: modules to import, in this order.
        folder: where the script will find modules first; None where nothing is imported for it.
    """

    agent: int
    connection: int
    imports: tuple[str, ...] = ()
    folder: str | None = None

    def written(self) -> str:
        """Return the text of a variable."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse that text.

        Raises:
            ConfigError: it is none.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{error}; workers are started by `lockstep run`") from None


class ForkRequest(msgspec.Struct, frozen=True):
    """One worker to fork; its descriptors come along.

    Attributes:
        environment: how its environment differs from the parent's; None for a variable that it lacks.
    """

    environment: dict[str, str | None]


def encode_fork(request: ForkRequest) -> bytes:
    """Return the packet of a request.

    Raises:
        OSError: it is too large, or not UTF-8.
    """
    try:
        packet = msgspec.json.encode(request)
    except UnicodeEncodeError:
        raise OSError("its own part of the environment is not UTF-8") from None
    if len(packet) > MAX_REQUEST:
        raise OSError(f"its own part of the environment has more than {MAX_REQUEST} bytes")
    return packet


def decode_fork(packet: bytes) -> ForkRequest:
    """Return the request of a packet.

    Raises:
        ValueError: `encode_fork` has not made it.
    """
    try:
        return msgspec.json.decode(packet, type=ForkRequest)
    except RecursionError as error:
        raise ValueError(str(error)) from None
