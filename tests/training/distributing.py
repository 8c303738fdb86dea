"""Every kind of distributed input, read in loops of the program's own and by `fit`; prints each result.

distributing.py FOLDER: lines that begin with "check" are the same for any number of workers.
"""

import os
import signal
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute as rewriting

import lockstep
from lockstep.errors import DataError, DisagreementError
from lockstep.keras.randomness import changed_states, random_states
from lockstep.worker import job

FOLDER = Path(sys.argv[1])
ROWS = 70
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = X.sum(axis=1)
Pair = namedtuple("Pair", ["x", "y"])

strategy = lockstep.MultiWorkerMirroredStrategy()
distribute = strategy.experimental_distribute_dataset
from_function = strategy.distribute_datasets_from_function


def compiled(*first: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([*first, keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    return model


@cache
def built() -> tuple[keras.Model, list[Any], list[Any]]:
    """A model for many datasets, whose steps are compiled once; its weights and its optimizer's variables."""
    model = compiled(keras.layers.Input((6,)))
    model.optimizer.build(model.trainable_variables)
    others = [np.array(keras.ops.convert_to_numpy(each)) for each in model.optimizer.variables]
    return model, [np.array(weight) for weight in model.get_weights()], others


def fitted(make: Callable[[], Any], *, unbuilt: bool = False, **options: Any) -> str:
    """Train on a dataset from the same first values; an unbuilt model reads a batch first."""
    if unbuilt:
        model = compiled()
    else:
        model, weights, others = built()
        keras.utils.set_random_seed(1)
        model.set_weights(weights)
        for variable, value in zip(model.optimizer.variables, others, strict=True):
            variable.assign(value)
    data = make()
    model.fit(data, epochs=2, verbose=0, **options)
    loss = model.evaluate(data, verbose=0)
    return f"{lockstep.digest(model)} {loss.hex()}"


def shuffled(shuffle: bool = True) -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return (data.shuffle(ROWS, seed=3) if shuffle else data).batch(16)


def of_files(name: str, policy: str | None) -> Any:
    """Rows of text from one file, or from two that are not equally long."""
    files = sorted(str(path) for path in FOLDER.glob(f"{name}-*.txt"))
    data = tf.data.TextLineDataset(files).map(lambda line: tf.strings.to_number(tf.strings.split(line)))
    data = data.map(lambda row: (tf.ensure_shape(row, (7,))[:6], row[6]))
    data = (data.shuffle(10, seed=3) if name == "three" else data).batch(16)
    options = tf.data.Options()
    if policy:
        chosen = getattr(tf.data.experimental.AutoShardPolicy, policy)
        options.experimental_distribute.auto_shard_policy = chosen
    return data.with_options(options)


class Sequence(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return X[16 * index :][:16], Y[16 * index :][:16]


class Lists:
    """An iterable that has several passes."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[X[start : start + 16], Y[start : start + 16]] for start in range(0, ROWS, 16)])


def loader(shuffle: bool = False) -> Any:
    import torch
    from torch.utils import data

    rows = data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return data.DataLoader(rows, batch_size=16, shuffle=shuffle)


def pipeline(context: Any) -> Any:
    """The replicas' pipelines end one after the other."""
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
    return data.batch(3 + context.input_pipeline_id)


def without_length(context: Any) -> Any:
    return pipeline(context).filter(lambda x, y: True)


def listed(context: Any) -> Any:
    return [(np.array(x), np.array(y)) for x, y in pipeline(context).as_numpy_iterator()]


def gathered(dataset: Any, leaf: Callable[[Any], Any]) -> list[Any]:
    """Return a leaf of all elements, as all replicas together have it."""
    found = [keras.ops.convert_to_numpy(strategy.gather(leaf(element), axis=0)) for element in dataset]
    return np.concatenate(found).tolist()


def loops() -> None:
    """Each replica receives rows of the dataset in their order, in any nest."""
    kinds: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "tuple": (shuffled(False), lambda element: element[1]),
        "nest": (
            shuffled(False).map(lambda x, y: {"in": (x, None), "out": Pair(x, y)}),
            lambda element: element["out"].y,
        ),
        "tensor": (tf.data.Dataset.from_tensor_slices(Y).batch(16), lambda element: element),
        "PyDataset": (Sequence(), lambda element: element[1]),
        "lists": (Lists(), lambda element: element[1]),
    }
    if find_spec("torch"):
        kinds["loader"] = (loader(), lambda element: element[1])
    for name, (data, leaf) in kinds.items():
        dataset = distribute(data)
        for _ in range(2):
            assert gathered(dataset, leaf) == Y.tolist(), name
    nest = next(iter(distribute(kinds["nest"][0])))
    assert isinstance(nest["out"], Pair)
    assert nest["in"][1] is None
    for make in (pipeline, without_length, listed):
        dataset = from_function(make)
        for _ in range(2):
            assert sorted(gathered(dataset, lambda element: element[1])) == sorted(Y.tolist()), make
    assert len(from_function(pipeline)) == len(from_function(listed)) == 8
    assert len(distribute(Sequence())) == 5


def passing_over() -> None:
    """An iterator that skips elements continues with the same ones."""
    for dataset in (distribute(shuffled(False)), from_function(without_length)):
        first, second = iter(dataset), iter(dataset)
        for _ in range(3):
            next(first)
        second.skip(3)
        assert second.position == (2, 3) == (first.position.passes + 1, first.position.taken)
        assert gathered(first, lambda element: element[1]) == gathered(second, lambda element: element[1])
    with pytest.raises(DataError, match="ended after 5"):
        iter(distribute(shuffled())).skip(6)


def values() -> None:
    """Values from a function are available everywhere."""
    made = strategy.experimental_distribute_values_from_function(
        lambda context: {"id": np.float32(context.replica_id_in_sync_group), "of": np.ones(2, "int32")}
    )
    replicas = strategy.num_replicas_in_sync
    assert float(strategy.reduce("SUM", made["id"], axis=None)) == sum(range(replicas))
    local = strategy.experimental_local_results(made)
    own = job.current().view.replicas_of(job.current().worker)
    assert [float(value["id"]) for value in local] == list(own)


def fits() -> None:
    """A distributed dataset trains as the dataset itself, also if a policy gives it no shards."""
    own = [shuffled, partial(loader, True)] if keras.backend.backend() == "torch" else [shuffled]
    for make in own:
        plain, drawn = fitted(make, unbuilt=True), random_states()
        assert fitted(lambda make=make: distribute(make()), unbuilt=True) == plain
        assert not changed_states(drawn, random_states())
        print("check shuffled", plain)
    print("check lists", fitted(lambda: distribute(Lists()), steps_per_epoch=5))
    joined = {fitted(partial(from_function, make)) for make in (pipeline, without_length)}
    assert len(joined) == 1
    print("check pipelines", *joined)
    for name in ("one", "two"):
        policies = (None, "AUTO", "FILE", "OFF") if name == "one" else (None, "FILE")
        makes = [partial(of_files, name, policy) for policy in policies]
        digests = set(map(fitted, makes))
        assert len(digests) == 1
        print("check files", name, *digests)


def of_tf_distribute(make: Callable[[], Any]) -> Any:
    """Distribute what each of several workers with a replica each reads in `tf.distribute`."""
    replicas = strategy.num_replicas_in_sync
    parts = []
    for replica in range(replicas):
        rebatched = make().rebatch(rewriting.batch_sizes_for_worker(16, replicas, 1, replica))
        parts.append(rewriting._AutoShardDataset(rebatched, replicas, replica, replicas))
    return from_function(lambda context: parts[context.input_pipeline_id])


def shards() -> None:
    """With the policies FILE and DATA, each replica reads its shard, in `fit` and in loops."""
    digests = []
    for policy in ("FILE", "DATA"):
        make = partial(of_files, "three", policy)
        split = (lambda make=make: distribute(make()), partial(of_tf_distribute, make))
        one, other = (data() for data in split)
        for _ in range(2):
            assert gathered(one, lambda element: element[1]) == gathered(other, lambda element: element[1])
        found = {fitted(data).split()[0] for data in (make, *split)}
        assert len(found) == 1
        digests += found
        print("check shards", policy, *found)
    assert len(set(digests)) == 2
    model = keras.Sequential([keras.layers.Dense(1)])
    with strategy.scope():
        model.compile(loss="mse")
    # The first call also reads a batch to build the model.
    policies = (None, None, "FILE")
    rows = [model.predict(of_files("three", policy), verbose=0).tobytes() for policy in policies]
    assert rows[1] == rows[2]


class KillThird(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2 and job.current().worker == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def lost() -> None:
    """Another worker reads the shards of a lost one."""
    print("check lost", fitted(partial(of_files, "three", "FILE"), callbacks=[KillThird()]).split()[0])


def refusals() -> None:
    """Inputs that cannot be split are refused, with a remedy."""
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1.0], [2.0, 3.0]])).batch(2)
    for data, advice in (
        (ragged, "to_tensor"),
        (tf.data.Dataset.range(3), "batch it"),
        ([np.float32(1)], "batch the dataset"),
        ([(X, Y[:3])], "equally long"),
        ([X[:0]], "no rows"),
    ):
        with pytest.raises(DataError, match=advice):
            next(iter(distribute(data)))


def disagreement() -> None:
    """The error of workers that read different rows names the function for such inputs."""
    worker = job.current().worker
    mine = tf.data.Dataset.from_tensor_slices((X[worker:], Y[worker:])).batch(8, drop_remainder=True)
    try:
        fitted(lambda: mine)
    except DisagreementError as error:
        print("differs:", error)


def main() -> None:
    loops()
    passing_over()
    values()
    refusals()
    fits()
    shards()
    lost()
    if len(job.current().view.workers) > 1:
        disagreement()


if __name__ == "__main__":
    main()
