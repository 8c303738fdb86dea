"""A program that trains on pipelines of `tf.data` with maps, some of which draw random numbers.

    tf_pipelines.py [HOW]

HOW selects what happens in the second pass of the first `fit`: "lost1", worker 1 is lost; "killed", all
workers are, unless the job has resumed. The program prints the exact results, and the number of rows that its
first maps have mapped.
"""

import os
import signal
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import lockstep
from lockstep.worker import job

HOW = sys.argv[1] if sys.argv[1:] else ""
IMAGES = np.random.default_rng(0).integers(0, 256, (74, 6, 6, 1), np.uint8)
LABELS = IMAGES.mean(axis=(1, 2, 3)) / 64
mapped = 0


def counted(image: Any, label: Any) -> Any:
    def count(label: Any) -> Any:
        global mapped
        mapped += 1
        return label

    found = tf.numpy_function(count, [label], tf.float64, stateful=False)
    return image, tf.ensure_shape(found, ())


FLIP = keras.layers.RandomFlip()
ROTATION = keras.layers.RandomRotation(0.1, seed=3)
GENERATOR = keras.random.SeedGenerator(4)


def augmented(image: Any, label: Any) -> Any:
    image = tf.image.random_flip_left_right(tf.cast(image, tf.float32) / 255.0)
    image = ROTATION(FLIP(image, training=True), training=True)
    if keras.backend.backend() == "tensorflow":
        image += keras.random.uniform((6, 6, 1), 0, 0.1) * keras.random.uniform((), seed=GENERATOR)
    return image + tf.random.normal((6, 6, 1), stddev=0.1), label


def faded(images: Any, labels: Any) -> Any:
    """Map a whole batch, as most programs with random layers do."""
    images = FLIP(images, training=True)
    if keras.backend.backend() == "tensorflow":
        images += keras.random.normal(tf.shape(images), stddev=0.1)
    return images, labels


def blended(one: Any, two: Any) -> Any:
    """Blend two batches with random weights: MixUp."""
    size = tf.shape(one[0])[0]
    first, second = tf.random.gamma([size], 0.2), tf.random.gamma([size], 0.2)
    weight = first / (first + second + 1e-7)
    of_image, of_label = weight[:, None, None, None], tf.cast(weight, tf.float64)
    images = tf.cast(one[0], tf.float32) * of_image + tf.cast(two[0], tf.float32) * (1 - of_image)
    return images / 255.0, one[1] * of_label + two[1] * (1 - of_label)


def pairs() -> Any:
    """Zip two shuffled pipelines of batches, and blend them in parallel."""
    batches = [source().shuffle(30).batch(16) for _ in range(2)]
    return tf.data.Dataset.zip(tuple(batches)).map(blended, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2)


def scaled(image: Any, label: Any) -> Any:
    return tf.image.resize(tf.cast(image, tf.float32) / 255.0, (6, 6)), label


def source() -> Any:
    return tf.data.Dataset.from_tensor_slices((IMAGES, LABELS))


class Disturbing(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends this worker, or all, after step 7 of the training: in the second pass."""

    steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        entered = job.current()
        if self.steps != 7 or entered.checkpoints.resumed is not None:
            return
        if HOW == "killed":
            scheduler = entered.checkpoints.scheduler
            assert scheduler is None or scheduler.close(30)
        if HOW == "killed" or (HOW == "lost1" and entered.worker == 1):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    keras.utils.set_random_seed(1)
    strategy = lockstep.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Flatten(), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
    train = source().shuffle(100).map(counted).map(augmented, num_parallel_calls=2).batch(16)
    test = source().map(scaled).batch(20)
    history = model.fit(train, epochs=3, validation_data=test, verbose=0, callbacks=[Disturbing()])
    report("fit 1", model, history.history)

    endless = source().shuffle(30, seed=3).map(counted).map(scaled).repeat().batch(12).prefetch(2)
    history = model.fit(endless, epochs=2, steps_per_epoch=5, verbose=0)
    report("fit 2", model, history.history)
    batches = source().shuffle(30).map(augmented, num_parallel_calls=2).batch(16)
    batches = batches.map(faded, num_parallel_calls=4).prefetch(2)
    history = model.fit(batches, epochs=2, verbose=0)
    report("fit 3", model, history.history)
    history = model.fit(pairs(), epochs=2, verbose=0)
    report("fit 4", model, history.history)
    loop(strategy, batches, model)
    print(f"evaluate {model.evaluate(test, verbose=0).hex()}")
    print(f"predict {ending(model.predict(test, verbose=0))}")
    print(f"rows {mapped}")


def loop(strategy: Any, batches: Any, model: keras.Model) -> None:
    """Sum what replicas get from distributed pipelines, in two passes, on TensorFlow also in graphs."""
    rows = source().shuffle(30).map(counted).map(augmented, num_parallel_calls=2).batch(16)

    def step(x: Any, y: Any) -> Any:
        return keras.ops.sum(x * keras.ops.reshape(keras.ops.cast(y, "float32"), (-1, 1, 1, 1)))

    def summed(element: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, element), axis=None)

    for pipeline in (rows, batches, pairs()):
        distributed = strategy.experimental_distribute_dataset(pipeline)
        for _ in range(2):
            print("loop", *(float(summed(element)).hex() for element in distributed))
        if keras.backend.backend() == "tensorflow":
            following = tf.function(lambda iterator: summed(next(iterator)))
            iterator = iter(distributed)
            print("loop", *(float(following(iterator)).hex() for _ in range(len(distributed))))
            print("loop", float(total(distributed, summed)).hex())
    model.fit(strategy.experimental_distribute_dataset(rows), epochs=1, verbose=0)
    print("loop", lockstep.digest(model))


@tf.function  # type: ignore[untyped-decorator]
def total(distributed: Any, summed: Any) -> Any:
    found = tf.constant(0.0)
    for element in distributed:
        found += summed(element)
    return found


def report(name: str, model: keras.Model, history: dict[str, list[float]]) -> None:
    figures = [f"{key} {value.hex()}" for key, values in history.items() for value in values]
    print(name, lockstep.digest(model), *figures)


def ending(outputs: Any) -> str:
    return np.asarray(outputs, "float32").tobytes().hex()[-32:]


if __name__ == "__main__":
    main()
