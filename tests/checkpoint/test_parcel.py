"""A parcel: what one process packs, another finds, in whatever memory."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from lockstep.checkpoint.folder import Contents
from lockstep.checkpoint.state_transfer import StateMemory, memory_for, pack_state, unpack_state
from lockstep.errors import CheckpointError

ARRAYS = {
    "a": np.arange(1000, dtype="float32").reshape(10, 100).T,
    "empty": np.empty((0, 3), "int8"),
    "scalar": np.array(2.5),
    "half": np.ones(7, ml_dtypes.bfloat16),
    "last": np.array([], "float64"),
}
CONTENTS = Contents(7, {"figure": float("nan"), "nested": {"a": [1, "é", None]}}, ARRAYS)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("how", ["at once", "ready", "too small"])
def test_contents_come_as_they_were(how: str) -> None:
    before = descriptors()
    ready = None
    if how != "at once":
        ready = memory_for(CONTENTS) if how == "ready" else StateMemory(100)
        ready.make_ready()
    found = unpack_state(pack_state(CONTENTS, ready))
    assert found.step == 7
    assert repr(found.manifest) == repr(CONTENTS.manifest)
    assert found.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        other = found.arrays[name]
        assert (other.dtype, other.shape, other.tobytes()) == (array.dtype, array.shape, array.tobytes())
    # What is mapped has a descriptor of its own.
    del found, other, ready
    assert descriptors() == before


def test_memory_that_is_not_used_is_given_back() -> None:
    before = descriptors()
    for _ in range(5):
        memory = memory_for(CONTENTS)
        memory.make_ready()
        memory.close()
        memory.close()
        assert memory._thread is not None
        memory._thread.join()
    del memory
    assert descriptors() == before


def test_too_little_memory_is_an_error() -> None:
    before = descriptors()
    with pytest.raises(CheckpointError, match="does not fit into memory: it needs"):
        pack_state(CONTENTS, StateMemory(2**62))
    assert descriptors() == before


def test_what_no_checkpoint_can_hold_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="complex"):
        pack_state(Contents(1, {}, {"a": np.zeros(3, "complex64")}))


def test_a_parcel_cannot_shrink_under_its_reader() -> None:
    descriptor = pack_state(CONTENTS)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
