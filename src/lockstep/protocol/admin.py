"""What a person's commands and a running job tell each other. JSON, one message per packet."""

from typing import Annotated, Any, TypeVar

import msgspec

MAX_TEXT = 4 * 1024
"""Bytes of UTF-8 that any one text of a message may have; of a longer one the beginning is sent."""

MAX_PACKET = 128 * 1024
"""Bytes that no encoded message exceeds; whoever receives reads with a buffer that is larger by one."""

_MOST_WORKERS = 2**31 - 1


class StatusRequest(msgspec.Struct, frozen=True, tag="ask"):
    """What is the state of the job?"""


class ScaleRequest(msgspec.Struct, frozen=True, tag="scale"):
    """Go on with so many workers."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=_MOST_WORKERS)]


class StopRequest(msgspec.Struct, frozen=True, tag="end"):
    """End as after SIGTERM: with checkpoints, keep one first."""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The state of the job; after a `ScaleRequest` or a `StopRequest` it also accepts the request.

    Attributes:
        job: the name of the job.
        script: what it runs.
        pid: of its agent.
        run_dir: its folder.
        since: when it started, in seconds since 1970.
        replicas: their number.
        workers: ids of the members now.
        joining: ids of those that are starting.
        wanted: how many workers it should have.
        where: what it is doing, such as "fit 1"; may be empty.
    """

    job: str
    script: str
    pid: int
    run_dir: str
    since: float
    replicas: int
    workers: tuple[int, ...]
    joining: tuple[int, ...]
    wanted: int
    where: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The order is not carried out, for `reason`."""

    reason: str


Order = StatusRequest | ScaleRequest | StopRequest
Reply = Status | Refused
Kind = TypeVar("Kind")

_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def encode(message: Order | Reply) -> bytes:
    """Return the packet of `message`; long texts lose their end.

    Raises:
        ValueError: the message is too large although its texts are not.
    """
    fields: dict[str, Any] = msgspec.to_builtins(message)
    packet = msgspec.json.encode(
        {name: _clip(value) if isinstance(value, str) else value for name, value in fields.items()}
    )
    if len(packet) > MAX_PACKET:
        raise ValueError(f"a message of {len(packet)} bytes is more than {MAX_PACKET}")
    return packet


def decode_order(packet: bytes) -> Order:
    """Return the order of a packet.

    Raises:
        ValueError: the packet is not one that `encode` makes of an order.
    """
    return _decode(_orders, packet)


def decode_reply(packet: bytes) -> Reply:
    """Return the reply of a packet.

    Raises:
        ValueError: the packet is not one that `encode` makes of a reply.
    """
    return _decode(_replies, packet)


def _decode(decoder: msgspec.json.Decoder[Kind], packet: bytes) -> Kind:
    if len(packet) > MAX_PACKET:
        raise ValueError(f"a packet of more than {MAX_PACKET} bytes")
    try:
        return decoder.decode(packet)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _clip(text: str) -> str:
    # A lone surrogate (an undecodable file name) has no UTF-8.
    return text.encode(errors="backslashreplace")[:MAX_TEXT].decode(errors="ignore")
