"""Draws random numbers in every way that a program of TensorFlow has; prints the results.

random_numbers.py IMAGES [KILLED]: in the folder IMAGES are 24 images; worker 1 is killed in the loop KILLED.
If that is "driven", no other loop follows.
Lines that begin with "result" are the same for any number of workers.
"""

import hashlib
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import lockstep
from lockstep.worker import job

IMAGES = Path(sys.argv[1])
KILLED = sys.argv[2:]
X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

strategy = lockstep.MultiWorkerMirroredStrategy()
replicas = strategy.num_replicas_in_sync


def digest(*arrays: Any) -> str:
    parts = (np.ascontiguousarray(keras.ops.convert_to_numpy(array)) for array in arrays)
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def of_all(value: Any) -> Any:
    """Return a value of each replica as a row."""
    return np.asarray(strategy.gather(value, axis=0))


@tf.function  # type: ignore[misc]
def nested(shape: Any) -> Any:
    return tf.random.normal(shape)


def draws(rows: Any) -> dict[str, Any]:
    """Every operation, run several times in a step."""
    image = tf.reshape(tf.range(64.0), (4, 4, 4))
    looped = tf.TensorArray(tf.float32, 3)
    for i in tf.range(3):
        looped = looped.write(i, tf.random.uniform((2,)))
    drawn = {
        "uniform": tf.random.uniform((3,)),
        "between": tf.random.uniform((3,), 5.0, 6.0),
        "integers": tf.cast(tf.random.uniform((8,), 0, 1000, tf.int32), tf.float32),
        "normal": tf.random.normal(tf.shape(rows)[1:]),
        "truncated": tf.random.truncated_normal((3,)),
        "gamma": tf.random.gamma((2,), [0.5, 2.0]),
        "poisson": tf.random.poisson((4,), [3.0, 90.0]),
        "categorical": tf.cast(tf.random.categorical(tf.zeros((2, 100)), 4), tf.float32),
        "shuffle": tf.cast(tf.random.shuffle(tf.range(50)), tf.float32),
        "dropout": tf.nn.dropout(tf.ones((40,)), 0.5),
        "brightness": tf.image.random_brightness(image, 0.5),
        "crop": tf.image.random_crop(image, (2, 2, 2)),
        "looped": looped.stack(),
        "mapped": tf.map_fn(lambda one: one + tf.random.normal(()), tf.zeros((3,))),
        "python": tf.stack([tf.random.normal(()) for _ in range(3)]),
        "branch": tf.cond(tf.size(rows) >= 0, lambda: tf.random.normal((2,)), lambda: tf.zeros((2,))),
        "nested": tf.concat([nested((2,)), nested((2,))], 0),
        "given": tf.random.normal((2,), seed=3),
        "given again": tf.random.normal((2,), seed=3),
    }
    return {name: tf.reshape(value, (1, -1)) for name, value in drawn.items()}


def check_draws(steps: list[dict[str, Any]], *, eager: bool) -> None:
    """Replicas, steps, and runs of one operation within a step draw different numbers."""
    for name in steps[0]:
        rows = np.concatenate([step[name] for step in steps])
        different = len(np.unique(rows, axis=0))
        assert different == len(rows) or (name == "crop" and different > 4), name
        if name in ("looped", "mapped", "python", "nested", "uniform", "normal"):
            assert len(np.unique(rows)) == rows.size, name
    for step in steps:
        # In a graph, two operations with one seed draw equal numbers; eagerly, they count as one operation.
        assert np.array_equal(step["given"], step["given again"]) != eager
        assert not np.array_equal(step["python"], step["normal"][:, :3])
    everything = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
    assert sorted(everything["shuffle"][0]) == list(range(50))
    assert 5 <= everything["between"].min() <= everything["between"].max() < 6
    assert set(np.unique(everything["dropout"])) == {0.0, 2.0}
    assert 0.1 < everything["poisson"].reshape(-1, 2)[:, 0].mean() < 8
    assert everything["poisson"].reshape(-1, 2)[:, 1].mean() > 50


def runs() -> None:
    """Functions of replicas, in graphs and eagerly; outside of them, the script's numbers are unchanged."""
    outside, state = (nested((2,)), tf.random.normal((2,), seed=1)), random.getstate()
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(6))

    @tf.function  # type: ignore[misc]
    def in_graph(rows: Any) -> Any:
        return strategy.run(draws, args=(rows,))

    def plainly(rows: Any) -> Any:
        return strategy.run(draws, args=(rows,))

    for name, run in (("graph", in_graph), ("plain", plainly), ("eager", plainly)):
        tf.config.run_functions_eagerly(name == "eager")
        found = [{key: of_all(leaf) for key, leaf in run(rows).items()} for rows in dataset]
        tf.config.run_functions_eagerly(False)
        check_draws(found, eager=name == "eager")
        print("result", name, digest(*(step[key] for step in found for key in step)))
    assert random.getstate() == state
    later = nested((2,)), tf.random.normal((2,), seed=1)
    assert not np.array_equal(outside[0], later[0])
    print("result outside", digest(*outside, *later, random.random(), np.random.random()))


def rounds() -> None:
    """A function draws the same numbers again when it runs again to continue after an update."""
    weight = keras.Variable(np.zeros(3, "float32"))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([weight])

    def step() -> Any:
        noise = tf.random.normal((3,))
        optimizer.apply([noise], [weight])
        return (noise * 1)[None], (weight * tf.random.uniform(()))[None]

    for _ in range(2):
        before = np.asarray(weight)
        noise, _ = map(of_all, strategy.run(step))
        np.testing.assert_allclose(np.asarray(weight), before - noise.sum(axis=0), rtol=1e-5, atol=1e-6)
    print("result rounds", digest(weight))


class Noisy(keras.layers.Layer):  # type: ignore[misc]
    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        return inputs + tf.random.normal(tf.shape(inputs)) * tf.nn.dropout(tf.ones_like(inputs), 0.5)


class Own(keras.Sequential):  # type: ignore[misc]
    def train_step(self, data: Any) -> Any:
        x, y = data
        noise = tf.random.truncated_normal(tf.shape(x)) + tf.random.uniform(tf.shape(x), seed=1)
        return super().train_step((x + 0.01 * noise, y))


def kill_at(loop: str) -> None:
    if job.current().worker == 1 and [loop] == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


class KillWorker(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            kill_at("fit")


def pairs(context: Any) -> Any:
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(24)
    return rows.shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)


def driven() -> None:
    """A loop that workers join; they draw the same numbers as the others and read from the same position."""
    dataset = strategy.distribute_datasets_from_function(pairs)
    batches, total = iter(dataset), tf.Variable(0.0)

    @tf.function  # type: ignore[misc]
    def noisy(rows: Any) -> Any:
        return strategy.run(lambda rows: tf.reduce_sum(rows * tf.random.normal((1, 4))), args=(rows,))

    for step in strategy.steps(4, {"batches": batches, "total": total}):
        if step == 2:
            kill_at("driven")
        total.assign(total / 2 + strategy.reduce("SUM", noisy(next(batches)[0]), axis=None))
    print("result driven", digest(total, random.random(), tf.random.uniform(())))


def fits() -> None:
    """Steps of Keras, with and without a graph; the script's seed counts."""
    found = {}
    options: list[tuple[str, int, dict[str, Any]]] = [
        ("graph", 1, {}),
        ("again", 1, {}),
        ("another", 2, {}),
        ("eager", 1, {"run_eagerly": True}),
    ]
    for name, seed, compiled in options:
        keras.utils.set_random_seed(seed)
        with strategy.scope():
            layers = [keras.layers.Dense(3, kernel_initializer="ones"), Noisy(), keras.layers.Dense(1)]
            model = Own([keras.layers.Input((4,)), *layers])
            model.compile("adam", "mse", **compiled)
        model.layers[-1].kernel.assign(np.ones((3, 1), "float32"))
        if name == "graph":
            model.fit(
                strategy.distribute_datasets_from_function(pairs),
                epochs=2,
                verbose=0,
                callbacks=[KillWorker()],
            )
        else:
            model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        found[name] = lockstep.digest(model)
        print("result fit", name, found[name])
    assert len(set(found.values())) == len(found)


def shuffled(context: Any) -> Any:
    return tf.data.Dataset.range(24).shuffle(24)


def by_numpy(context: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(np.random.permutation(24))


def by_python(context: Any) -> Any:
    rows = list(range(24))
    random.shuffle(rows)
    return tf.data.Dataset.from_tensor_slices(rows)


def by_keras(context: Any) -> Any:
    order = keras.random.shuffle(keras.ops.arange(24), seed=keras.random.SeedGenerator())
    return tf.data.Dataset.from_tensor_slices(keras.ops.convert_to_numpy(keras.random.shuffle(order)))


def by_tensorflow(context: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(tf.random.shuffle(tf.random.shuffle(tf.range(24), seed=1)))


def mapped(context: Any) -> Any:
    keys = tf.data.Dataset.range(24).map(lambda row: (tf.random.uniform(()), row)).batch(24)
    return keys.map(lambda keys, rows: tf.gather(rows, tf.argsort(keys))).unbatch()


def generated(context: Any) -> Any:
    """Draws when a pass begins; each pass has another order."""

    def rows() -> Iterator[int]:
        yield from np.random.permutation(24)

    return tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((), tf.int64))


def by_torch(context: Any) -> Any:
    import torch

    return tf.data.Dataset.from_tensor_slices(torch.randperm(24).numpy())


def images(context: Any) -> Any:
    files = keras.utils.image_dataset_from_directory(
        IMAGES, label_mode=None, image_size=(1, 1), batch_size=None, color_mode="grayscale", verbose=False
    )
    return files.map(lambda image: tf.cast(image[0, 0, 0], tf.int64))


def pipelines() -> None:
    """Each replica has its part of an order that is equal on all workers."""
    before = random.getstate(), np.random.get_state()[1].tolist()
    kinds = [shuffled, by_numpy, by_python, by_keras, by_tensorflow, mapped, generated, images]
    orders = {}
    for make in [*kinds, *([by_torch] if find_spec("torch") else [])]:

        def dataset_fn(context: Any, make: Callable[[Any], Any] = make) -> Any:
            rows = make(context).map(lambda row: tf.cast(row, tf.int64))
            return rows.shard(context.num_input_pipelines, context.input_pipeline_id).batch(3)

        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        passes = [np.concatenate([of_all(rows) for rows in dataset]).tolist() for _ in range(2)]
        for rows in passes:
            assert sorted(rows) == list(range(24)), (make, rows)
        orders[make.__name__] = passes
    print("result pipelines", digest(*orders.values()))
    assert orders["shuffled"][0] != orders["shuffled"][1]
    assert orders["generated"][0] != orders["generated"][1]
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    equal = strategy.distribute_datasets_from_function(lambda context: shuffled(context).batch(4))
    for _ in range(2):
        next(iter(equal))
    print("result after", digest(tf.random.uniform((2,)), keras.random.uniform((2,)), np.random.random()))


def main() -> None:
    if keras.backend.backend() == "tensorflow":
        # Workers cannot join after loops that Lockstep does not drive.
        driven()
        if KILLED == ["driven"]:
            return
        fits()
        runs()
        rounds()
    pipelines()


if __name__ == "__main__":
    main()
