"""The contract of transports that move a state from one worker to another."""

from typing import Protocol

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.protocol.channel import Attachment


class StateTransport(Protocol):
    """Publishes and fetches states. The result of `publish` travels in messages, through agents."""

    def prepare(self, contents: Contents) -> None:
        """Prepare, in the background, to publish contents of these sizes; replaces an earlier preparation."""

    def publish(self, contents: Contents, *, prepared: bool = True) -> Attachment:
        """Return an attachment from which `fetch` reads `contents`, any number of times.

        Args:
            contents: the contents to publish; they may change afterwards.
            prepared: whether to use the preparation, which serves only one call.

        Raises:
            CheckpointError: there is too little memory, or checkpoints do not support the name or dtype of an
                array.
        """

    def fetch(self, published: Attachment) -> Contents:
        """Return a published state, as read-only arrays.

        Raises:
            CheckpointError: the state cannot be read.
        """

    def forget(self) -> None:
        """Discard the preparation."""
