"""Trains tables whose rows are on parameter servers only; prints exact results and rounded ones.

    rows_on_servers.py serial | saved FOLDER | free [SERVER CALL KIND NUMBER WHEN] |
        (lost | lost-for-good) FOLDER [SERVER CALL KIND NUMBER WHEN | SERVER between] [+ ...] |
        misused | function

`serial` lets one step be in work at a time; without Lockstep, it prints what plain Keras computes. `saved`
trains on after saving, and again after loading, also by `BackupAndRestore`. In `free`, a worker ends between
its pushes to two servers, and a server at the given point (see `losing.py`), unless they follow a
recorded order. `lost` lets one step be in work at a time, and servers end at the given points, or between the
calls of `fit`; in `lost-for-good` tables have no standbys. `misused` and `function` print errors.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
from losing import lose_between_pushes, lose_servers

import lockstep
from lockstep.errors import LockstepError
from lockstep.keras.parameter_server import server_embedding
from lockstep.keras.parameter_server.server_tables import ServerTables
from lockstep.keras.parameter_server.table_rows import TableRows
from lockstep.worker import job

layers = keras.layers
KIND = sys.argv[1]
USERS, WORDS = 101, 20
generator = np.random.default_rng(0)
X = {
    "user": generator.integers(-USERS, USERS, (120,)).astype("int32"),
    "words": generator.integers(0, WORDS, (120, 3)).astype("int32"),
}
Y = (X["user"] % 2 + X["words"][:, 0] / WORDS).astype("float32")[:, None]
# Tables of several blocks.
server_embedding._BLOCK = 32  # type: ignore[misc]


def build(optimizer: Any, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    bound = None if KIND == "free" else 0
    strategy = lockstep.ParameterServerStrategy(max_staleness=bound) if job.is_worker() else None
    with nullcontext() if strategy is None else strategy.scope():
        user, words = (
            layers.Input((), dtype="int32", name="user"),
            # Keras casts such ids.
            layers.Input((3,), dtype="float32", name="words"),
        )
        kept = KIND != "lost-for-good"
        of_words = lockstep.ServerEmbedding(WORDS, 2, "ones", True, standbys=kept, name="of_words")
        of_users = lockstep.ServerEmbedding(USERS, 4, **{"standbys": kept, "name": "of_users", **options})
        parts = [of_users(user), layers.GlobalAveragePooling1D()(of_words(words)), of_users(user // 2)]
        model = keras.Model({"user": user, "words": words}, layers.Dense(1)(layers.Concatenate()(parts)))
        model.compile(optimizer, "mse")
    return model


def fit(model: keras.Model, epochs: int = 1, **options: Any) -> list[float]:
    history = model.fit(X, Y, 20, epochs, verbose=0, shuffle=False, **options).history
    return [float(loss) for loss in history["loss"]]


def show(name: str, value: Any) -> None:
    print("result", json.dumps([name, value]), flush=True)


def serial() -> None:
    model = build(keras.optimizers.SGD(0.1))
    show("before", model.evaluate(X, Y, 30, verbose=0))
    show("losses", fit(model, 2))
    options = {"validation_data": (X, Y), "validation_batch_size": 30}
    show("validated", [fit(model, 2, **options), model.history.history["val_loss"]])
    show("after", [model.evaluate(X, Y, 30, verbose=0), model.predict(X, 50, verbose=0).tolist()])


def slow_to_load() -> threading.Event:
    """Let servers load rows once another process has read some since the event was cleared."""
    asked, write, put = threading.Event(), TableRows.write, ServerTables._put
    asked.set()

    def written(self: Any, *arguments: Any) -> None:
        assert asked.wait(60)
        write(self, *arguments)

    def noted(self: Any, message: Any) -> None:
        asked.set()
        put(self, message)

    TableRows.write = written  # type: ignore[method-assign, assignment]
    ServerTables._put = noted  # type: ignore[method-assign, assignment]
    return asked


def saved(folder: str) -> None:
    asked = slow_to_load()
    model = build(keras.optimizers.Adam(0.05))
    fit(model)
    model.save(f"{folder}/model.keras")
    model.save_weights(f"{folder}/model.weights.h5")
    show("evaluated", model.evaluate(X, Y, 30, verbose=0))
    show("predicted", model.predict(X, 50, verbose=0).tolist())
    show("further", [fit(model), lockstep.digest(model)])
    asked.clear()
    model.load_weights(f"{folder}/model.weights.h5")
    show("called", keras.ops.convert_to_numpy(model(X)).tolist())
    show("loaded", [fit(model), lockstep.digest(model)])
    keras.utils.set_random_seed(3)
    with lockstep.ParameterServerStrategy(max_staleness=0).scope():
        model = keras.models.load_model(f"{folder}/model.keras")
    show("evaluated again", model.evaluate(X, Y, 30, verbose=0))
    show("another", fit(model))
    straight = fit(build(keras.optimizers.Adam(0.05)), 4)
    backup = keras.callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=False)
    fit(build(keras.optimizers.Adam(0.05)), 2, callbacks=[backup])
    resumed = build(keras.optimizers.Adam(0.05))
    show("resumed", [straight[2:], fit(resumed, 4, callbacks=[backup])])
    print("digest", lockstep.digest(resumed), flush=True)


class Reads(keras.callbacks.Callback):
    """Reads rows at the end of epochs."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        outputs = self.model({name: array[:9] for name, array in X.items()})
        logs["read"] = float(np.sum(keras.ops.convert_to_numpy(outputs)))


def free() -> None:
    lose_between_pushes(9, 2)
    lose_servers(sys.argv[2:])
    model = build(keras.optimizers.Adam(0.05))
    fit(model, 4, callbacks=[Reads()], validation_data=(X, Y))
    show("losses", model.history.history)
    show("evaluated", model.evaluate(X, Y, 30, verbose=0))
    fit(model, 2)
    print("digest", lockstep.digest(model), flush=True)


class SavesAndLoads(keras.callbacks.Callback):
    """Saves weights at the beginning of the second epoch, and loads them at that of the third one."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.save_weights(self.file)
        if epoch == 2:
            self.model.load_weights(self.file)


def lost(folder: str, *point: str) -> None:
    file = f"{folder}/model.weights.h5"
    points = [one.split() for one in " ".join(point).split("+")]
    for one in points:
        lose_servers([] if "between" in one else one)
    optimizers = keras.optimizers.Adam(0.05), keras.optimizers.SGD(0.05, 0.9)
    model = build(optimizers[0])
    fit(model, 2, callbacks=[Reads()], validation_data=(X, Y))
    show("first", model.history.history)
    show("evaluated", [model.evaluate(X, Y, 30, verbose=0), model.predict(X, 50, verbose=0).tolist()])
    model.save_weights(file)
    here = job.current()
    for server in (one[0] for one in points if "between" in one):
        if here.context.has_servers and here.worker == here.context.tasks.id_of_server(int(server)):
            os.kill(os.getpid(), signal.SIGKILL)
    with lockstep.ParameterServerStrategy(max_staleness=0).scope():
        model.compile(optimizers[1], "mse")
    fit(model, 3, callbacks=[Reads(), SavesAndLoads(f"{folder}/within.weights.h5")])
    show("second", model.history.history)
    model.load_weights(file)
    show("loaded", model.evaluate(X, Y, 30, verbose=0))
    for optimizer in optimizers:
        with lockstep.ParameterServerStrategy(max_staleness=0).scope():
            model.compile(optimizer, "mse")
        show("further", fit(model))
    print("digest", lockstep.digest(model), flush=True)


def misused() -> None:
    import jax

    def attempt(act: Callable[[], Any]) -> None:
        try:
            act()
        except LockstepError as error:
            print("error", type(error).__name__, " ".join(str(error).split()), flush=True)

    model = build("adam")
    attempt(lambda: model({name: array[:2] for name, array in X.items()}))
    attempt(lambda: model.get_layer("of_users").embeddings)
    attempt(model.get_weights)
    attempt(lambda: build("nadam").fit(X, Y, verbose=0))
    attempt(lambda: build("adam", trainable=False).fit(X, Y, verbose=0))
    other = build("adam")
    other.evaluate(X, Y, verbose=0)
    trained, rest = (
        [one.value for one in group] for group in (other.trainable_variables, other.non_trainable_variables)
    )
    attempt(lambda: jax.grad(lambda weights: other.stateless_call(weights, rest, X)[0].sum())(trained))
    attempt(lambda: model.evaluate({**X, "user": np.full(120, USERS)}, Y, verbose=0))
    attempt(lambda: build("adam", standbys=False).evaluate(X, Y, verbose=0))

    def stored(rows: int) -> dict[str, Any]:
        blocks = range(-(-rows // 32))
        return {f"rows-{block}": np.zeros((min(32, rows - 32 * block), 4)) for block in blocks}

    # As many blocks as the layer has.
    attempt(lambda: model.get_layer("of_users").load_own_variables(stored(USERS + 1)))
    if lockstep.is_chief():
        model.get_layer("of_users").load_own_variables(stored(USERS))
    attempt(lambda: model.predict(X, verbose=0))
    if lockstep.is_chief():
        build("adam")
    attempt(lambda: build("adam").predict(X, verbose=0))


def function() -> None:
    model = build("sgd")
    coordinator = lockstep.ClusterCoordinator(lockstep.ParameterServerStrategy())
    for uses in (lambda: model(X), lambda: [variable.value for variable in model.trainable_variables]):
        try:
            coordinator.schedule(uses)
            coordinator.join()
        except LockstepError as error:
            print("error", type(error).__name__, " ".join(str(error).split()), flush=True)


match KIND:
    case "serial":
        serial()
    case "saved":
        saved(sys.argv[2])
    case "free":
        free()
    case "lost" | "lost-for-good":
        lost(*sys.argv[2:])
    case "misused":
        misused()
    case "function":
        function()
