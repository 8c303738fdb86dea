"""How the state of a training travels from one worker to another: the contract."""

from typing import Protocol

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.protocol.channel import Attachment


class StateTransport(Protocol):
    """Publishes and fetches states. What is published travels in messages, through agents."""

    def prepare(self, contents: Contents) -> None:
        """Prepare in the background to publish contents like these; replaces what was prepared before."""

    def publish(self, contents: Contents, *, prepared: bool = True) -> Attachment:
        """Return what `fetch` needs to read `contents`, as often as wanted.

        Args:
            contents: to publish; they may change afterwards.
            prepared: whether to use what was prepared; each preparation serves once.

        Raises:
            CheckpointError: there is too little memory, or an array has a name or dtype that the format of
                checkpoints does not know.
        """

    def fetch(self, published: Attachment) -> Contents:
        """Return what was published, as read-only arrays.

        Raises:
            CheckpointError: it cannot be read.
        """

    def forget(self) -> None:
        """Release what was prepared."""
