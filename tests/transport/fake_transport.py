"""A transport of states without descriptors, for tests."""

from collections.abc import Mapping

import numpy as np

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.protocol.channel import Attachment


class FakeTransport:
    """Keeps states in a dictionary; a `StateTransport`."""

    def __init__(self) -> None:
        self._published: dict[int, Contents] = {}

    def prepare(self, contents: Contents) -> None:
        pass

    def publish(self, contents: Contents, *, prepared: bool = True) -> Attachment:
        attachment = Attachment.missing()
        self._published[id(attachment)] = Contents(
            contents.step, dict(contents.manifest), read_only_copies(contents.arrays)
        )
        return attachment

    def fetch(self, published: Attachment) -> Contents:
        return self._published[id(published)]

    def forget(self) -> None:
        pass


def read_only_copies(arrays: Mapping[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:  # type: ignore[type-arg]
    copies = {name: array.copy() for name, array in arrays.items()}
    for copy in copies.values():
        copy.setflags(write=False)
    return copies
