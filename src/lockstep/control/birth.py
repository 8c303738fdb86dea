"""What the agent asks the parent of its workers: to fork one. JSON, a packet each."""

import msgspec

READY = b"ready"
"""What the parent says first: from now on a worker is forked at once."""

MAX_REQUEST = 160 * 1024
"""Bytes that no request exceeds."""


class Birth(msgspec.Struct, frozen=True):
    """One worker to fork; its descriptors come along.

    Attributes:
        environment: how its environment differs from the parent's; None for a variable that it lacks.
    """

    environment: dict[str, str | None]


def encode_birth(birth: Birth) -> bytes:
    """Return the packet of a request.

    Raises:
        OSError: it is too large.
    """
    packet = msgspec.json.encode(birth)
    if len(packet) > MAX_REQUEST:
        raise OSError(f"its own part of the environment has more than {MAX_REQUEST} bytes")
    return packet


def decode_birth(packet: bytes) -> Birth:
    """Return the request of a packet that `encode_birth` has made."""
    return msgspec.json.decode(packet, type=Birth)
