"""The frames that hosts send each other, as bytes.

Every decoder accepts any bytes: it returns a value or raises `FrameError`. Each frame begins with a header of
fixed size, which contains the number of bytes that follow. The connections of a view are new. The first frame
on each connection of lane 0 is a hello, which names the job, the view and the host.
"""

import enum
import struct
from typing import NamedTuple, Self

import msgspec

from lockstep.collectives.call import CHECK_LIMIT, CollectiveCall
from lockstep.errors import LockstepError


class FrameError(LockstepError):
    """Bytes that are not the expected frame."""


class Frame(enum.IntEnum):
    """The purpose of a frame."""

    HELLO = 0
    """The first frame: a hello follows."""
    CALL = 1
    """A host takes part in a call, with the bytes that follow."""
    DETAILS = 2
    """Why a host's members do not complete a call."""
    RESULT = 3
    """The result of a call, for a host that has not completed it."""
    ABORT = 4
    """The view has ended, for the reason that follows."""
    LEFT = 5
    """A worker makes no more calls."""


class Standing(enum.IntEnum):
    """Whether the members of a host can continue a call."""

    READY = 0
    DIFFERING = 1
    """They make different calls."""
    UNFIT = 2
    """They lack memory."""


_PREFIX = struct.Struct("<4sBBxxIIQQ")
_CALL = struct.Struct("<16sB64s16s")
_MAGIC = b"LSX2"
NO_CALL = bytes(_CALL.size)
HEADER_SIZE = _PREFIX.size + _CALL.size
LENGTH_LIMIT = 1 << 44
"""More bytes than any frame has. Memory for what follows a header is taken as it arrives."""


class Header(NamedTuple):
    """The beginning of each frame.

    Attributes:
        frame: the purpose of the frame.
        standing: whether the host that sends it can continue the call.
        step: the part of the call to which it belongs, from 0; in a frame `LEFT`, the id of the worker.
        notice: the notice that the host has read.
        number: the number of the call.
        length: bytes that follow.
        call: the description of the call; see `describe_call`.
    """

    frame: Frame
    standing: Standing = Standing.READY
    step: int = 0
    notice: int = 0
    number: int = 0
    length: int = 0
    call: bytes = NO_CALL

    def encode(self) -> bytes:
        """Return the header as bytes."""
        return _PREFIX.pack(_MAGIC, *self[:-1]) + self.call

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a header.

        Raises:
            FrameError: `data` is not a header.
        """
        if len(data) != HEADER_SIZE:
            raise FrameError(f"a header of {len(data)} bytes instead of {HEADER_SIZE}")
        magic, frame, standing, step, notice, number, length = _PREFIX.unpack_from(data)
        if magic != _MAGIC or length > LENGTH_LIMIT:
            raise FrameError("a malformed header")
        try:
            return cls(
                frame=Frame(frame),
                standing=Standing(standing),
                step=step,
                notice=notice,
                number=number,
                length=length,
                call=data[_PREFIX.size :],
            )
        except ValueError as error:
            raise FrameError(str(error)) from None


def describe_call(call: CollectiveCall) -> bytes:
    """Return all of `call` that is compared, as bytes: equal calls have equal bytes."""
    assert len(call.check) <= CHECK_LIMIT
    return _CALL.pack(call.kind.encode(), len(call.check), call.check, call.layout)


_HELLO = struct.Struct("<16sIIQqB")
HELLO_SIZE = _HELLO.size


class Hello(NamedTuple):
    """The first message of a host to another one in a view.

    Attributes:
        job: 16 bytes.
        term: the term of the coordinator that began the view.
        view: its number.
        incarnation: the incarnation of the host that sends it.
        done: the number of the last call that the host's members have completed; -1 if all have just joined.
        has_result: whether they have its result.
    """

    job: bytes
    term: int
    view: int
    incarnation: int
    done: int
    has_result: bool

    def encode(self) -> bytes:
        """Return the hello as bytes."""
        return _HELLO.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a hello.

        Raises:
            FrameError: `data` is not a hello.
        """
        if len(data) != HELLO_SIZE:
            raise FrameError(f"a hello of {len(data)} bytes instead of {HELLO_SIZE}")
        job, term, view, incarnation, done, has_result = _HELLO.unpack(data)
        if done < -1 or has_result > 1:
            raise FrameError("a malformed hello")
        return cls(job, term, view, incarnation, done, bool(has_result))


class MemberDetails(msgspec.Struct, frozen=True):
    """The call of one member, if not all members can complete theirs.

    Attributes:
        kind, what, check, layout: the fields of its call.
        leaves: a line for each leaf that it passes.
        unfit: why it cannot take part; empty if it can.
    """

    kind: str
    what: str
    check: bytes
    layout: bytes
    leaves: list[str]
    unfit: str

    @classmethod
    def of(cls, call: CollectiveCall, leaves: list[str], unfit: str) -> Self:
        """Return the details of a member that makes `call`."""
        return cls(call.kind, call.what, call.check, call.layout, leaves, unfit)

    @property
    def call(self) -> CollectiveCall:
        """Its call."""
        return CollectiveCall(self.kind, self.what, self.check, self.layout)


class Result(msgspec.Struct, frozen=True):
    """The result of a call, as it travels to a host that has not completed it.

    Attributes:
        kind: the kind of the call.
        layout: the layout of the call; see `CollectiveCall`.
        blobs: the total, in parts, or the blobs of all members.
        error: the text of the error in which the call ended; None if it succeeded.
        differing: the workers of a disagreement; None if the error is that memory is lacking.
        what: names the call; see `CollectiveCall`.
    """

    kind: str
    layout: bytes
    blobs: list[bytes]
    error: str | None = None
    differing: tuple[int, ...] | None = None
    what: str = ""


_DETAILS = msgspec.msgpack.Decoder(list[MemberDetails])
_RESULT = msgspec.msgpack.Decoder(Result)


def encode_details(details: list[MemberDetails]) -> bytes:
    """Encode the details of the members of a host."""
    return msgspec.msgpack.encode(details)


def decode_details(data: bytes) -> list[MemberDetails]:
    """Decode the details of the members of a host.

    Raises:
        FrameError: `data` is not the details of members.
    """
    try:
        details = _DETAILS.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FrameError(str(error)) from None
    return details


def encode_result(result: Result) -> bytes:
    """Encode a result."""
    return msgspec.msgpack.encode(result)


def decode_result(data: bytes) -> Result:
    """Decode a result.

    Raises:
        FrameError: `data` is not a result.
    """
    try:
        return _RESULT.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FrameError(str(error)) from None


def encode_blobs(blobs: list[bytes]) -> list[bytes]:
    """Encode `blobs` as buffers: their lengths, and the blobs that are not empty."""
    return [struct.pack(f"<{len(blobs)}Q", *map(len, blobs)), *filter(None, blobs)]


def decode_blobs(data: bytes, count: int) -> list[bytes]:
    """Decode `count` blobs.

    Raises:
        FrameError: `data` is not that many blobs.
    """
    start = 8 * count
    if len(data) < start:
        raise FrameError(f"{len(data)} bytes for {count} blobs")
    lengths = struct.unpack_from(f"<{count}Q", data)
    if start + sum(lengths) != len(data):
        raise FrameError(f"{count} blobs of {sum(lengths)} bytes in {len(data) - start}")
    blobs = []
    for length in lengths:
        blobs.append(data[start : start + length])
        start += length
    return blobs
