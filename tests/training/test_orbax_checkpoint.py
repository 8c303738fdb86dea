"""`OrbaxCheckpoint` decides on every worker and writes on one; without Orbax, which the tests do not need."""

from pathlib import Path
from typing import Any

import keras
import pytest

from lockstep.collectives.plan import ReducePlan
from lockstep.keras.fit.callbacks import HostOrbaxCheckpoint, paths_of, writes, writing_once
from lockstep.keras.private.common import ORBAX_CHECKPOINT
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker import job
from thread_hub import Hub

pytestmark = pytest.mark.skipif(
    not hasattr(keras.callbacks, "OrbaxCheckpoint"), reason="this version of Keras has no OrbaxCheckpoint"
)


def made(folder: Path) -> Any:
    """What a script passes: Keras's own callback, whose `__init__` needs Orbax."""
    callback = ORBAX_CHECKPOINT.__new__(ORBAX_CHECKPOINT)
    vars(callback).update(
        directory=str(folder),
        save_freq=2,
        save_best_only=False,
        _batches_seen_since_last_saving=0,
        _last_batch_seen=None,
        _total_batches_seen=0,
    )
    return callback


@pytest.mark.parametrize("worker", [0, 1])
def test_one_worker_writes_and_all_count(
    worker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(
        ORBAX_CHECKPOINT, "_save_checkpoint", lambda self, step, logs=None: written.append(step)
    )
    view = place(2, (0, 1))
    own = job.Job(
        job.JobContext(worker, Bus(SystemClock(), 0), JobSettings(workers=2, threads=1)),
        (view, Hub(ReducePlan.of(view)).member(worker)),
    )
    monkeypatch.setattr(job, "_current", [own])
    given = made(tmp_path)
    (callback,) = writing_once([given], 0, resumes=False)
    assert isinstance(callback, HostOrbaxCheckpoint)
    for batch in range(5):
        callback.on_train_batch_end(batch)
    assert written == ([2, 4] if worker == 0 else [])
    assert given._total_batches_seen == 5
    assert writes([given])
    assert paths_of([given]) == {"0 OrbaxCheckpoint": str(tmp_path)}
    if worker == 1:
        # The chief had completed the first one before it was lost.
        (tmp_path / "2").mkdir()
        own._entered = place(2, (1,)), own.communicator
        due = [act for applies, act in own._undone if applies()]
        for act in due:
            act()
        assert written == [4]
