"""The contract of transports that move the state of a training from one worker to another."""

from typing import Protocol

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.protocol.channel import Attachment


class StateTransport(Protocol):
    """Publishes and fetches states. What `publish` returns travels in messages, through agents."""

    def prepare(self, contents: Contents) -> None:
        """Prepare, in the background, to publish contents of these sizes; replaces an earlier preparation."""

    def publish(self, contents: Contents, *, prepared: bool = True) -> Attachment:
        """Return what `fetch` needs to read `contents`, any number of times.

        Args:
            contents: to publish; they may change afterwards.
            prepared: whether to use the preparation; each serves for one call.

        Raises:
            CheckpointError: there is too little memory, or checkpoints do not support the name or dtype of an
                array.
        """

    def fetch(self, published: Attachment) -> Contents:
        """Return what was published, as read-only arrays.

        Raises:
            CheckpointError: it cannot be read.
        """

    def forget(self) -> None:
        """Discard the preparation."""
