"""A program like a user's: trains what its arguments name, and prints the exact results.

    program.py [--plain | --both] [--exact] [--save FOLDER] NAME...

--plain trains without Lockstep, --both first without and then with it. --exact leaves out what is random or
computed per replica (Dropout, BatchNormalization), and ReLU, whose derivative has a jump: replicas and plain
Keras must agree.
--save writes weights, figures and predictions to FOLDER/NAME-<process id>.npz, and with --both those of plain
Keras to FOLDER/plain-NAME-<process id>.npz.
"""

import argparse
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

import lockstep

layers = keras.layers
JAX = keras.backend.backend() == "jax"


@dataclass
class Trained:
    model: keras.Model
    x: Any
    y: Any
    batch_size: int = 50
    weight: Any = None
    noted: dict[str, Any] = field(default_factory=dict)
    """Further values and arrays that must be equal."""


@dataclass
class Context:
    scope: Callable[[], contextlib.AbstractContextManager[None]]
    exact: bool
    folder: Path | None = None

    def random(self, *some: keras.Layer) -> list[keras.Layer]:
        """Return the layers, unless replicas and plain Keras must agree."""
        return [] if self.exact else list(some)

    @property
    def activation(self) -> str:
        """ReLU; if replicas and plain Keras must agree, one whose derivative has no jump.

        Where the argument of ReLU is nearly 0, its sign, and so the gradient, depend on rounding. If one of
        the 194 thousand signs in `cnn` differs, the weights differ by 2e-5, relative, instead of 6e-8.
        """
        return "tanh" if self.exact else "relu"


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(count, 8, 8, 1)).astype("float32"), generator.integers(0, 4, count)


def table(count: int = 330) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    x = generator.normal(size=(count, 12)).astype("float32")
    return x, (x[:, 0] + 0.3 * generator.normal(size=count) > 0).astype("float32")


def cnn(context: Context) -> Trained:
    """Conv2D, BatchNormalization, Dropout, L2 and clipped Adam; an uneven last batch; validation data."""
    with context.scope():
        model = keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Conv2D(6, 3, activation=context.activation, kernel_regularizer="l2"),
                *context.random(layers.BatchNormalization(), layers.Dropout(0.25)),
                layers.Flatten(),
                layers.Dense(
                    16, activation=context.activation, kernel_regularizer=keras.regularizers.L2(1e-3)
                ),
                *context.random(layers.Dropout(0.25)),
                layers.Dense(4),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(3e-3, clipnorm=1.0),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    # The shares of all batches have 12 or 13 rows, because a backend compiles for each number.
    x, y = images(299)
    model.fit(x, y, batch_size=50, epochs=3, validation_data=images(99), verbose=2)
    return Trained(model, x, y)


def weighted(context: Context) -> Trained:
    """Sample weights, metrics with vector state, a learning-rate schedule, global clipping, weight decay."""
    x, y = table()
    weight = np.linspace(0.1, 2, len(x)).astype("float32")
    with context.scope():
        model = keras.Sequential([layers.Dense(16, activation="tanh"), layers.Dense(1, activation="sigmoid")])
        schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.8)
        model.compile(
            optimizer=keras.optimizers.AdamW(schedule, weight_decay=1e-3, global_clipnorm=0.5),
            loss="binary_crossentropy",
            metrics=[keras.metrics.AUC(num_thresholds=20), "mae"],
            weighted_metrics=["accuracy", keras.metrics.Precision(), keras.metrics.Recall()],
        )
    model.fit(
        x,
        y,
        batch_size=32,
        epochs=3,
        sample_weight=weight,
        shuffle="batch",
        verbose=2,
    )
    return Trained(model, x, y, 32, weight)


def callbacks(context: Context) -> Trained:
    """Class weights, a validation split, callbacks that decide from logs and change the model."""
    x, y = table()
    seen: list[str] = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(f"{batch} {sorted(logs.items())}")

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(f"test {batch} {sorted(logs.items())}")

    with context.scope():
        model = keras.Sequential(
            [layers.Input((12,)), layers.Dense(8, activation=context.activation), layers.Dense(1)]
        )
        model.compile(
            optimizer=keras.optimizers.SGD(0.2, momentum=0.9, nesterov=True),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=["binary_accuracy"],
        )
    model.fit(
        x,
        y,
        batch_size=40,
        epochs=12,
        validation_split=0.2,
        class_weight={0: 0.4, 1: 1.7},
        verbose=2,
        callbacks=[
            Notes(),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5),
            keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
        ],
    )
    if not context.exact:
        print("logs", hashlib.sha256("\n".join(seen).encode()).hexdigest())
    return Trained(model, x, y, 40)


def mixed(context: Context) -> Trained:
    """Mixed precision with a dynamic loss scale; unless exact, it overflows at first."""
    x, y = images(110)
    with context.scope():
        policy = keras.DTypePolicy("mixed_float16")
        model = keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Conv2D(4, 3, activation="relu", dtype=policy),
                layers.Flatten(dtype=policy),
                layers.Dense(4, dtype="float32"),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(1e-3),
                initial_scale=2.0 ** (4 if context.exact else 30),
                dynamic_growth_steps=4,
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            # Not the accuracy: at nearly equal outputs it depends on the rounding of half precision.
            metrics=[keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
        )
    model.fit(x, y, batch_size=25, epochs=5, verbose=2)
    return Trained(model, x, y, 25)


def uncompiled(context: Context, **options: Any) -> Trained:
    """`jit_compile=False`: the same functions, not compiled."""
    x, y = table(64)
    with context.scope():
        model = keras.Sequential(
            [
                layers.Input((12,)),
                layers.Dense(8, activation=context.activation),
                *context.random(layers.BatchNormalization(), layers.Dropout(0.5)),
                layers.Dense(1),
            ]
        )
        model.compile(optimizer="adam", loss="mse", metrics=["mae"], **(options or {"jit_compile": False}))
    model.fit(x, y, batch_size=24, epochs=2, verbose=2)
    return Trained(model, x, y, 24)


def eager(context: Context) -> Trained:
    """`run_eagerly=True`."""
    return uncompiled(context, run_eagerly=True)


def several(context: Context) -> Trained:
    """`steps_per_execution` that does not divide the number of steps."""
    return uncompiled(context, steps_per_execution=2)


class Batches(keras.utils.PyDataset):
    def __init__(self, x: np.ndarray, y: np.ndarray, **options: Any) -> None:
        super().__init__(**options)
        self.x, self.y = x, y

    def __len__(self) -> int:
        return -(-len(self.x) // 30)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * 30, (index + 1) * 30)
        return self.x[rows], self.y[rows]


def dataset(context: Context) -> Trained:
    """A `PyDataset`, read by threads, for training and validation; and the backend's own kind of dataset."""
    x, y = table(200)
    with context.scope():
        model = keras.Sequential([layers.Dense(8, activation=context.activation), layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")
    # With readers in threads, Keras visits the first epoch's batches of an unbuilt model in another order.
    data = Batches(x, y, workers=1 if context.exact else 2, max_queue_size=3)
    model.fit(data, epochs=2, validation_data=Batches(x[:70], y[:70]), verbose=2)
    model.fit(Batches(x, y), epochs=2, steps_per_epoch=4, verbose=2)
    for shuffled in own_dataset(x, y):
        model.fit(shuffled, epochs=2, verbose=2)
    return Trained(model, x, y, 30)


def own_dataset(x: np.ndarray, y: np.ndarray) -> list[Any]:
    """The backend's own kind of dataset, shuffled without a seed; None on JAX."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return [tf.data.Dataset.from_tensor_slices((x, y)).shuffle(200).batch(30)]
    if keras.backend.backend() == "torch":
        from torch.utils.data import DataLoader, TensorDataset

        rows = TensorDataset(*map(keras.ops.convert_to_tensor, (x, y)))
        return [DataLoader(rows, batch_size=30, shuffle=True)]
    return []


def nested(context: Context) -> Trained:
    """A dictionary of inputs; two outputs, each with a loss and metrics."""
    x, y = table(150)
    with context.scope():
        left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
        hidden = layers.Dense(8, activation="tanh")(layers.Concatenate()([left, right]))
        outputs = {
            "first": layers.Dense(1, name="first")(hidden),
            "second": layers.Dense(3, name="second")(hidden),
        }
        model = keras.Model({"left": left, "right": right}, outputs)
        model.compile(
            optimizer="rmsprop",
            loss={"first": "mse", "second": "mae"},
            loss_weights={"first": 1.0, "second": 0.3},
            metrics={"first": ["mae"], "second": [keras.metrics.RootMeanSquaredError()]},
        )
    inputs = {"left": x[:, :6], "right": x[:, 6:]}
    targets = {"first": y, "second": np.stack([y, -y, 2 * y], axis=1)}
    model.fit(inputs, targets, batch_size=20, epochs=2, verbose=2)
    return Trained(model, inputs, targets, 20)


def tiny(context: Context) -> Trained:
    """Batches with fewer examples than replicas: some replicas never have any."""
    x, y = table(17)
    with context.scope():
        model = keras.Sequential(
            [
                layers.Input((12,)),
                layers.Dense(4, activation=context.activation),
                *context.random(layers.BatchNormalization(), layers.Dropout(0.5)),
                layers.Dense(1),
            ]
        )
        model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    model.fit(x, y, batch_size=3, epochs=3, verbose=2)
    for _ in range(2):
        model.train_on_batch(x[:2], y[:2])
    return Trained(model, x, y, 2)


def custom(context: Context) -> Trained:
    """A subclass with a custom `train_step` that reports a value that is no metric."""
    # The shares of all batches have 4 or 5 rows; see `cnn`.
    x, y = table(98)

    class Custom(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def train_step(self, *arguments: Any) -> Any:
            # (state, data) on JAX, which returns (logs, state); elsewhere (data,).
            doubled = {"doubled": 2 * keras.ops.mean(arguments[-1][1])}
            result = super().train_step(*arguments)
            return ({**result[0], **doubled}, result[1]) if JAX else {**result, **doubled}

    with context.scope():
        model = Custom()
        model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    model.fit(x, y, batch_size=20, epochs=2, verbose=2)
    return Trained(model, x, y, 20)


def summed(context: Context) -> Trained:
    """A loss that is a sum over the examples, with a regularizer; an uneven last batch."""
    x, y = table(90)
    with context.scope():
        model = keras.Sequential(
            [layers.Input((12,)), layers.Dense(4, kernel_regularizer="l2"), layers.Dense(1)]
        )
        model.compile(
            optimizer=keras.optimizers.SGD(1e-3), loss=keras.losses.MeanSquaredError(reduction="sum")
        )
    model.fit(x, y, batch_size=20, epochs=3, verbose=2)
    return Trained(model, x, y, 20)


TRAININGS = [
    cnn,
    weighted,
    callbacks,
    mixed,
    uncompiled,
    eager,
    several,
    dataset,
    nested,
    tiny,
    custom,
    summed,
]


def main(trainings: Sequence[Callable[[Context], Trained]] = TRAININGS) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    known = {training.__name__: training for training in trainings}
    if arguments.both:
        # Lockstep replaces methods of Keras when a strategy is created.
        plain = Context(contextlib.nullcontext, arguments.exact, arguments.save)
        for name in arguments.names or known:
            train(known[name], plain, "plain-")
    scope = contextlib.nullcontext if arguments.plain else lockstep.MultiWorkerMirroredStrategy().scope
    for name in arguments.names or known:
        train(known[name], Context(scope, arguments.exact, arguments.save))


def train(training: Callable[[Context], Trained], context: Context, kind: str = "") -> None:
    # Keras numbers generated names from the start.
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    report(training.__name__, training(context), context.folder, kind)


def report(name: str, trained: Trained, folder: Path | None, kind: str) -> None:
    model = trained.model
    figures = model.evaluate(
        trained.x,
        trained.y,
        batch_size=trained.batch_size,
        sample_weight=trained.weight,
        verbose=0,
        return_dict=True,
    )
    rows = keras.tree.flatten(model.predict(trained.x, batch_size=trained.batch_size, verbose=0))
    noted = {key: np.asarray(value) for key, value in trained.noted.items()}
    evaluated = " ".join(f"{key}={hexadecimal(value)}" for key, value in sorted(figures.items()))
    predicted, further = hashed(rows), hashed(noted.values())
    print(f"{kind}result {name} {lockstep.digest(model)} {predicted} {further} {evaluated}")
    if folder:
        history = {f"history {key}": np.asarray(value) for key, value in model.history.history.items()}
        weights = np.concatenate([np.ravel(np.asarray(value)) for value in model.get_weights()])
        np.savez(
            folder / f"{kind}{name}-{os.getpid()}.npz",
            weights=weights,
            figures=np.concatenate([np.ravel(figures[key]) for key in sorted(figures)]),
            rows=np.concatenate([np.ravel(leaf) for leaf in rows]),
            **history,
            **{f"noted {key}": value for key, value in noted.items()},
        )


def hexadecimal(value: Any) -> str:
    return ",".join(float(one).hex() for one in np.ravel(value))


def hashed(arrays: Iterable[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()


if __name__ == "__main__":
    main()
