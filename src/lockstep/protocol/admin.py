"""Requests of `lockstep list`, `scale`, `stop` and `top` to a job, and its replies: JSON, one per packet.

The coordinator passes a `StackRequest` on to the agent of the worker, and a `ScaleRequest` to supervision.
The command that started the job sends it a `StopRequest` over a separate channel.
"""

from signal import SIGTERM
from typing import Annotated, Any, TypeVar

import msgspec

from lockstep.protocol.channel import Channel, decoded, too_long

MAX_TEXT = 4 * 1024
"""Bytes of UTF-8 that each text in a message may have; a longer one is cut."""

MAX_PACKET = 128 * 1024
"""The size limit of an encoded message in bytes; receivers read with a buffer that is larger by one."""

_MOST_WORKERS = 2**31 - 1
_MOST_SIGNAL = 64


class StatusRequest(msgspec.Struct, frozen=True, tag="ask"):
    """Requests the state of the job."""


class ScaleRequest(msgspec.Struct, frozen=True, tag="scale"):
    """Requests this number of workers."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=_MOST_WORKERS)]


class StopRequest(msgspec.Struct, frozen=True, tag="end"):
    """Requests the end of the job, after a last checkpoint if the job saves checkpoints.

    Attributes:
        signal: the signal that the command has received; SIGTERM if another terminal requests the end.
        waited: the seconds for which the request has waited for a coordinator that could receive it.
    """

    signal: Annotated[int, msgspec.Meta(ge=1, le=_MOST_SIGNAL)] = int(SIGTERM)
    waited: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0

    def after(self, seconds: float) -> "StopRequest":
        """Return the request as it is after so many seconds."""
        return StopRequest(self.signal, self.waited + max(0.0, seconds))


StopChannel = Channel[StopRequest, StopRequest]
"""A channel over which the command stops a job; it closes when the command ends."""


class StackRequest(msgspec.Struct, frozen=True, tag="stack"):
    """Requests the Python stack of a worker."""

    worker: int


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The state of the job, which also accepts a `ScaleRequest` or a `StopRequest`.

    Attributes:
        job: its name.
        script: the script or module that it runs.
        pid: process id of its command, which handles signals.
        run_dir: its run folder.
        since: when it started, in seconds since 1970.
        replicas: number of replicas.
        workers: ids of the members.
        joining: ids of the joiners.
        wanted: the number of workers that it should have.
        where: its current call, such as "fit 1"; may be empty.
        went: its troubles, in a few words, such as "2 checkpoints failed".
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
    went: str = ""


class StackReply(msgspec.Struct, frozen=True, tag="stack"):
    """The Python stack of a worker.

    Attributes:
        worker: its id.
        frames: its frames, the innermost first.
        problem: why there is no stack; empty if there is one.
    """

    worker: int
    frames: tuple[str, ...]
    problem: str = ""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request is refused, for `reason`."""

    reason: str


AdminRequest = StatusRequest | ScaleRequest | StopRequest | StackRequest
Reply = Status | StackReply | Refused
Packet = TypeVar("Packet")

_requests: msgspec.json.Decoder[AdminRequest] = msgspec.json.Decoder(AdminRequest)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def encode(message: AdminRequest | Reply) -> bytes:
    """Return the packet of `message`; long texts are cut.

    Raises:
        ValueError: the message is too large although its texts are short enough.
    """
    fields: dict[str, Any] = msgspec.to_builtins(message)
    packet = msgspec.json.encode(
        {name: _clip(value) if isinstance(value, str) else value for name, value in fields.items()}
    )
    if len(packet) > MAX_PACKET:
        raise ValueError(too_long(len(packet), MAX_PACKET))
    return packet


def decode_request(packet: bytes) -> AdminRequest:
    """Return the request in a packet.

    Raises:
        ValueError: the packet is not an encoded request.
    """
    return _decode(_requests, packet)


def decode_reply(packet: bytes) -> Reply:
    """Return the reply in a packet.

    Raises:
        ValueError: the packet is not an encoded reply.
    """
    return _decode(_replies, packet)


def _decode(decoder: msgspec.json.Decoder[Packet], packet: bytes) -> Packet:
    if len(packet) > MAX_PACKET:
        raise ValueError(f"a packet of more than {MAX_PACKET} bytes")
    return decoded(decoder, packet)


def _clip(text: str) -> str:
    # A lone surrogate, such as one in an undecodable file name, does not have a UTF-8 encoding.
    return text.encode(errors="backslashreplace")[:MAX_TEXT].decode(errors="ignore")
