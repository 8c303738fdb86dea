"""Trains tables whose rows are on parameter servers only, in scheduled functions; prints exact results.

    rows_in_functions.py serial FOLDER | free | replaced FOLDER | misused

`serial` runs one function at a time; without Lockstep, it prints what plain Keras computes. In `free`, a
worker ends between its pushes to two servers, unless it follows a recorded order. In `replaced`, one ends
within a function, and the program schedules functions until the worker that replaces it has run some; it
writes the number of rounds to FOLDER. `misused` prints errors. On TensorFlow and PyTorch.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
from losing import lose_between_pushes

import lockstep
from lockstep.errors import LockstepError
from lockstep.keras.parameter_server.function_worker import WorkerCalls
from lockstep.worker import job

layers, ops = keras.layers, keras.ops
ON_TORCH = keras.backend.backend() == "torch"
KIND = sys.argv[1]
ROWS = 101
generator = np.random.default_rng(0)
X = generator.integers(0, ROWS, (120, 3))
Y = (X[:, :1] % 3 == 0).astype("float32")
BATCHES = [(X[start : start + 20], Y[start : start + 20]) for start in range(0, 120, 20)]
OPTIMIZERS = {"serial": keras.optimizers.SGD(0.5), "free": keras.optimizers.Adam(0.05)}

keras.utils.set_random_seed(3)
strategy = lockstep.ParameterServerStrategy(max_staleness=None if KIND in ("free", "replaced") else 0)
with strategy.scope():
    ids = layers.Input((3,), dtype="int64")
    table = lockstep.ServerEmbedding(ROWS, 4, keras.initializers.RandomUniform(seed=5), name="table")
    first = ids[:, 0]
    # Keras casts such ids.
    parts = [layers.Flatten()(table(ids)), table(first // 2), table(ops.cast(first, "float32"))]
    masked = lockstep.ServerEmbedding(ROWS, 3, mask_zero=True, name="masked")
    parts.append(layers.GlobalAveragePooling1D()(masked(ids)))
    model = keras.Model(ids, layers.Dense(1)(layers.Concatenate()(parts)))
    optimizer = OPTIMIZERS.get(KIND, keras.optimizers.Adagrad(0.1))
    model.compile(optimizer, "mse")
    error = keras.metrics.MeanSquaredError()
    factors = [lockstep.ServerEmbedding(ROWS, 2, "ones", name=f"factor_{k}") for k in range(2)]
    product = keras.Model(ids, layers.Multiply()([factor(ids) for factor in factors]))
    of_factors = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)]
coordinator = lockstep.ClusterCoordinator(strategy)


def differentiated(compute: Callable[[], Any], variables: list[Any]) -> tuple[Any, list[Any]]:
    """Return what `compute` returns, and the gradients of the first value of that."""
    if ON_TORCH:
        for one in (model, product):
            one.zero_grad()
        found = compute()
        found[0].backward()
        return found, [variable.value.grad for variable in variables]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        found = compute()
    return found, tape.gradient(found[0], variables)


def clipped(gradients: list[Any], norm: float) -> list[Any]:
    """Return gradients whose norm is at most `norm`."""
    if ON_TORCH:
        import torch

        factor = norm / max(norm, float(torch.stack([one.norm() for one in gradients]).norm()))
        return [one * factor for one in gradients]
    import tensorflow as tf

    found: list[Any] = tf.clip_by_global_norm(gradients, norm)[0]
    return found


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `tf.function` on TensorFlow."""
    if ON_TORCH:
        return function
    import tensorflow as tf

    graph: Callable[..., Any] = tf.function(function)
    return graph


def train(x: Any, y: Any) -> Any:
    def loss_of() -> tuple[Any, Any]:
        outputs = model(x, training=True)
        return ops.mean(ops.square(outputs - ops.convert_to_tensor(y))), outputs

    (loss, outputs), gradients = differentiated(loss_of, model.trainable_variables)
    optimizer.apply_gradients(zip(clipped(gradients, 0.2), model.trainable_variables, strict=True))
    if ON_TORCH:
        model.zero_grad()
    error.update_state(y, outputs)
    return loss


train_in_graph = traced(train)


@traced
def train_factors(x: Any) -> Any:
    """Apply two optimizers, each to a table."""
    loss, gradients = differentiated(
        lambda: [ops.mean(ops.square(product(x) - 2.0))], product.trainable_variables
    )
    for one, gradient, variable in zip(of_factors, gradients, product.trainable_variables, strict=True):
        one.apply([gradient], [variable])
    return loss[0]


def total(x: Any) -> Any:
    return ops.sum(model(x))


def untracked(x: Any) -> Any:
    """Return `total(x)`, without gradients on PyTorch."""
    if not ON_TORCH:
        return total(x)
    import torch

    with torch.no_grad():
        return total(x)


def show(name: str, value: Any) -> None:
    print("result", json.dumps([name, value]), flush=True)


def epoch(function: Callable[..., Any]) -> list[float]:
    error.reset_state()
    losses = [coordinator.schedule(function, args=batch) for batch in BATCHES]
    coordinator.join()
    return [float(loss) for loss in coordinator.fetch(losses)]


def serial(folder: str) -> None:
    show("losses", [epoch(train_in_graph), float(error.result())])
    show("evaluated", [model.evaluate(X, Y, 50, verbose=0), model.predict(X, 50, verbose=0).tolist()])
    show("eager", epoch(train))
    losses = [coordinator.schedule(train_factors, args=(x,)) for x, _ in BATCHES]
    show("factors", [float(loss) for loss in coordinator.fetch(losses)])
    totals = [coordinator.schedule(traced(one), args=(X,)) for one in (total, untracked)]
    totals.append(coordinator.schedule(total, args=(X[:0],)))
    show("totals", [float(one) for one in coordinator.fetch(totals)])
    coordinator.join()
    model.save_weights(f"{folder}/{'served' if job.is_worker() else 'plain'}.weights.h5")
    show("fit", model.fit(X, Y, 20, verbose=0, shuffle=False).history["loss"])
    show("again", epoch(train_in_graph))
    show("end", model.evaluate(X, Y, 50, verbose=0))


def free() -> None:
    lose_between_pushes(9, 2)
    show("losses", [epoch(train_in_graph) for _ in range(4)])
    show("fit", model.fit(X, Y, 20, verbose=0).history["loss"])
    show("eager", epoch(train))
    model.fit(X, Y, 20, verbose=0)
    show("evaluated", model.evaluate(X, Y, 50, verbose=0))
    print("digest", lockstep.digest(model), flush=True)


def replaced(folder: Path) -> None:
    own, run, ran = job.current(), WorkerCalls._run, 0
    rounds, joined = folder / "rounds", folder / "joined"

    def counted(*given: Any) -> Any:
        nonlocal ran
        ran += 1
        if own.worker == 2 and ran == 4 and own.settings.order is None:
            os.kill(os.getpid(), signal.SIGKILL)
        if own.worker == 6:
            joined.write_text(str(ran))
        return run(*given)

    def enough(number: int) -> int:
        if not rounds.exists() and joined.exists() and int(joined.read_text()) > 5:
            rounds.write_text(str(number))
        return int(rounds.exists() and number >= int(rounds.read_text()))

    WorkerCalls._run = counted  # type: ignore[method-assign, assignment]
    history: list[Any] = []
    for number in range(10**6):
        history.append([epoch(train_in_graph), float(error.result())])
        if number % 3 == 1:
            history.append(model.evaluate(X, Y, 50, verbose=0))
        if coordinator.schedule(enough, (number,)).fetch():
            break
    # All processes evaluate together, also the new one.
    history += [model.evaluate(X, Y, 50, verbose=0), epoch(train_in_graph)]
    history.append(model.fit(X, Y, 20, verbose=0).history["loss"])
    history += [epoch(train), model.predict(X, 50, verbose=0).tolist()]
    show("history", history)
    print("digest", lockstep.digest(model), flush=True)


def misused() -> None:
    def attempt(act: Callable[[], Any]) -> None:
        try:
            act()
        except LockstepError as found:
            print("error", type(found).__name__, " ".join(str(found).split()), flush=True)

    def gradients_of(compute: Callable[[], Any], of: Any = model) -> list[Any]:
        gradients: list[Any] = differentiated(lambda: [compute()], of.trainable_variables)[1]
        return gradients

    def regularized() -> None:
        gradients_of(lambda: total(X) + ops.sum(ops.square(model.trainable_variables[0])))

    def tensor() -> None:
        gradients = gradients_of(lambda: total(X))
        if ON_TORCH:
            gradients = [one.to_dense() for one in gradients]
        else:
            import tensorflow as tf

            gradients = [tf.convert_to_tensor(one) for one in gradients]
        optimizer.apply(gradients, model.trainable_variables)

    def updated() -> Any:
        optimizer.apply(gradients_of(lambda: total(X)), model.trainable_variables)
        return total(X)

    def twice() -> None:
        for _ in range(2):
            optimizer.apply(gradients_of(lambda: total(X)), model.trainable_variables)

    def not_by_row() -> None:
        keras.optimizers.Nadam().apply(gradients_of(lambda: total(X)), model.trainable_variables)

    def of_whole_variables() -> None:
        clips = keras.optimizers.SGD(clipnorm=1.0)
        clips.apply(gradients_of(lambda: total(X)), model.trainable_variables)

    def untrained() -> Any:
        return total(X)

    def late() -> None:
        last.apply(gradients_of(lambda: ops.sum(other(X)), other), other.trainable_variables)

    for function in (regularized, tensor, updated, twice, not_by_row, of_whole_variables):
        attempt(partial(coordinator.schedule, traced(function)))
    coordinator.schedule(traced(untrained))
    attempt(coordinator.join)
    last = keras.optimizers.SGD()
    with strategy.scope():
        other = keras.Sequential(
            [layers.Input((3,), dtype="int64"), lockstep.ServerEmbedding(9, 2, name="late")]
        )
    attempt(partial(coordinator.schedule, late))
    coordinator.schedule(train_in_graph, args=(X + 2**32, Y))
    attempt(coordinator.join)
    coordinator.schedule(train_in_graph, args=(X, Y))
    attempt(lambda: table(X))
    coordinator.join()
    attempt(lambda: table.load_own_variables({"rows-0": np.zeros((ROWS, 4))}))
    attempt(lambda: show("read", float(keras.ops.sum(table(X)))))


match KIND:
    case "serial":
        serial(sys.argv[2])
    case "free":
        free()
    case "replaced":
        replaced(Path(sys.argv[2]))
    case "misused":
        misused()
