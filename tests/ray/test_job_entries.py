"""What the processes of a job note in the cluster's control store (GCS), here one in memory."""

import pytest
from ray.experimental import internal_kv

from lockstep.ray.control_store import ControlStore


class StoreInMemory:
    """The part of Ray's client of the control store that keeps values."""

    def __init__(self) -> None:
        self._values: dict[tuple[bytes, bytes], bytes] = {}

    def internal_kv_get(self, key: bytes, namespace: bytes) -> bytes | None:
        return self._values.get((namespace, key))

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> int:
        """Return how many keys are new."""
        added = (namespace, key) not in self._values
        if added or overwrite:
            self._values[namespace, key] = value
        return int(added)


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internal_kv, "global_gcs_client", StoreInMemory())


def test_the_first_end_of_a_job_counts() -> None:
    """A coordinator that was taken for lost may note another end later."""
    first, second = ControlStore("job", "first"), ControlStore("job", "second")
    assert first.status() is None
    second.record_end(0)
    first.record_end(1)
    assert (first.status(), second.status()) == (0, 0)
    assert ControlStore("another", "first").status() is None


def test_the_newest_process_of_a_job_takes_it_over() -> None:
    first, second = ControlStore("job", "first"), ControlStore("job", "second")
    assert not first.take()
    assert first.is_newest()
    assert second.take()
    assert (first.is_newest(), second.is_newest()) == (False, True)
