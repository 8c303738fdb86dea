"""The contract `StateTransport`, tested for every implementation, and further tests of `MemoryTransport`."""

import errno
import os
from collections.abc import Iterator
from contextlib import closing

import ml_dtypes
import numpy as np
import pytest
from fake_transport import FakeTransport

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import CheckpointError
from lockstep.transport.state_memory import MemoryTransport, StateMemory, memory_for
from lockstep.transport.state_transport import StateTransport
from lockstep.worker.shared_states import SharedStates

ARRAYS = {
    "a": np.arange(1000, dtype="float32").reshape(10, 100).T,
    "empty": np.empty((0, 3), "int8"),
    "scalar": np.array(2.5),
    "half": np.ones(7, ml_dtypes.bfloat16),
    "last": np.array([], "float64"),
}
CONTENTS = Contents(7, {"figure": float("nan"), "nested": {"a": [1, "é", None]}}, ARRAYS)


@pytest.fixture(params=["memory", "fake", "shared"])
def transport(request: pytest.FixtureRequest) -> Iterator[StateTransport]:
    with closing(SharedPool.create()) as pool:
        yield {
            "memory": MemoryTransport,
            "fake": FakeTransport,
            "shared": lambda: SharedStates(MemoryTransport(), pool),
        }[request.param]()


def assert_equal(found: Contents, contents: Contents) -> None:
    assert found.step == contents.step
    assert repr(found.manifest) == repr(contents.manifest)
    assert found.arrays.keys() == contents.arrays.keys()
    for name, array in contents.arrays.items():
        other = found.arrays[name]
        assert (other.dtype, other.shape, other.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert not other.flags.writeable or not other.size


@pytest.mark.usefixtures("closes_descriptors")
@pytest.mark.parametrize("prepared", ["nothing", "equal contents", "smaller contents"])
def test_fetched_contents_equal_the_published_ones(transport: StateTransport, prepared: str) -> None:
    if prepared != "nothing":
        transport.prepare(CONTENTS if prepared == "equal contents" else Contents(0, {}, {}))
    published = transport.publish(CONTENTS)
    for _ in range(2):
        assert_equal(transport.fetch(published), CONTENTS)
    # The mappings do not hold descriptors.
    del published
    transport.forget()


def test_a_later_publication_does_not_change_an_earlier_one(transport: StateTransport) -> None:
    array = np.zeros(5)
    transport.prepare(Contents(1, {}, {"a": array}))
    first = transport.publish(Contents(1, {}, {"a": array}))
    array += 1
    second = transport.publish(Contents(2, {}, {"a": array}))
    assert_equal(transport.fetch(first), Contents(1, {}, {"a": np.zeros(5)}))
    assert_equal(transport.fetch(second), Contents(2, {}, {"a": np.ones(5)}))


def test_an_unused_preparation_is_kept() -> None:
    transport = MemoryTransport()
    transport.prepare(CONTENTS)
    kept = transport._prepared
    transport.publish(Contents(1, {}, {}), prepared=False)
    assert transport._prepared is kept
    transport.forget()


@pytest.mark.usefixtures("closes_descriptors")
def test_unused_memory_is_freed() -> None:
    for _ in range(5):
        memory = memory_for(CONTENTS)
        memory.make_ready()
        memory.close()
        memory.close()
        assert memory._thread is not None
        memory._thread.join()
    del memory


@pytest.mark.usefixtures("closes_descriptors")
def test_too_little_memory_raises() -> None:
    with pytest.raises(CheckpointError, match="does not fit into memory: it needs"):
        StateMemory(2**62).fill(CONTENTS)


@pytest.mark.parametrize("prepared", [True, False])
def test_too_many_descriptors_raise(monkeypatch: pytest.MonkeyPatch, prepared: bool) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    transport = MemoryTransport()
    if prepared:
        transport.prepare(CONTENTS)
    with pytest.raises(CheckpointError, match="Too many open files"):
        transport.publish(CONTENTS)


def test_unsupported_arrays_raise() -> None:
    with pytest.raises(CheckpointError, match="complex"):
        MemoryTransport().publish(Contents(1, {}, {"a": np.zeros(3, "complex64")}))


def test_published_memory_cannot_shrink() -> None:
    published = MemoryTransport().publish(CONTENTS)
    with pytest.raises(PermissionError):
        os.ftruncate(published.descriptor, 0)


@pytest.mark.ci
def test_what_workers_share_is_not_sent() -> None:
    """The array that is found in the shared memory is that memory; all others are sent."""
    pool = SharedPool.create()
    pool.grow(1 << 20)
    memory = np.frombuffer(pool.map(1 << 20), "float32")
    memory[:] = np.arange(len(memory))
    shared = memory[4096:4196].reshape(10, 10)
    arrays = {"shared": shared, "across": shared.T, "sent": np.ones(3), "empty": memory[:0], "all": memory}
    contents = Contents(3, {"a": 1}, arrays)
    published = SharedStates(MemoryTransport(), pool).publish(contents)
    assert MemoryTransport().fetch(published).arrays.keys() == {"across", "sent", "empty"}
    other = SharedPool.attach(os.dup(pool.fd))
    found = SharedStates(MemoryTransport(), other).fetch(published)
    assert_equal(found, contents)
    memory += 1
    assert found.arrays["shared"].tobytes() == shared.tobytes()
    assert found.arrays["across"].tobytes() != shared.T.tobytes()
    for each in (pool, other):
        each.close()


@pytest.mark.parametrize(
    "place",
    [
        ("a", "float32", [1 << 20], 0),
        ("a", "float32", [1], -4),
        ("a", "float32", [1], 1 << 20),
        ("a", "float32", [-1], 0),
        ("a", "float128", [1], 0),
        ("a", "float32", ["1"], 0),
        ("a", "float32", [1]),
        5,
    ],
)
def test_invalid_places_in_shared_memory_are_refused(place: object) -> None:
    pool = SharedPool.create()
    pool.grow(1 << 20)
    published = MemoryTransport().publish(Contents(1, {"shared": [place]}, {}))
    with pytest.raises(CheckpointError, match="cannot read the state that the workers share"):
        SharedStates(MemoryTransport(), pool).fetch(published)
    pool.close()
