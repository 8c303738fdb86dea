"""Trains tables whose rows are on parameter servers only, in scheduled functions; prints exact results.

    rows_in_functions.py serial FOLDER | free | misused

`serial` runs one function at a time; without Lockstep, it prints what plain Keras computes. In `free`, a
worker ends between its pushes to two servers, unless it follows a recorded order. `misused` prints errors.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from losing import lose_between_pushes

import lockstep
from lockstep.errors import LockstepError
from lockstep.worker import job

layers = keras.layers
KIND = sys.argv[1]
ROWS = 101
generator = np.random.default_rng(0)
X = generator.integers(0, ROWS, (120, 3))
Y = (X[:, :1] % 3 == 0).astype("float32")
BATCHES = [(X[start : start + 20], Y[start : start + 20]) for start in range(0, 120, 20)]
OPTIMIZERS = {"serial": keras.optimizers.SGD(0.5), "free": keras.optimizers.Adam(0.05)}

keras.utils.set_random_seed(3)
strategy = lockstep.ParameterServerStrategy(max_staleness=None if KIND == "free" else 0)
with strategy.scope():
    ids = layers.Input((3,), dtype="int64")
    table = lockstep.ServerEmbedding(ROWS, 4, keras.initializers.RandomUniform(seed=5), name="table")
    first = ids[:, 0]
    # Keras casts such ids.
    parts = [layers.Flatten()(table(ids)), table(first // 2), table(keras.ops.cast(first, "float32"))]
    model = keras.Model(ids, layers.Dense(1)(layers.Concatenate()(parts)))
    optimizer = OPTIMIZERS.get(KIND, keras.optimizers.Adagrad(0.1))
    model.compile(optimizer, "mse")
    error = keras.metrics.MeanSquaredError()
coordinator = lockstep.ClusterCoordinator(strategy)


def train(x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = tf.reduce_mean((outputs - y) ** 2)
    gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.2)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    error.update_state(y, outputs)
    return loss


train_in_graph = tf.function(train)


def total(x: Any) -> Any:
    return tf.reduce_sum(model(x))


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
    show("total", float(coordinator.schedule(tf.function(total), args=(X,)).fetch()))
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


def misused() -> None:
    def attempt(act: Callable[[], Any]) -> None:
        try:
            act()
        except LockstepError as found:
            print("error", type(found).__name__, " ".join(str(found).split()), flush=True)

    def gradients_of(compute: Callable[[], Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = compute()
        gradients: list[Any] = tape.gradient(loss, model.trainable_variables)
        return gradients

    def regularized() -> None:
        gradients_of(lambda: total(X) + tf.nn.l2_loss(model.trainable_variables[0]))

    def tensor() -> None:
        gradients = gradients_of(lambda: total(X))
        optimizer.apply([tf.convert_to_tensor(one) for one in gradients], model.trainable_variables)

    def updated() -> Any:
        optimizer.apply(gradients_of(lambda: total(X)), model.trainable_variables)
        return total(X)

    def not_by_row() -> None:
        keras.optimizers.Nadam().apply(gradients_of(lambda: total(X)), model.trainable_variables)

    def of_whole_variables() -> None:
        clips = keras.optimizers.SGD(clipnorm=1.0)
        clips.apply(gradients_of(lambda: total(X)), model.trainable_variables)

    def untrained() -> Any:
        return total(X)

    def late() -> None:
        variables = other.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(other(X))
        last.apply(tape.gradient(loss, variables), variables)

    for function in (regularized, tensor, updated, not_by_row, of_whole_variables):
        attempt(partial(coordinator.schedule, tf.function(function)))
    coordinator.schedule(tf.function(untrained))
    attempt(coordinator.join)
    last = keras.optimizers.SGD()
    with strategy.scope():
        other = keras.Sequential(
            [layers.Input((3,), dtype="int64"), lockstep.ServerEmbedding(9, 2, name="late")]
        )
    attempt(partial(coordinator.schedule, late))
    coordinator.schedule(train_in_graph, args=(X + ROWS, Y))
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
    case "misused":
        misused()
