"""The transport of states between workers of one host that divide updates. It does not send shared arrays."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.values import named
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import CheckpointError
from lockstep.protocol.channel import Attachment
from lockstep.transport.state_transport import StateTransport

_SHARED = "shared"
"""The entry of the manifest with [name, dtype, shape, offset] of each array in the shared memory."""


class SharedStates:
    """Publishes states without their arrays in shared memory; a `StateTransport`.

    The workers update these only in steps of a view, and a state is fetched for such a view: until the worker
    that fetches it takes part in an update, they do not change. It must copy or share them before that.

    Args:
        states: the transport of the rest.
        pool: the shared memory; `fetch` maps the allocated part.
    """

    def __init__(self, states: StateTransport, pool: SharedPool) -> None:
        self._states = states
        self._pool = pool

    def prepare(self, contents: Contents) -> None:
        """Prepare to publish the rest; see `StateTransport`."""
        self._states.prepare(self._rest(contents))

    def publish(self, contents: Contents, *, prepared: bool = True) -> Attachment:
        """Publish the rest, and the places of the other arrays; see `StateTransport`."""
        return self._states.publish(self._rest(contents), prepared=prepared)

    def fetch(self, published: Attachment) -> Contents:
        """Return a published state; see `StateTransport`."""
        contents = self._states.fetch(published)
        manifest = dict(contents.manifest)
        try:
            shared = {name: self._array(*place) for name, *place in manifest.pop(_SHARED)}
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(f"cannot read the state that the workers share: {error!r}") from None
        return replace(contents, manifest=manifest, arrays={**contents.arrays, **shared})

    def forget(self) -> None:
        """Discard the preparation; see `StateTransport`."""
        self._states.forget()

    def _rest(self, contents: Contents) -> Contents:
        offsets = {name: self._pool.offset_of(array) for name, array in contents.arrays.items()}
        rest = {name: array for name, array in contents.arrays.items() if offsets[name] is None}
        places = [
            (name, array.dtype.name, array.shape, offsets[name])
            for name, array in contents.arrays.items()
            if name not in rest
        ]
        return replace(contents, manifest={**contents.manifest, _SHARED: places}, arrays=rest)

    def _array(self, kind: str, shape: list[int], offset: int) -> npt.NDArray[Any]:
        """Return an array in the shared memory, read-only."""
        dtype = named(kind)
        if dtype is None or min(shape, default=0) < 0:
            raise ValueError(f"an array of the dtype {kind} and the shape {shape}")
        count = int(np.prod(shape, dtype=object))
        memory = self._pool.map(self._pool.size).toreadonly()
        return np.frombuffer(memory, dtype, count, offset).reshape(shape)
