"""Trains models asynchronously on parameter servers; prints exact results and rounded ones.

    serving.py serial | exact | free [SERVER CALL KIND NUMBER WHEN] | replaced FILE [SERVER ...] | long |
        restarted FOLDER | alone | lost-server | stopped-server SERVER LIMIT [TASK] | lost-chief | raising |
        faster | differing | again | unscoped | mirrored

`serial` and `exact` let one step be in work at a time, as plain Keras does; without Lockstep or servers, they
print what plain Keras computes, `exact` only digests. `free` has no bound; unless it follows a recorded
order, a worker ends between its pushes to two servers, and a server at the given point (see `losing.py`). In
`replaced`, a worker ends so within the second `fit`, and then the one that replaces it; the training stops
soon after the next one takes part, whose step it writes to FILE, or at the step in FILE. In `restarted`, the
chief ends once in the third epoch, if FOLDER is empty. `alone` trains in one process with and without the
strategy. `lost-server` and `lost-chief` end such a process within `fit`, and `stopped-server` stops one;
`raising` and `faster` have a callback that raises and one that changes the learning rate within an epoch; in
`differing` a worker reads other data, and `again` reads an iterator twice. The models of the last two do not
belong to a strategy with servers.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
from losing import lose_between_pushes, lose_servers, stop_server

import lockstep
from lockstep.keras.parameter_server.dispatcher import Dispatcher
from lockstep.keras.parameter_server.server_shards import ServerShards
from lockstep.protocol.parameter_server import Push
from lockstep.transport.array_channel import QuestionArrival
from lockstep.worker import job

layers = keras.layers
KIND = sys.argv[1]
LOSE_AT = 9
generator = np.random.default_rng(0)
X = generator.normal(size=(240, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")
WORDS = generator.integers(0, 20, (120, 5))
TAGS = generator.integers(0, 3, (120, 5))


def strategy() -> Any:
    partitioner = lockstep.FixedShardsPartitioner(2)
    return lockstep.ParameterServerStrategy(
        None, partitioner, 0 if KIND in ("serial", "exact", "restarted") else None
    )


def dense(scope: Any, optimizer: Any, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    with scope:
        model = keras.Sequential(
            [
                layers.Input((6,)),
                Scaled(),
                layers.Dense(8, activation="relu", kernel_regularizer="l2"),
                layers.BatchNormalization(),
                *([layers.Dropout(0.2)] if KIND == "free" else []),
                layers.Dense(2),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def tagger(scope: Any) -> keras.Model:
    keras.utils.set_random_seed(4)
    with scope:
        words = layers.Input((5,), dtype="int32")
        features = layers.LSTM(4, return_sequences=True)(layers.Embedding(20, 4, mask_zero=True)(words))
        model = keras.Model(words, [layers.Dense(3)(features), layers.Dense(1)(features[:, 0])])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), [loss, "mse"])
    return model


def recommender(scope: Any) -> keras.Model:
    """Return a model that looks up rows of a table that is divided over two servers, twice in each step."""
    keras.utils.set_random_seed(5)
    with scope:
        words = layers.Input((5,), dtype="int32")
        table = layers.Embedding(30, 4)
        means = [layers.GlobalAveragePooling1D()(table(ids)) for ids in (words, (words + 1) % 20)]
        model = keras.Model(words, layers.Dense(1)(layers.Concatenate()(means)))
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def endless() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        for start in range(0, 200, 25):
            yield X[start : start + 25], Y[start : start + 25]


class Batches(keras.utils.PyDataset):
    """The examples in batches of 30, in another order in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = np.random.default_rng(np.random.randint(1000))
        self.on_epoch_end()

    def on_epoch_end(self) -> None:
        self._order = self._generator.permutation(len(X))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._order[30 * index : 30 * index + 30]
        return X[rows], Y[rows]


def loader() -> Any:
    """Return a loader with a generator of its own, whose items are random, and which drops the last ones."""
    import torch
    from torch.utils import data

    class Noisy(data.Dataset[Any]):
        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            noise = torch.rand(6) + float(np.random.rand())
            return torch.from_numpy(X[index]) + 0.1 * noise, Y[index]

    shuffled = torch.Generator().manual_seed(np.random.randint(1000))
    return data.DataLoader(Noisy(), batch_size=50, shuffle=True, drop_last=True, generator=shuffled)


class Scaled(layers.Layer):
    """Scales its inputs by a variable that no step changes."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, inputs: Any) -> Any:
        return inputs * self.scale


class Changes(keras.callbacks.Callback):
    """After the first epoch, halves a weight and changes the state of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1
        if epoch == 0:
            scaled, hidden, normalization, *_ = self.model.layers
            scaled.scale.assign(0.5)
            hidden.kernel.assign(hidden.kernel * 0.5)
            normalization.moving_mean.assign(normalization.moving_mean + 1.0)


class Halves(keras.callbacks.Callback):
    """At the end of the training, halves a table, also the rows that no batch has looked up."""

    def on_train_end(self, logs: Any = None) -> None:
        table = self.model.trainable_variables[0]
        table.assign(table * 0.5)


class Faster(keras.callbacks.Callback):
    """Changes the learning rate within an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.1 / (batch + 1)


class Raises(keras.callbacks.Callback):
    """Raises at the end of the first epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise ValueError("this callback raises")


class Lost(keras.callbacks.Callback):
    """Ends this process with SIGKILL within the second epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2 and len(self.model.history.epoch) == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class StopsOnceReplaced(keras.callbacks.Callback):
    """Stops the training some steps after a worker has completed its first one.

    Args:
        file: has the number of the last step; is written if it does not exist.
        worker: the id of the worker.
    """

    def __init__(self, file: Path, worker: int) -> None:
        super().__init__()
        self.file, self.step, self.last = file, 0, int(file.read_text()) if file.exists() else None
        process_done = Dispatcher._process_done

        def taken(dispatcher: Dispatcher, arrival: QuestionArrival) -> None:
            process_done(dispatcher, arrival)
            if arrival.worker == worker and self.last is None:
                self.last = self.step + 30
                file.write_text(str(self.last))

        Dispatcher._process_done = taken  # type: ignore[method-assign]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        self.model.stop_training = self.step == self.last


def show(name: str, model: keras.Model, history: Any) -> None:
    found = dict(history.history)
    found |= {"epochs": history.epoch, "drawn": float(np.random.rand()), "stops": bool(model.stop_training)}
    variables = [*model.variables, *model.optimizer.variables]
    values = [
        keras.ops.convert_to_numpy(variable.value) for variable in variables if "seed" not in variable.path
    ]
    found["norms"] = [float(np.linalg.norm(value.astype("float64"))) for value in values]
    print("result", json.dumps([name, found]), flush=True)


def serial(scope: Callable[[], Any]) -> None:
    callbacks = keras.callbacks
    model = dense(scope(), keras.optimizers.Adam(0.01))
    options = {"shuffle": False, "verbose": 0}
    weights = generator.uniform(0.1, 2, 240)
    history = model.fit(X, Y, 32, 2, validation_split=0.2, sample_weight=weights, **options)
    show("arrays", model, history)
    show("again", model, model.fit(X, Y, 32, class_weight={0: 1.0, 1: 3.0}, **options))
    model = dense(scope(), keras.optimizers.SGD(0.05))
    # Each shuffles, the second one from where the first one has left the generators.
    model.fit(X, Y, 32, 2, verbose=0)
    show("shuffled", model, model.fit(X, Y, 32, 2, verbose=0))
    model = dense(scope(), keras.optimizers.SGD(0.05, momentum=0.9))
    stops = callbacks.EarlyStopping("val_loss", min_delta=0.2, restore_best_weights=True)
    slower = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)
    changes = Changes()
    given = [stops, slower, changes]
    show(
        "callbacks",
        model,
        model.fit(X, Y, 40, 5, validation_data=(X[:50], Y[:50]), callbacks=given, **options),
    )
    print("callbacks", changes.epochs, stops.stopped_epoch, flush=True)
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.9)
    several = {} if keras.backend.backend() == "torch" else {"steps_per_execution": 3}
    model = dense(scope(), keras.optimizers.AdamW(rate), **several)
    # With several steps per execution, Keras takes nine of them in each epoch.
    show("generator", model, model.fit(endless(), steps_per_epoch=7, epochs=2, verbose=0))
    model = tagger(scope())
    show("outputs", model, model.fit(WORDS, [TAGS, TAGS.mean(1)], 25, 2, **options))


def exact(own: Any) -> None:
    optimizers = keras.optimizers
    scope = nullcontext if own is None else own.scope
    for optimizer in (optimizers.SGD(0.1, 0.9), optimizers.Adam(0.01), optimizers.AdamW(0.01)):
        keras.utils.set_random_seed(3)
        with scope():
            model = keras.Sequential(
                [layers.Input((6,)), layers.Dense(16, activation="relu"), layers.Dense(2, use_bias=False)]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss, metrics=["accuracy"])
        model.fit(X, Y, 20, 3, verbose=0)
        print("digest", lockstep.digest(model), flush=True)
    makers: list[Callable[[], Any]] = [Batches]
    if keras.backend.backend() == "torch":
        makers.append(loader)
    for make in makers:
        # On PyTorch, validations draw numbers, and those with servers draw others.
        keras.utils.set_random_seed(4)
        dataset, validation = (
            own.distribute_datasets_from_function(lambda context, make=make: make())
            if own is not None and own.has_servers
            else make()
            for _ in range(2)
        )
        validated = {"validation_data": validation} if make is Batches else {}
        # The second call begins where the first one has left the dataset.
        model.fit(dataset, epochs=2, shuffle=False, verbose=0, **validated)
        model.fit(x=dataset, shuffle=False, verbose=0)
        print("digest", lockstep.digest(model), flush=True)


def free() -> None:
    lose_between_pushes(LOSE_AT, 2)
    lose_servers(sys.argv[2:])
    scope = strategy().scope
    model = dense(scope(), keras.optimizers.Adam(0.01))
    show("first", model, model.fit(X, Y, 20, 2, verbose=0, validation_data=(X[:50], Y[:50])))
    show("second", model, model.fit(X, Y, 20, 2, verbose=0))
    print("evaluated", model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0).sum(), flush=True)
    model = recommender(scope())
    show("rows", model, model.fit(WORDS, TAGS.mean(1), 7, 2, verbose=0, callbacks=[Halves()]))
    print("digest", lockstep.digest(model), flush=True)


def replaced() -> None:
    lose_servers(sys.argv[3:])
    scope = strategy().scope
    first, second = dense(scope(), keras.optimizers.Adam(0.01)), recommender(scope())
    show("first", first, first.fit(X, Y, 20, 2, verbose=0, validation_data=(X[:50], Y[:50])))
    print("evaluated", first.evaluate(X, Y, verbose=0), flush=True)
    lose_between_pushes(LOSE_AT, 2, 6)
    stops = StopsOnceReplaced(Path(sys.argv[2]), 7)
    show("rows", second, second.fit(WORDS, TAGS.mean(1), 7, 10**6, verbose=0, callbacks=[stops]))
    show("again", second, second.fit(WORDS, TAGS.mean(1), 7, 2, verbose=0))
    show("last", first, first.fit(X, Y, 20, 2, verbose=0))
    print("digests", lockstep.digest(second), flush=True)
    print("digest", lockstep.digest(first), flush=True)


class EndsOnce(keras.callbacks.Callback):
    """Ends the process at the beginning of the third epoch, unless a file exists."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        file = Path(sys.argv[2]) / "ended"
        if epoch == 2 and not file.exists():
            file.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def restarted() -> None:
    model = dense(strategy().scope(), keras.optimizers.Adam(0.01))
    backup = keras.callbacks.BackupAndRestore(Path(sys.argv[2]) / "backup")
    history = model.fit(X, Y, 20, 4, verbose=0, shuffle=False, callbacks=[backup, EndsOnce()])
    print("losses", history.history["loss"][-2:], flush=True)
    print("digest", [float(np.sum(one)) for one in model.get_weights()], flush=True)


def lose_a_server() -> None:
    arrive = ServerShards.arrive

    def arrived(self: ServerShards, arrival: QuestionArrival) -> None:
        if isinstance(arrival.message, Push) and arrival.message.step >= LOSE_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        arrive(self, arrival)

    ServerShards.arrive = arrived  # type: ignore[method-assign]


match KIND:
    case "serial":
        serial(strategy().scope if job.is_worker() else nullcontext)
    case "exact":
        exact(strategy() if job.is_worker() else None)
    case "free":
        free()
    case "replaced":
        replaced()
    case "long":
        model = dense(strategy().scope(), "adam")
        shown = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("epoch", flush=True))
        model.fit(X, Y, 20, int(sys.argv[2]), verbose=0, callbacks=[shown])
        print("digest", lockstep.digest(model), flush=True)
    case "restarted":
        restarted()
    case "alone":
        models = [tagger(scope) for scope in (nullcontext(), strategy().scope())]
        for name, model in zip(("plain", "scoped"), models, strict=True):
            show(name, model, model.fit(WORDS, [TAGS, TAGS.mean(1)], 25, 2, shuffle=False, verbose=0))
    case "unscoped":
        dense(nullcontext(), "sgd").fit(X, Y, verbose=0)
    case "mirrored":
        with lockstep.MultiWorkerMirroredStrategy().scope():
            dense(nullcontext(), "sgd").fit(X, Y, verbose=0)
    case _:
        if KIND == "lost-server":
            lose_a_server()
        if KIND == "stopped-server":
            stop_server(*sys.argv[2:])
        model = dense(strategy().scope(), "adam")
        if KIND == "differing" and job.current().worker == 1:
            X += 1
        callbacks = {"raising": [Raises()], "lost-chief": [Lost()], "faster": [Faster()]}.get(KIND, [])
        if KIND in ("differing", "again"):
            batches = endless()
            for _ in range(2):
                model.fit(batches, steps_per_epoch=3, verbose=0)
        model.fit(X, Y, 20, 2, verbose=0, callbacks=callbacks)
