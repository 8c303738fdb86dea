"""A program like `program.py`, for options of Keras that are combined in small models.

`Trained.noted` has results of a training that are not in its model.
"""

import itertools
from typing import Any

import keras
import numpy as np
import program
from program import JAX, Context, Trained, images, layers, table


def words(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of five words, and one of three classes each."""
    tokens = np.random.default_rng(2).integers(0, 20, (count, 5), dtype="int32")
    return tokens, np.eye(3, dtype="float32")[tokens.sum(axis=1) % 3]


def flat(model: keras.Model) -> np.ndarray:
    """All weights."""
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


def apart(model: keras.Model) -> None:
    """Give every variable its own array.

    A `fit` with averaged weights leaves weights and averages in one array on JAX, where the next call that
    donates its arrays fails.
    """
    for variable in model.optimizer.variables:
        variable.assign(np.array(variable))


def activity() -> str | None:
    """A regularizer of outputs, where Keras divides it by their number; older ones add a sum, per replica."""
    layer = layers.Identity(activity_regularizer="l1")
    layer(np.ones((4, 1), "float32"))
    return "l2" if float(layer.losses[0]) < 0.02 else None


class Watch(keras.callbacks.Callback):
    """Notes the learning rate and the loss after each step and each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append([0, batch, logs["loss"], float(self.model.optimizer.learning_rate)])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append([1, epoch, logs["loss"], float(self.model.optimizer.learning_rate)])


def recurrent(context: Context) -> Trained:
    """Embedding and LSTM; averaged weights, which are validated; constraints; confusion matrices, F1."""
    x, y = words(60)
    with context.scope():
        model = keras.Sequential(
            [
                layers.Input((5,), dtype="int32"),
                layers.Embedding(20, 4),
                layers.LSTM(4, recurrent_initializer="glorot_uniform", kernel_constraint="max_norm"),
                layers.LayerNormalization(),
                layers.Dense(3, activation="softmax", kernel_constraint="non_neg"),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.SGD(
                0.5, momentum=0.9, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4
            ),
            loss=keras.losses.CategoricalFocalCrossentropy(),
            metrics=[
                keras.metrics.F1Score(),
                keras.metrics.OneHotMeanIoU(num_classes=3),
                keras.metrics.TopKCategoricalAccuracy(2),
            ],
        )
    model.fit(
        x,
        y,
        batch_size=20,
        epochs=3,
        validation_data=(x, y),
        validation_freq=2,
        validation_steps=2,
        verbose=0,
        callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    )
    apart(model)
    return Trained(model, x, y, 20)


class Spread(layers.Layer):
    """Adds the mean square of its inputs to the loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def shared(context: Context) -> Trained:
    """Lists of inputs and outputs; layers used twice, frozen ones, added losses; accumulated gradients."""
    x, y = table(60)
    normalization = layers.Normalization()
    normalization.adapt(x)
    with context.scope():
        encoder = keras.Sequential(
            [
                normalization,
                layers.Dense(4, activation="tanh", activity_regularizer=activity()),
                layers.Dense(4, trainable=False),
                layers.BatchNormalization(trainable=False),
                Spread(),
            ]
        )
        first, second = keras.Input((12,)), keras.Input((12,))
        left, right = encoder(first), encoder(second)
        twice = layers.Dense(4, activation="tanh")
        outputs = [
            layers.Dense(1, name="near")(layers.Subtract()([twice(left), twice(twice(right))])),
            layers.Dense(1, name="far")(layers.Multiply()([left, right])),
            layers.Identity(name="seen")(left),
        ]
        model = keras.Model([first, second], outputs)
        model.compile(
            optimizer=keras.optimizers.Adam(0.02, gradient_accumulation_steps=3, global_clipnorm=0.5),
            loss=["huber", "log_cosh", None],
            loss_weights=[1.0, 0.5, None],
            metrics=[[keras.metrics.R2Score(name="r2")], ["mae"], None],
            weighted_metrics=[["mse"], None, None],
        )
    inputs, targets = [x, x[::-1]], [y[:, None], 2 * y[:, None], y[:, None]]
    weights = [np.linspace(0.5, 1.5, len(x)), np.linspace(2, 1, len(x)), np.ones(len(x))]
    model.fit(
        inputs,
        targets,
        sample_weight=weights,
        batch_size=20,
        epochs=3,
        verbose=0,
    )
    return Trained(model, inputs, targets, 20, weights)


def alternating(context: Context) -> Trained:
    """Models that share a layer, trained in turns, fit after fit, compiled again; nothing left to train."""
    x, y = table(80)
    options: dict[str, Any] = {"batch_size": 20, "verbose": 0}
    with context.scope():
        inputs = keras.Input((12,))
        trunk = layers.Dense(4, activation="tanh")
        one = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(trunk(inputs)))
        one.compile("adam", "binary_crossentropy", metrics=["accuracy"])
        two = keras.Model(inputs, layers.Dense(1)(trunk(inputs)))
        two.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        empty = keras.Sequential([inputs, layers.Rescaling(0.5), layers.Lambda(lambda v: v[:, 0])])
        empty.compile("sgd", "mse")
    for _ in range(2):
        one.fit(x, y, **options)
        two.fit(x, x[:, 1], **options)
    noted = {"two": flat(two)}
    one.fit(x, y, initial_epoch=3, epochs=5, **options)
    noted["epochs"] = np.array(one.history.epoch)
    one.optimizer.learning_rate = 0.02
    one.fit(x, y, **options)
    for part in (trunk, one):
        part.trainable = False
        with context.scope():
            one.compile(keras.optimizers.RMSprop(0.01), "mse", metrics=["mae"])
        one.fit(x, y, validation_split=0.25, **options)
        noted[f"without {part.name}"] = flat(one)
    one.trainable = True
    with context.scope():
        one.compile("adam", "mse", metrics=["mae"])
    one.fit(x, y, **options)
    noted["empty"] = empty.fit(x, y, **options).history["loss"]
    return Trained(one, x, y, 20, noted=noted)


def stopping(context: Context) -> Trained:
    """Callbacks that stop; not-a-number in the second epoch; epochs of some steps; a file of figures."""
    x, y = table(120)
    broken = y.copy()
    broken[-1] = np.nan
    noted: dict[str, Any] = {}
    with context.scope():
        model = keras.Sequential([layers.Input((12,)), layers.Dense(4, activation="relu"), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    start = model.get_weights()
    watch, nan = Watch(), keras.callbacks.TerminateOnNaN()
    options: dict[str, Any] = {"batch_size": 20, "steps_per_epoch": 4, "shuffle": False, "verbose": 0}
    model.fit(x, broken, epochs=5, **options, callbacks=[watch, nan])
    noted |= {"steps to nan": watch.seen, "weights of nan": flat(model)}
    model.set_weights(start)
    watch = Watch()
    callbacks = [
        watch,
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, factor=0.5, min_delta=0.02, cooldown=1),
        keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=0.01, restore_best_weights=True),
    ]
    if context.folder:
        callbacks.append(keras.callbacks.CSVLogger(context.folder / "log.csv"))
    model.fit(x, y, batch_size=20, epochs=20, shuffle=False, verbose=0, callbacks=callbacks)
    noted |= {"steps": watch.seen, "stopped": callbacks[2].stopped_epoch}
    if context.folder:
        noted["log"] = np.genfromtxt(context.folder / "log.csv", delimiter=",", skip_header=1)
    return Trained(model, x, y, 20, noted=noted)


def batchwise(context: Context) -> Trained:
    """`train_on_batch` and its like with batches of every size; weights of examples and of classes."""
    x, y = table(70)
    weight = np.linspace(0.2, 2, 70).astype("float32")
    with context.scope():
        model = keras.Sequential([layers.Input((12,)), layers.Dense(4, activation="relu"), layers.Dense(1)])
        model.compile(
            optimizer=keras.optimizers.Nadam(0.01),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=["mae"],
            weighted_metrics=["mse"],
        )
    figures: list[Any] = []
    rows: list[Any] = []
    bounds = [0, 6, 7, 15, 23]
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        given = x[start:stop], y[start:stop]
        if i % 2:
            figures.append(model.train_on_batch(*given, sample_weight=weight[start:stop]))
        else:
            logs = model.train_on_batch(*given, class_weight={0: 0.5, 1: 1.5}, return_dict=True)
            figures.append([logs[name] for name in sorted(logs)])
        figures.append(model.test_on_batch(*given, sample_weight=weight[start:stop]))
        rows.append(model.predict_on_batch(given[0]))
        if i == 2:
            model.reset_metrics()
    figures.append(model.evaluate(x, y, batch_size=8, sample_weight=weight, verbose=0))
    figures.append(model.evaluate(x, y, batch_size=8, steps=3, verbose=0))
    rows += [model.predict(x, batch_size=8, verbose=0), model.predict(x, batch_size=8, steps=2, verbose=0)]
    model.fit(x, y, sample_weight=weight, batch_size=8, verbose=0)
    noted = {"figures": np.concatenate([np.ravel(one) for one in figures]), "rows": np.concatenate(rows)}
    return Trained(model, x, y, 8, weight, noted)


class Overridden(keras.Model):
    """Has a custom loss, custom metrics and a custom test step."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.spread, self.out = layers.Dense(4, activation="tanh"), Spread(), layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="tracked")

    def call(self, inputs: Any) -> Any:
        return self.out(self.spread(self.hidden(inputs)))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        error = keras.ops.mean(keras.ops.abs(y_pred[:, 0] - y))
        self.tracker.update_state(error, sample_weight=keras.ops.shape(x)[0])
        return error + 0.01 * keras.ops.mean(keras.ops.square(x)) + sum(self.losses)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "constant": 3.0}

    def test_step(self, *arguments: Any) -> Any:
        # (state, data) on JAX, which returns (logs, state); elsewhere (data,).
        largest = {"target": keras.ops.mean(arguments[-1][1])}
        result = super().test_step(*arguments)
        return ({**result[0], **largest}, result[1]) if JAX else {**result, **largest}

    def predict_step(self, *arguments: Any) -> Any:
        result = super().predict_step(*arguments)
        return (2 * result[0], result[1]) if JAX else 2 * result


def overridden(context: Context) -> Trained:
    """Custom steps and losses; another model whose only losses are added ones."""
    x, y = table(90)
    with context.scope():
        inputs = keras.Input((12,))
        decoded = layers.Dense(12, activity_regularizer=activity())(Spread()(layers.Dense(4)(inputs)))
        added = keras.Model(inputs, decoded)
        added.compile("sgd")
        model = Overridden()
        model.compile(keras.optimizers.Adagrad(0.05), metrics=["mse"])
    added.fit(x, batch_size=20, epochs=2, verbose=0)
    validation = (x[:30], y[:30])
    model.fit(x, y, batch_size=20, epochs=2, validation_data=validation, verbose=0)
    return Trained(model, x, y, 20, noted={"added": flat(added), "loss": added.history.history["loss"]})


def noisy(context: Context) -> Trained:
    """Layers that draw random numbers; nothing that one process could reproduce."""
    x, y = images(40)
    with context.scope():
        inputs = keras.Input((8, 8, 1))
        hidden = layers.RandomContrast(0.3)(layers.RandomFlip()(inputs))
        hidden = layers.GaussianNoise(0.1)(layers.Reshape((8, 8))(hidden))
        hidden = layers.MultiHeadAttention(2, 4, dropout=0.2)(hidden, hidden)
        hidden = layers.GRU(4, dropout=0.2, recurrent_dropout=0.2)(layers.SpatialDropout1D(0.2)(hidden))
        model = keras.Model(inputs, layers.Dense(4)(layers.AlphaDropout(0.1)(hidden)))
        model.compile(
            optimizer=keras.optimizers.Lion(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    model.fit(x, y, batch_size=20, epochs=2, verbose=0)
    return Trained(model, x, y, 20)


def optimizers(context: Context) -> Trained:
    """Keras's other optimizers."""
    x, y = table(40)
    noted = {}
    kinds = [
        *(keras.optimizers.Adadelta, keras.optimizers.Adafactor, keras.optimizers.Adamax),
        *(keras.optimizers.Ftrl, keras.optimizers.Lamb, keras.optimizers.Lion),
        *(keras.optimizers.Nadam, keras.optimizers.Muon, keras.optimizers.Adam),
    ]
    for kind in kinds:
        keras.utils.set_random_seed(3)
        with context.scope():
            model = keras.Sequential(
                [layers.Input((12,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
            )
            options = {"amsgrad": True} if kind is keras.optimizers.Adam else {}
            model.compile(kind(0.01, clipvalue=0.5, weight_decay=0.01, **options), "mse")
        model.fit(x, y, batch_size=15, epochs=2, verbose=0)
        noted[kind.__name__] = flat(model)
    return Trained(model, x, y, 15, noted=noted)


OPTIONS = [
    recurrent,
    shared,
    alternating,
    stopping,
    batchwise,
    overridden,
    noisy,
    optimizers,
]


if __name__ == "__main__":
    program.main(OPTIONS)
