"""How two parts of a job send each other messages: the contract of a channel.

A channel connects a worker and its agent, an agent and the coordinator, or the command and the coordinator.
Its messages are typed, arrive whole and in order, and may hold attachments.
"""

import os
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

_MISSING = -1

Out = TypeVar("Out", contravariant=True)
In = TypeVar("In", covariant=True)


class Attachment:
    """Memory that a message hands to another process of this machine: a descriptor.

    The descriptor is closed once nothing refers to the attachment, unless somebody has taken it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def copy_of(cls, descriptor: int) -> Self:
        """Return an attachment for a descriptor that the caller keeps.

        Raises:
            OSError: this process has too many descriptors.
        """
        return cls(os.dup(descriptor))

    @classmethod
    def missing(cls) -> Self:
        """Return what arrives in the place of an attachment for which the receiver had no descriptor left."""
        return cls(_MISSING)

    @property
    def is_missing(self) -> bool:
        """Whether there is no descriptor: it did not arrive, or was taken."""
        return self._descriptor == _MISSING

    @property
    def descriptor(self) -> int:
        """The descriptor, which the attachment keeps."""
        return self._descriptor

    def take(self) -> int:
        """Return the descriptor, which the caller closes."""
        descriptor, self._descriptor = self._descriptor, _MISSING
        return descriptor

    def __del__(self) -> None:
        if self._descriptor != _MISSING:
            os.close(self._descriptor)


@dataclass(frozen=True)
class PeerGone:
    """The other end is closed, or its process has ended: nothing more will arrive."""


@dataclass(frozen=True)
class Unreadable:
    """Something arrived that is not a message for this end, for the reason in `error`."""

    error: str


class Channel(Protocol[Out, In]):
    """One end of a channel."""

    def send(self, message: Out, patience: float = 0.0) -> bool:
        """Send a message; from any thread.

        Args:
            message: what to send; the sender keeps its attachments.
            patience: seconds to wait for a peer that is behind.

        Returns:
            Whether the message is on its way: not if the peer is gone or behind, or the message is too large.
        """

    def receive(self) -> In | Unreadable | PeerGone | None:
        """Return what has arrived next, None for nothing; never waits.

        `PeerGone` comes after everything that the peer has sent, and then every time.
        """

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` returns something."""

    def close(self) -> None:
        """Close this end; more than once does nothing."""
