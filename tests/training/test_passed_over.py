"""A process that skips its first calls also restores state that only those calls create."""

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.keras.state.snapshots import Snapshots
from lockstep.keras.variables import model_state
from lockstep.observability.bus import Bus
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker import job
from lockstep.worker.job import Job, JobContext


def process() -> tuple[Snapshots, list[Any]]:
    """A process at the beginning of its script: two built models with unbuilt optimizers."""
    keras.utils.clear_session()
    view = place(3, (0,))
    own = Job(JobContext(0, 7, 1, Bus(SystemClock(), 0)), (view, job.by_itself(view)))
    backend: Any = SimpleNamespace(to_numpy=keras.ops.convert_to_numpy)
    snapshots = Snapshots(own, backend, NumberedCalls())
    models = []
    for optimizer in ("adam", "sgd"):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        snapshots.adopt(model)
        models.append(model)
    return snapshots, models


def test_optimizers_that_skipped_calls_built_are_restored() -> None:
    snapshots, (first, second) = process()
    for model in (first, second):
        model.optimizer.build(model.trainable_variables)
    for variable in first.optimizer.variables:
        variable.assign(np.full(variable.shape, 3))
    kept = snapshots.take(True, second, None)
    wanted = {name: keras.ops.convert_to_numpy(value) for name, value in model_state(first).items()}
    later, (again, other) = process()
    other.optimizer.build(other.trainable_variables)
    later.resumable.begin(kept)
    later.restore(other)
    found = {name: keras.ops.convert_to_numpy(value) for name, value in model_state(again).items()}
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)
