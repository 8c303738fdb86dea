"""Workers make their tuners one after the other, and search together."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep.collectives.contract import Communicator
from lockstep.collectives.plan import ReducePlan
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.system.locks import try_lock
from lockstep.system.paths import RunPaths
from lockstep.topology import place
from lockstep.worker import job, tuner_searches
from lockstep.worker.patch_registry import PATCHES
from thread_hub import Hub

MADE: list[str] = []


class Base:
    """Stands for the library's tuner, which reads a folder when it is made."""

    def __init__(self, lock: Path | None, inner: bool = True) -> None:
        if lock is not None:
            assert try_lock(lock) is None
        MADE.append("made")
        if inner:
            type(self)(None, inner=False)

    def search(self, trials: int) -> int:
        MADE.append("searched")
        return trials


class Tuner(Base):
    pass


@pytest.mark.ci
def test_a_tuner_is_made_by_one_worker_at_a_time_and_searches_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = place(1, (0,))
    communicator: Communicator = Hub(ReducePlan.of(view)).member(0)
    monkeypatch.setattr(communicator, "barrier", lambda *, what: MADE.append(what), raising=False)
    own = job.Job(
        job.JobContext(0, Bus(SystemClock(), 0), JobSettings(threads=1), folder=tmp_path),
        (view, communicator),
    )
    monkeypatch.setattr(job, "_current", [own])
    library: Any = ModuleType("library")
    library.Tuner = Tuner
    tuner_searches._patch(library)
    MADE.clear()
    try:
        tuner = Tuner(RunPaths(tmp_path).saved / "keras_tuner.lock")
        assert tuner.search(trials=3) == 3
    finally:
        PATCHES.give_back(tuner_searches.__name__)
    free = try_lock(RunPaths(tmp_path).saved / "keras_tuner.lock")
    assert free is not None
    assert MADE == ["made", "made", "the beginning of a search", "searched", "the end of a search"]
    assert "search" not in vars(Tuner)
