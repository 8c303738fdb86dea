"""Schedules functions on the workers of a job with parameter servers; prints exact results.

    scheduling.py serial | free [SERVER CALL KIND NUMBER WHEN] | errors | alone |
        stopped SERVER LIMIT [TASK] | REFUSED

`serial` runs one function at a time; in one process, the functions run where they are scheduled. `free` has
no bound; unless it follows a recorded order, a worker ends between its pushes to two servers, and a server at
the given point (see `losing.py`). `errors` has functions that raise, and in `alone` the chief makes a call
that the others do not make. In `stopped`, a server stops (see `losing.py`). REFUSED is the name of a function
that parameter servers do not support.
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
from loop_gradients import gradients_of
from losing import lose_between_pushes, lose_servers, stop_server

import lockstep
from lockstep.keras.parameter_server.dispatcher import Dispatcher
from lockstep.keras.parameter_server.function_chief import ChiefCalls
from lockstep.worker import job

layers, ops = keras.layers, keras.ops
BACKEND = keras.backend.backend()
KIND = sys.argv[1]
generator = np.random.default_rng(0)
X = generator.normal(size=(240, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")

keras.utils.set_random_seed(3)
strategy = lockstep.ParameterServerStrategy(
    None, lockstep.FixedShardsPartitioner(2), 0 if KIND == "serial" else None
)
with strategy.scope():
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            *([layers.Dropout(0.2)] if KIND == "free" else []),
            layers.Dense(2),
        ]
    )
    critic = keras.Sequential([layers.Input((6,)), layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    slow = keras.optimizers.SGD(0.05, momentum=0.9)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    seen = keras.Variable(np.int64(0), dtype="int64", trainable=False, aggregation="sum", name="seen")
    average = keras.Variable(np.float32(0), dtype="float32", trainable=False, name="average")
    weight = keras.Variable(np.float32(1), dtype="float32", name="weight")
    total = keras.Variable(np.int32(0), dtype="int32", trainable=False, name="total")
outside = keras.Variable(np.float32(0), trainable=False, name="outside")
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
coordinator = lockstep.ClusterCoordinator(strategy)


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `tf.function` on TensorFlow."""
    if BACKEND != "tensorflow":
        return function
    import tensorflow as tf

    return tf.function(function)


def dataset(context: Any) -> Any:
    order = np.random.permutation(240) if KIND == "free" else np.arange(240)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((X[order], Y[order])).repeat().batch(20)
    return Batches(order)


class Batches:
    """Batches without end."""

    def __init__(self, order: Any) -> None:
        self._order = order

    def __iter__(self) -> Iterator[Any]:
        while True:
            for start in range(0, 240, 20):
                rows = self._order[start : start + 20]
                yield X[rows], Y[rows]


@traced
def train(batches: Iterator[Any]) -> Any:
    x, y = next(batches)

    def replica(x: Any, y: Any) -> Any:
        loss, gradients = gradients_of(
            model.trainable_variables,
            lambda: loss_of(y, model(x, training=True)),
            model.non_trainable_variables,
        )
        accuracy.update_state(y, model(x, training=False))
        step = optimizer.iterations + 0
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        seen.assign(seen + 20)
        average.assign(average * 0.5 + ops.cast(loss, "float32") * 0.5)
        return {"loss": loss, "rows": ops.shape(x)[0], "step": step}

    found = strategy.run(replica, args=(x, y))
    return found | {"loss": strategy.reduce("SUM", found["loss"], axis=None)}


def train_critic(batches: Iterator[Any], scale: float = 1.0) -> Any:
    x, _ = next(batches)
    loss, gradients = gradients_of(critic.trainable_variables, lambda: ops.mean((critic(x) - scale) ** 2), [])
    slow.apply(gradients, critic.trainable_variables)
    return loss


@traced
def train_often(batches: Iterator[Any]) -> Any:
    """Make several updates, and use the new weights after each."""
    variables = critic.trainable_variables
    for _ in several(3):
        x, _ = next(batches)
        _, gradients = gradients_of(variables, lambda: ops.mean((critic(x) - 1.0) ** 2), [])  # noqa: B023
        slow.apply(gradients, variables)
        average.assign(ops.mean(critic(x)))
    return ops.mean(critic(X))


def several(count: int) -> Any:
    """Return what a loop in a graph goes over, or a range."""
    if BACKEND != "tensorflow":
        return range(count)
    import tensorflow as tf

    return tf.range(count)


def evaluate(x: Any, y: Any) -> Any:
    accuracy.update_state(y, model(x, training=False))
    return None


def show(name: str, *values: Any) -> None:
    variables = [*model.variables, *optimizer.variables, *critic.variables, *slow.variables]
    norms = [
        float(np.linalg.norm(ops.convert_to_numpy(variable.value).astype("float64")))
        for variable in variables
        if "seed" not in variable.path
    ]
    found = [float(accuracy.result()), int(seen), float(average), norms, float(np.random.rand()), *values]
    print("result", json.dumps([name, found]), flush=True)


@contextmanager
def assigned_late() -> Iterator[None]:
    """Let workers run no function before they have made the calls in the block and come to the next one.

    The chief waits until a function is complete. So their scripts are ahead of that of the chief when
    functions begin; in a replay they are not, and the functions still get the same values of variables.
    """
    functions = strategy.function_calls()
    if not isinstance(functions, ChiefCalls) or job.current().settings.order is not None:
        yield
        return
    Dispatcher._assign, assign = lambda *_: None, Dispatcher._assign  # type: ignore[method-assign]
    yield
    assert functions._chief is not None
    dispatcher = functions._chief.dispatcher
    with dispatcher._changed:
        workers = dispatcher._tasks.workers
        made = functions._calls

        def ahead() -> bool:
            parked = dispatcher._parked
            return all(one in parked and parked[one].message.call == made for one in workers)

        assert dispatcher._changed.wait_for(ahead, 60)
        Dispatcher._assign = assign  # type: ignore[method-assign]
        dispatcher._pump()
        assert dispatcher._changed.wait_for(lambda: dispatcher._assignments.completed, 60)


def loop() -> None:
    if KIND == "free":
        lose_between_pushes(8, 2)
    lose_servers(sys.argv[2:])
    created = coordinator.create_per_worker_dataset(
        lambda: strategy.distribute_datasets_from_function(dataset)
    )
    batches = iter(created)
    for epoch in range(2):
        accuracy.reset_state()
        with assigned_late() if KIND == "free" and not epoch else nullcontext():
            values = [coordinator.schedule(train, args=(batches,)) for _ in range(8)]
        if KIND == "free":
            # Changes what functions in work change, too.
            seen.assign(1)
            average.assign(np.float32(0.5))
        values += [coordinator.schedule(train, args=(batches,)) for _ in range(4)]
        if epoch:
            # A copy, which the script changes before any function trains it.
            critic.set_weights([weights * 0.5 for weights in critic.get_weights()])
            # Another optimizer, while functions of the first one are in work.
            values.append(coordinator.schedule(train_critic, (batches,), {"scale": 2.0}))
        while not coordinator.done():
            time.sleep(0.01)
        coordinator.join()
        fetched = coordinator.fetch(values[:12])
        steps = [int(value["step"]) for value in fetched]
        show(f"epoch {epoch}", [float(value["loss"]) for value in fetched], steps)
        optimizer.learning_rate = 0.005
    last = coordinator.schedule(functools.partial(train_critic, scale=0.5), (batches,))
    show("fetched", float(last.fetch()), float(last.get()))
    often = [coordinator.schedule(train_often, (batches,)) for _ in range(2)]
    show("often", [float(value) for value in coordinator.fetch(often)])
    accuracy.reset_state()
    for start in range(0, 240, 60):
        coordinator.schedule(evaluate, (X[start : start + 60], Y[start : start + 60]))
    coordinator.join()
    show("evaluated")
    model.compile("sgd", loss_of)
    coordinator.schedule(train, (batches,))
    if KIND == "free":
        # Ends the functions before it.
        with strategy.scope():
            model.compile("sgd", loss_of)
        model.fit(X, Y, 20, verbose=0)
        show("fitted")
        coordinator.schedule(train, (batches,))
    digests = [lockstep.digest(one) for one in (model, critic)]
    print("digest", *digests, flush=True)


def fail(message: str) -> None:
    raise ValueError(message)


class Custom(Exception):
    """An exception of the program."""


def fail_specially() -> None:
    raise Custom("special")


def errors() -> None:
    batches = iter(coordinator.create_per_worker_dataset(lambda: Batches(np.arange(240))))
    first = coordinator.schedule(fail, ("first",))
    caught = []
    for number in range(1000):
        try:
            coordinator.schedule(train_critic, (batches,))
        except ValueError as error:
            caught.append(f"{error} before 1000: {number < 1000}")
            break
    coordinator.join()
    try:
        first.fetch()
    except ValueError as error:
        caught.append(f"fetched {error}")
    coordinator.schedule(fail_specially)
    try:
        coordinator.join()
    except Custom as error:
        caught.append(f"{type(error).__name__} {error}")
    value = coordinator.schedule(train_critic, (batches,))
    caught.append(str(np.isfinite(value.fetch())))
    with strategy.scope():
        model.compile("sgd", loss_of)
    for message in ("before fit", ""):
        if message:
            coordinator.schedule(fail, (message,))
        try:
            model.fit(X[:40], Y[:40], 20, verbose=0)
        except ValueError as error:
            caught.append(str(error))
    other = lockstep.ParameterServerStrategy()
    values = [
        one.schedule(lambda: ops.ones(()))
        for one in (coordinator, lockstep.ClusterCoordinator(other), coordinator)
    ]
    caught.append(str([float(value.fetch()) for value in values]))
    print("caught", json.dumps(caught), flush=True)
    coordinator.schedule(fail, ("last",))


def assigns_weight() -> None:
    weight.assign(2.0)


def assigns_integer() -> None:
    total.assign(total + 1)


def assigns_outside() -> None:
    outside.assign(outside + 1.0)


def returns_object() -> Any:
    return object()


def clips() -> None:
    keras.optimizers.SGD(global_clipnorm=1.0).apply([ops.zeros(())], [weight])


def alone() -> None:
    value = coordinator.schedule(lambda: ops.ones(()))
    if lockstep.is_chief():
        print(value.fetch())
    coordinator.join()


def stopped() -> None:
    stop_server(*sys.argv[2:])
    batches = iter(coordinator.create_per_worker_dataset(lambda: Batches(np.arange(240))))
    for _ in range(20):
        coordinator.schedule(train_critic, (batches,))
    coordinator.join()


match KIND:
    case "serial" | "free":
        loop()
    case "errors":
        errors()
    case "alone":
        alone()
    case "stopped":
        stopped()
    case name:
        coordinator.schedule(globals()[name])
        coordinator.join()
