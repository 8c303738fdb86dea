"""Models of tf_keras's tests of parameter servers, written for Keras 3; prints their digests and results.

tf_keras fits them from a `DatasetCreator`, whose datasets draw from unseeded generators; here all processes
have the same seed. What tf_keras refuses works, such as callbacks with methods for batches.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import lockstep

layers = keras.layers
EPOCHS, STEPS = 4, 10
strategy = lockstep.ParameterServerStrategy(variable_partitioner=lockstep.FixedShardsPartitioner(2))
Data = Callable[[], tf.data.Dataset]


class Epochs(keras.callbacks.Callback):
    """Checks the numbers of epochs and the losses, and counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert isinstance(logs["loss"], (float, np.floating))
        self.seen.append(epoch)


def uniform(*shape: int) -> Data:
    def made() -> tf.data.Dataset:
        pairs = tf.random.uniform((10, *shape)), tf.random.uniform((10,))
        return tf.data.Dataset.from_tensor_slices(pairs).shuffle(10).repeat().batch(2)

    return made


def words() -> tf.data.Dataset:
    lookup = layers.StringLookup(num_oov_indices=1, vocabulary=["earth", "wind", "and", "fire"])
    x = np.array([["earth", "wind", "and", "fire"], ["fire", "and", "earth", "michigan"]])
    rows = tf.data.Dataset.from_tensor_slices((x, np.array([0, 1]))).shuffle(10).repeat().batch(2)
    return rows.map(lambda a, b: (tf.cast(lookup(a), "float32"), b))


def build(*, normalized: bool = False, **options: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([layers.Dense(10)])
        if normalized:
            model.add(layers.BatchNormalization(momentum=0.8))
        model.add(layers.Dense(1, activation="sigmoid"))
        metrics = [keras.metrics.Accuracy()]
        model.compile(keras.optimizers.SGD(), loss="binary_crossentropy", metrics=metrics, **options)
    return model


def fit(name: str, data: Data, callbacks: tuple[Any, ...] = (), **options: Any) -> keras.Model:
    model, epochs = build(**options), Epochs()
    model.fit(
        data(),
        epochs=EPOCHS,
        steps_per_epoch=STEPS,
        callbacks=[*callbacks, epochs],
        validation_data=data(),
        validation_steps=STEPS,
        verbose=0,
    )
    assert epochs.seen == list(range(EPOCHS))
    assert epochs.batches == EPOCHS * STEPS
    assert int(model.optimizer.iterations) == EPOCHS * STEPS
    print("result", name, lockstep.digest(model), flush=True)
    return model


keras.utils.set_random_seed(1)
fit("plain", uniform(10))
fit("normalized", uniform(6), normalized=True)
fit("lookup", words)
fit("jit_compile", uniform(10), jit_compile=True)
fit("run_eagerly", uniform(10), run_eagerly=True)
board = Path(sys.argv[1])
model = fit("TensorBoard", uniform(10), (keras.callbacks.TensorBoard(board),))
assert len(list(board.rglob("events*"))) == 2
print("result evaluate", model.evaluate(uniform(10)(), steps=10, verbose=0), flush=True)
numbers = tf.data.Dataset.from_tensor_slices(np.tile([[1.0], [2.0], [3.0], [1.0], [5.0], [1.0]], (1, 10)))
predictions = model.predict(numbers.repeat().batch(2), steps=3, verbose=0)
assert predictions.shape == (6, 1)
assert predictions[0] == predictions[3] == predictions[5]
print("result predict", predictions.tolist(), flush=True)

coordinator = lockstep.ClusterCoordinator(strategy)
assert coordinator is lockstep.ClusterCoordinator(strategy)


@tf.function
def evaluate(shard: Any) -> Any:
    """Return the mean of a shard of numbers."""
    total = count = tf.constant(0.0, tf.float64)
    for number in tf.data.Dataset.range(1024).shard(128, shard):
        total += tf.cast(number, tf.float64)
        count += 1.0
    return total / count


shards = [coordinator.schedule(evaluate, args=(tf.constant(shard, tf.int64),)) for shard in range(128)]
assert np.mean([float(one.fetch()) for one in shards]) == 511.5
