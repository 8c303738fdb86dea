"""A process that skips its first calls also restores state that only those calls create."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.checkpoint.checkpoint_files import load
from lockstep.checkpoint.scheduler import Every, open_scheduler
from lockstep.checkpoint.store import Store
from lockstep.keras.backends.jax import JaxBackend
from lockstep.keras.fit.model_methods import ModelMethods
from lockstep.keras.input.fit_inputs import GlobalInput, global_input
from lockstep.keras.input.readings import ReadingWorker
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.keras.state.snapshots import Snapshots
from lockstep.keras.variables import model_state
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker import job
from lockstep.worker.checkpoints import WorkerCheckpoints
from lockstep.worker.job import Job, JobContext


def process() -> tuple[Snapshots, list[Any]]:
    """A process at the beginning of its script: two built models with unbuilt optimizers."""
    keras.utils.clear_session()
    view = place(3, (0,))
    own = Job(
        JobContext(0, Bus(SystemClock(), 0), JobSettings(seed=7, threads=1)), (view, job.by_itself(view))
    )
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


def read(batches: Iterator[Any]) -> list[list[float]]:
    """The first part of each batch."""
    whole = [batch.read(slice(0, batch.examples)) for batch in batches]
    return [np.asarray(keras.tree.flatten(rows)[0]).reshape(-1).tolist() for rows in whole]


def test_the_rest_of_a_pass_has_its_order() -> None:
    """Skipped steps do not repeat the random numbers that callbacks drew in them."""

    def begun(snapshots: Snapshots) -> GlobalInput:
        keras.utils.set_random_seed(3)
        rows = np.arange(20, dtype="float32")
        options: dict[str, Any] = {"batch_size": 5, "steps": None, "shuffle": True, "seed": None}
        data = global_input(rows, **options, unsplit=False, reader=ReadingWorker(job.current(), 0))
        data.before_pass = snapshots.resumable.begin_pass
        return data

    snapshots, (model, _) = process()
    model.history = keras.callbacks.History()
    with snapshots.resumable.call("fit") as call:
        data = begun(snapshots)
        read(data.batches())
        np.random.random()
        second = data.batches()
        wanted = read(islice(second, 2))
        call.steps = 6
        kept = snapshots.take(True, model, None, JaxBackend().training_state(model))
        wanted += read(second)

    later, _ = process()
    later.resumable.begin(kept)
    with later.resumable.call("fit") as call:
        later.resumable.resume()
        assert call.skipped == 6
        data = begun(later)
        read(data.batches())
        later.resumable.skip(4)
        second = data.batches()
        found = read(islice(second, 2))
        later.resumable.skip(2)
        later.resumable.arrive()
        assert found + read(second) == wanted


def plain(method: str) -> Any:
    """A method of Keras that takes no steps; one with a loop returns the batches of a pass over its data."""
    original = inspect.unwrap(getattr(keras.Model, method))

    @functools.wraps(original)
    def replacement(model: Any, x: Any, *_: Any, **__: Any) -> Any:
        return read(x.batches()) if isinstance(x, GlobalInput) else 0.0

    return original if method == "compile" else replacement


# With one replica, Keras itself builds models, and asks for a batch when their metrics are not built.
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_process_that_resumes_reads_no_other_batch_for_a_model_that_skipped_calls_have_built(
    replicas: int, tmp_path: Path
) -> None:
    """Reading a batch to build a model with draws random numbers, which decide the order of the examples."""
    x = np.arange(20, dtype="float32")[:, None]

    def run(checkpoints: WorkerCheckpoints) -> Any:
        """Run a script; return the order of the examples in its last call."""
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        view = place(replicas, (0,))
        events = Bus(SystemClock(), 0)
        own = Job(
            JobContext(0, events, JobSettings(seed=7, threads=1)),
            (view, job.by_itself(view)),
            checkpoints=checkpoints,
        )
        methods = ModelMethods(own, JaxBackend())
        build = inspect.unwrap(keras.Model._symbolic_build)

        def call(method: str, model: Any, x: Any, *arguments: Any, **options: Any) -> Any:
            original = plain(method)

            @functools.wraps(original)
            def building(model: Any, x: Any, y: Any = None, *rest: Any, **others: Any) -> Any:
                if replicas == 1 and isinstance(x, GlobalInput):
                    methods.symbolic_build(build, model, SimpleNamespace(data_adapter=x))
                elif replicas == 1:
                    methods.symbolic_build(build, model, data_batch=(x, y))
                return original(model, x, y, *rest, **others)

            return methods.call(method, building, model, x, *arguments, **options)

        models = []
        with methods.scope(nullcontext):
            for _ in range(2):
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
                methods.compile(plain("compile"), model, "sgd", "mse", metrics=["mae"])
                models.append(model)
        other, model = models
        call("evaluate", other, x, x, verbose=0)
        call("train_on_batch", model, x[:6], x[:6])
        assert not methods.behind
        return call("fit", other, x, x, batch_size=6, verbose=0)

    saved = open_scheduler(Store(tmp_path), Every(steps=1), lambda _: None)
    wanted = run(WorkerCheckpoints(saved))
    saved.finish()
    ((_, path),) = Store(tmp_path).steps().items()
    found = run(WorkerCheckpoints(resumed=load(path)))
    assert found == wanted
