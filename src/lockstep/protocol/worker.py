"""What workers, the agent and the command tell each other. JSON, one message a packet."""

from typing import Any, TypeVar

import msgspec

from lockstep.observability.events import WorkerEvent

MAX_TEXT = 64 * 1024
"""Bytes of UTF-8 that any one text of a message may have."""

MAX_PACKET = 512 * 1024
"""Bytes that no encoded message exceeds; whoever receives reads with a buffer of this size."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The worker is about to run the script."""


class EventReport(msgspec.Struct, frozen=True, tag="report"):
    """The worker has published an event."""

    event: WorkerEvent


class WaitReport(msgspec.Struct, frozen=True, tag="waiting"):
    """The worker has been waiting for `seconds` in `what` for `workers`."""

    what: str
    workers: tuple[int, ...]
    seconds: float


class FileOpened(msgspec.Struct, frozen=True, tag="writes"):
    """The script opens a file to write to it.

    Attributes:
        path: of the file, absolute.
        line: of the program, as `train.py:41`.
    """

    path: str
    line: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The script raised, and the worker will end with `status`.

    Attributes:
        status: the exit status that follows.
        summary: the error in one line.
        traceback: as Python prints it.
        blames: whether the error only says that another worker is lost or stuck.
        prints: whether the worker prints the traceback; else the agent puts it into the worker's log.
    """

    status: int
    summary: str
    traceback: str
    blames: bool
    prints: bool = True


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The script came to its end, or has left with `status`, which the process will end with."""

    status: int = 0


class JoinRequest(msgspec.Struct, frozen=True, tag="asks"):
    """A worker that joins wants to know where the training is, or, if `whole`, to be let in."""

    whole: bool


class StateReply(msgspec.Struct, frozen=True, tag="given"):
    """What a joining worker asked for: the descriptor of memory that holds it comes with this message.

    Attributes:
        view: the number of the view in which it is given.
        whole: whether it is the whole state, and all members wait for the next view; else the position.
        failure: why it could not be given; then there is no descriptor.
    """

    view: int
    whole: bool
    failure: str = ""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The command was asked to end the job by `signal`."""

    signal: int


class NewView(msgspec.Struct, frozen=True, tag="view"):
    """The view that follows; the descriptor of its memory comes with it.

    A worker that joins with it also gets the descriptor of memory that holds the state.

    Attributes:
        number: of the view.
        workers: its members, the longest-serving first.
    """

    number: int
    workers: tuple[int, ...]


class Position(msgspec.Struct, frozen=True, tag="position"):
    """Where the training is, in memory whose descriptor comes with it."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The worker is not needed any more, and ends."""


class JobOver(msgspec.Struct, frozen=True, tag="over"):
    """The job ends, for `reason`: no view follows."""

    reason: str


WorkerMessage = Started | EventReport | WaitReport | FileOpened | Failed | Finished | JoinRequest | StateReply
AgentMessage = NewView | Position | Leave | JobOver
Message = WorkerMessage | Stop | AgentMessage
Kind = TypeVar("Kind")

_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the packet of `message`; long texts lose their middle, odd values become their `repr`.

    Raises:
        ValueError: the message is too large although its texts are not.
    """
    packet = msgspec.json.encode(_clean(msgspec.to_builtins(message, enc_hook=repr)))
    if len(packet) > MAX_PACKET:
        raise ValueError(f"a message of {len(packet)} bytes is more than {MAX_PACKET}")
    return packet


def decode(packet: bytes) -> Message:
    """Return the message of a packet.

    Raises:
        ValueError: the packet is not one that `encode` makes.
    """
    try:
        return _decoder.decode(packet)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _clip(value)
    if isinstance(value, dict):
        return {_clip(str(name)): _clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def _clip(text: str) -> str:
    # A lone surrogate (an undecodable file name in an error) has no UTF-8.
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= MAX_TEXT:
        return encoded.decode()
    mark = b"\n... (cut) ...\n"
    half = (MAX_TEXT - len(mark)) // 2
    return (encoded[:half] + mark + encoded[-half:]).decode(errors="ignore")
