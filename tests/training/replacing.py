"""Schedules functions on workers that are lost and replaced; prints exact results.

    replacing.py POINT FOLDER

Unless this job follows a recorded order, worker 2 ends at a point: `first` before it schedules a function,
`within` a function, `between` a `join` and the next `schedule`, `fit` in a `fit` after functions, and `after`
in functions after a `fit`. In `twice`, the worker that replaces it ends within a function, too, and in
`catching-up` before it has joined. `reads` is like `within`, and the script decides by weights. In `forgets`,
the chief keeps no variables of earlier calls, and in `differs`, the script decides by the worker. The program
schedules functions until the last worker that joins has run some, or is refused; it writes the number of
rounds to FOLDER.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from loop_gradients import gradients_of

import lockstep
from lockstep.errors import DisagreementError
from lockstep.keras.parameter_server import function_log
from lockstep.keras.parameter_server.function_worker import WorkerCalls
from lockstep.keras.parameter_server.worker_process import WorkerProcess
from lockstep.worker import job

ops = keras.ops
BACKEND = keras.backend.backend()
POINT, FOLDER = sys.argv[1], Path(sys.argv[2])
REPLAYS = job.current().settings.order is not None
WORKER = job.current().worker
TASKS = job.current().context.tasks
FIRST_JOINER = TASKS.processes
LAST_JOINER = FIRST_JOINER + (POINT in ("twice", "catching-up"))
generator = np.random.default_rng(0)
X = generator.normal(size=(240, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")

keras.utils.set_random_seed(3)
strategy = lockstep.ParameterServerStrategy(None, lockstep.FixedShardsPartitioner(2))
with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.Adam(0.01)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    seen = keras.Variable(np.int32(0), dtype="int32", trainable=False, aggregation="sum", name="seen")
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
coordinator = lockstep.ClusterCoordinator(strategy)


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ends(*points: str) -> bool:
    """Whether this process is to be lost at one of these points."""
    return POINT in points and WORKER == 2 and not REPLAYS


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `tf.function` on TensorFlow."""
    if BACKEND != "tensorflow":
        return function
    import tensorflow as tf

    graph: Callable[..., Any] = tf.function(function)
    return graph


class Batches:
    """Batches without end, in a random order."""

    def __init__(self) -> None:
        self._order = np.random.permutation(240)

    def __iter__(self) -> Iterator[Any]:
        while True:
            for start in range(0, 240, 20):
                rows = self._order[start : start + 20]
                yield X[rows], Y[rows]


def dataset() -> Any:
    if BACKEND != "tensorflow":
        return Batches()
    import tensorflow as tf

    order = np.random.permutation(240)
    return tf.data.Dataset.from_tensor_slices((X[order], Y[order])).repeat().batch(20)


@traced
def train(batches: Iterator[Any]) -> Any:
    x, y = next(batches)
    loss, gradients = gradients_of(
        model.trainable_variables, lambda: loss_of(y, model(x, training=True)), model.non_trainable_variables
    )
    accuracy.update_state(y, model(x, training=False))
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    seen.assign(seen + 20)
    return loss


def evaluate(x: Any, y: Any) -> Any:
    accuracy.update_state(y, model(x, training=False))
    return ops.sum(model(x, training=False))


@traced
def mean() -> Any:
    """A function that the script calls itself: it reads weights, on TensorFlow in a graph."""
    return ops.mean(model(X, training=False))


def enough(number: int) -> int:
    """Whether the last worker that joins has run functions before this round."""
    rounds, ran = FOLDER / "rounds", FOLDER / f"ran-{LAST_JOINER}"
    if not rounds.exists() and (not ran.exists() or len(ran.read_text()) < 3):
        return 0
    if not rounds.exists():
        rounds.write_text(str(number))
    return int(number >= int(rounds.read_text()))


def losing() -> None:
    """End this process within a function or a step, and note which functions it runs."""
    run, compute = WorkerCalls._run, WorkerProcess._computed
    ran = 0

    def counted(*given: Any) -> Any:
        nonlocal ran
        due = ends("within", "twice", "reads", "differs", "forgets") or (
            ends("after") and (FOLDER / "fitted").exists()
        )
        ran += due or (POINT == "twice" and FIRST_JOINER == WORKER and not REPLAYS)
        if ran == 4:
            end()
        result = run(*given)
        if WORKER >= FIRST_JOINER:
            with (FOLDER / f"ran-{WORKER}").open("a") as file:
                file.write(".")
        return result

    def computed(self: WorkerProcess, step: int, batch: Any) -> Any:
        if ends("fit") and step >= 5:
            end()
        return compute(self, step, batch)

    WorkerCalls._run = counted  # type: ignore[method-assign, assignment]
    WorkerProcess._computed = computed  # type: ignore[method-assign]


def told(act: Callable[[], Any]) -> Any:
    """Return the result of a function; note why a worker that joins is refused, and let the others end."""
    try:
        return act()
    except DisagreementError as error:
        (FOLDER / "refused").write_text(str(error))
        (FOLDER / f"ran-{LAST_JOINER}").write_text("...")
        raise


history: list[Any] = []


def rounds(batches: Any, most: int = 10**6) -> None:
    """Schedule functions until there were enough, or some times."""
    for number in range(most):
        accuracy.reset_state()
        values = [coordinator.schedule(train, (batches,)) for _ in range(6)]
        coordinator.join()
        if number == 1 and ends("between"):
            end()
        if number == 1 and POINT == "catching-up" and WORKER in (2, FIRST_JOINER) and not REPLAYS:
            end()
        history.append([float(told(accuracy.result)), int(seen), float(np.random.rand())])
        if POINT == "reads" and float(ops.stop_gradient(mean())) > 0:
            optimizer.learning_rate = optimizer.learning_rate * 0.9
        if POINT == "differs" and WORKER >= FIRST_JOINER:
            told(coordinator.done)
        history.append([float(value) for value in coordinator.fetch(values)])
        if number % 4 == 1:
            history.append(float(model.evaluate(X[:60], np.ones((60, 2)), verbose=0)))
        if most == 10**6 and coordinator.schedule(enough, (number,)).fetch():
            return


def fit(epochs: int, callbacks: Any = ()) -> None:
    model.fit(X, np.ones((240, 2)), 20, epochs, verbose=0, callbacks=list(callbacks))


class StopsOnceReplaced(keras.callbacks.Callback):  # type: ignore[misc]
    """Stops the training when a worker has replaced the lost one, at the end of an epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        fitted = FOLDER / "epochs"
        if not fitted.exists() and job.current().replacements:
            fitted.write_text(str(epoch))
        if fitted.exists() and epoch >= int(fitted.read_text()):
            self.model.stop_training = True


if ends("first"):
    end()
if POINT == "forgets":
    function_log.MOST_BYTES = 0
losing()
batches = iter(coordinator.create_per_worker_dataset(dataset))
if POINT in ("fit", "after"):
    rounds(batches, 2)
    fit(10**6 if POINT == "fit" else 2, [StopsOnceReplaced()] if POINT == "fit" else ())
    if job.current().is_chief:
        (FOLDER / "fitted").touch()
rounds(batches)
# All processes run this one, and evaluate, together.
history.append([float(coordinator.schedule(evaluate, (X[:60], Y[:60])).fetch()), float(accuracy.result())])
history.append(float(model.evaluate(X, np.ones((240, 2)), verbose=0)))
fit(1)
rounds(batches, 1)
norms = [float(np.linalg.norm(ops.convert_to_numpy(one.value))) for one in optimizer.variables]
print("result", json.dumps([history, norms]), flush=True)
print("digest", lockstep.digest(model), flush=True)
