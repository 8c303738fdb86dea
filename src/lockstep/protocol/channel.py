"""The contract of a channel, which connects two parts of a job.

A channel connects a worker and its agent, an agent and the coordinator, or the command and the coordinator.
Its messages are typed, and arrive complete and in order. Sending never raises, and never waits longer than
the sender allows. A receiver gets `PeerGone` after the last message of a peer that has ended. A message can
contain an `Attachment`: memory of which the receiver gets a descriptor of its own.

Between agent and worker, the channel is a SOCK_SEQPACKET socket with JSON in its packets. Between coordinator
and agent of one process, it is a queue. Between hosts, it is a stream. A worker starts with a socket and no
other descriptor: the first message that it receives, `Welcome`, contains the pool, and `EnterView` contains
an `Endpoint`, which says how to reach the exchange of the view. One test suite holds for all implementations
(`tests/transport`).
"""

import os
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import msgspec

_MISSING = -1

Out = TypeVar("Out", contravariant=True)
In = TypeVar("In", covariant=True)
Message = TypeVar("Message")


class Attachment:
    """Memory that a message passes to another process on this host: a descriptor.

    The attachment closes the descriptor when nothing refers to it any longer, unless `take` was called.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def copy_of(cls, descriptor: int) -> Self:
        """Return an attachment with a copy of a descriptor, which the caller keeps.

        Raises:
            OSError: this process has too many descriptors.
        """
        return cls(os.dup(descriptor))

    @classmethod
    def holding(cls, data: bytes) -> Self:
        """Return an attachment with memory that holds `data`.

        Raises:
            OSError: this process has too many descriptors, or there is too little memory.
        """
        made = cls(os.memfd_create("lockstep-data", os.MFD_CLOEXEC))
        with open(made.descriptor, "wb", closefd=False) as memory:
            memory.write(data)
        return made

    def content(self) -> bytes:
        """Return the content of the memory of the attachment."""
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)

    @classmethod
    def missing(cls) -> Self:
        """Return an attachment without a descriptor: the receiver had too many open files."""
        return cls(_MISSING)

    @property
    def is_missing(self) -> bool:
        """Whether there is no descriptor, because it did not arrive or was taken."""
        return self._descriptor == _MISSING

    @property
    def descriptor(self) -> int:
        """The descriptor, which still belongs to the attachment."""
        return self._descriptor

    def take(self) -> int:
        """Return the descriptor, which now belongs to the caller."""
        descriptor, self._descriptor = self._descriptor, _MISSING
        return descriptor

    def __del__(self) -> None:
        if self._descriptor != _MISSING:
            os.close(self._descriptor)


def decoded(decoder: "msgspec.json.Decoder[Message]", packet: bytes) -> Message:
    """Return the message in a packet.

    Raises:
        ValueError: the packet is not an encoded message of the decoder's type.
    """
    try:
        return decoder.decode(packet)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def too_long(length: int, limit: int) -> str:
    """Return the error about a message of more bytes than the limit."""
    return f"a message of {length} bytes is more than {limit}"


@dataclass(frozen=True)
class PeerGone:
    """The other end is closed, or its process has ended; nothing more arrives."""


@dataclass(frozen=True)
class Unreadable:
    """Data arrived that is not a message for this end; `error` says why."""

    error: str


class Channel(Protocol[Out, In]):
    """One end of a channel."""

    def send(self, message: Out, patience: float = 0.0) -> bool:
        """Send a message; may be called from any thread.

        Args:
            message: the message; the sender keeps its attachments.
            patience: seconds to wait while the peer's queue is full.

        Returns:
            Whether the message was sent; it is not if the peer is gone, its queue is full, or the message is
            too large.
        """

    def receive(self) -> In | Unreadable | PeerGone | None:
        """Return the next message, or None if none has arrived. This never blocks.

        It returns `PeerGone` after the last message of the peer, and from then on in each call.
        """

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` does not return None."""

    def close(self) -> None:
        """Close this end; does nothing if it is closed."""
