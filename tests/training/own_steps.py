"""Steps, logs and calls of programs for plain Keras. Nothing in them is random.

    own_steps.py [--both | --adopted] [NAME...]

Prints a digest of the results of each training, by default of all, and the numbers; with --both, those of
plain Keras first. With --adopted there is no strategy.
"""

import argparse
import contextlib
from collections import deque
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job

layers, ops = keras.layers, keras.ops
BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(37, 6)).astype("float32")
Y = X[:, :1]
WEIGHT = np.linspace(0.1, 3, 37).astype("float32")


def small(optimizer: Any = "sgd", loss: Any = "mse") -> keras.Model:
    model = keras.Sequential([layers.Input((6,)), layers.Dense(4, activation="tanh"), layers.Dense(1)])
    model.compile(optimizer, loss)
    return model


class Nested(keras.Model):
    """Logs nested dictionaries, a metric under another name, and a metric of single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.told = keras.metrics.Mean(name="told")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, *arguments: Any) -> Any:
        y = arguments[-1][1]
        if BACKEND == "jax":
            logs, state = super().train_step(*arguments)
            return {"loss": logs["loss"], "within": {"far": logs["mae"], "own": ops.mean(y)}}, state
        logs = super().train_step(*arguments)
        self.told.update_state(ops.mean(y))
        far = {"far": logs["mae"], "own": ops.mean(y), "said": self.told.result()}
        return {"loss": logs["loss"], "within": far, "nothing": None}


def nested() -> tuple[keras.Model, list[float]]:
    """See `Nested`."""
    model = Nested()
    model.compile("adam", "mse", metrics=["mae"])
    return model, figures(model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0))


def unweighted() -> tuple[keras.Model, list[float]]:
    """Calls without sample weights after calls with them, for a loss that is a mean with weights."""
    model = small(loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    found = []
    for weight in (WEIGHT, None):
        history = model.fit(X, Y, batch_size=8, sample_weight=weight, shuffle=False, verbose=0)
        found += [*figures(history), model.evaluate(X, Y, sample_weight=weight, verbose=0)]
        part = None if weight is None else weight[:5]
        found += [model.train_on_batch(X[:5], Y[:5], part), model.test_on_batch(X[:5], Y[:5], part)]
    return model, [float(one) for one in found]


def averaged() -> tuple[keras.Model, list[float]]:
    """Averages of weights replace the weights in `evaluate`; on JAX, memory that they share is lost there."""
    model = small(keras.optimizers.Adam(use_ema=True))
    swap = [keras.callbacks.SwapEMAWeights()]
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, callbacks=swap, verbose=0)
    model.evaluate(X, Y, callbacks=swap, verbose=0)
    # Keras decides what the averages skip: the logged values differ, and the calls succeed.
    return small(), [float(model.predict(X, verbose=0).shape[0])]


class Parts(keras.Model):
    """Has no `call`, and parts whose variables its first step creates; a slow copy follows one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(5, activation="relu"), layers.Dense(3)])
        self.decoder = layers.Dense(6)
        self.slow = layers.Dense(6)
        self.tracker = keras.metrics.Mean(name="total")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            code = self.encoder(data, training=True)
            loss = ops.mean(ops.square(self.decoder(code) - data))
        own = [*self.encoder.trainable_weights, *self.decoder.trainable_weights]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
        self.slow(code)
        self.slow.kernel.assign(0.9 * self.slow.kernel + 0.1 * self.decoder.kernel)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def parts(eager: bool = False) -> tuple[keras.Model, list[float]]:
    """See `Parts`."""
    model = Parts()
    model.compile(keras.optimizers.Adam(1e-2), run_eagerly=eager)
    return model, figures(model.fit(X, batch_size=8, epochs=2, shuffle=False, verbose=0))


def eager_parts() -> tuple[keras.Model, list[float]]:
    """The same, step by step."""
    return parts(eager=True)


class Triplet(keras.Model):
    """Takes three inputs that are not `(x, y, sample_weight)`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers.Dense(4, activation="tanh")
        self.tracker = keras.metrics.Mean(name="loss")

    def distance(self, data: Any) -> Any:
        anchor, positive, negative = (self.net(part) for part in data)
        near, far = (ops.sum(ops.square(anchor - other), -1) for other in (positive, negative))
        return ops.mean(ops.maximum(near - far + 0.5, 0))

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.distance(data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.tracker.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> Any:
        self.tracker.update_state(self.distance(data))
        return {"loss": self.tracker.result()}


def triplet() -> tuple[keras.Model, list[float]]:
    """See `Triplet`."""
    import tensorflow as tf

    model = Triplet()
    model.compile("adam")
    dataset = tf.data.Dataset.from_tensor_slices((X, X[::-1].copy(), 2 * X)).batch(8)
    return model, figures(model.fit(dataset, validation_data=dataset, epochs=2, verbose=0))


def texts() -> tuple[keras.Model, list[float]]:
    """Strings, which a layer of the model splits."""
    import tensorflow as tf

    lines = np.array(["the cat sat", "a dog ran", "the dog sat", "cat ran off"] * 9)
    vectorize = layers.TextVectorization(max_tokens=20, output_sequence_length=4)
    vectorize.adapt(lines)
    model = keras.Sequential(
        [vectorize, layers.Embedding(20, 4), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    )
    model.compile("sgd", "mse", metrics=["mae"])
    dataset = tf.data.Dataset.from_tensor_slices((lines, np.arange(36) % 2.0)).batch(8)
    return model, [
        *figures(model.fit(dataset, epochs=2, verbose=0)),
        *model.predict(dataset, verbose=0)[:, 0],
    ]


class Distiller(keras.Model):
    """Has a custom `compile`, and learns from another model that it holds and does not train."""

    def __init__(self, student: keras.Model, teacher: keras.Model) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, optimizer: Any, far: Any, share: float) -> None:
        super().compile(optimizer, "mse")
        self.far, self.share = far, share

    def call(self, inputs: Any) -> Any:
        return self.student(inputs)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        del sample_weight, training
        taught = self.far(self.teacher(x, training=False), y_pred)
        return self.share * taught + (1 - self.share) * keras.losses.MeanSquaredError()(y, y_pred)


def distilled() -> tuple[keras.Model, list[float]]:
    """See `Distiller`."""
    teacher = small("adam")
    found = figures(teacher.fit(X, Y, batch_size=8, shuffle=False, verbose=0))
    teacher.trainable = False
    student = keras.Sequential([layers.Input((6,)), layers.Dense(1)])
    model = Distiller(student, teacher)
    model.compile("adam", keras.losses.Huber(), 0.3)
    found += figures(model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0))
    return model, [*found, model.evaluate(X, Y, verbose=0)]


class Endpoint(layers.Layer):
    """Adds the model's loss: its targets are inputs."""

    def call(self, prediction: Any, target: Any) -> Any:
        self.add_loss(ops.mean(ops.square(prediction - target)))
        return prediction


def endpoint() -> tuple[keras.Model, list[float]]:
    """Compiled without a loss, and trained on one dictionary."""
    inputs = {"x": layers.Input((6,), name="x"), "y": layers.Input((1,), name="y")}
    model = keras.Model(inputs, Endpoint()(layers.Dense(1)(inputs["x"]), inputs["y"]))
    model.compile("adam")
    return model, figures(model.fit({"x": X, "y": Y}, batch_size=8, epochs=2, shuffle=False, verbose=0))


def adapted() -> tuple[keras.Model, list[float]]:
    """Trained; then LoRA is enabled, and only its weights are trained."""
    model = small("adam")
    found = []
    for rank in (0, 2):
        for layer in model.layers if rank else []:
            layer.enable_lora(rank)
        model.compile(keras.optimizers.AdamW(1e-2), "mse")
        found += figures(model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0))
    return model, found


class Cleared(keras.Model):
    """Adds up gradients in its own variables, or in PyTorch's tensors, and clears these after the update."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.dense.build((None, 6))
        self.own = own
        self.sums = [self.add_weight(one.shape, "zeros", trainable=False) for one in self.dense.weights]

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def half(self, data: Any) -> Any:
        x, y = data
        return ops.mean(ops.square(self(x) - y)) / 2

    def train_step(self, data: Any) -> Any:
        weights = self.dense.weights
        for _ in range(2):
            if BACKEND == "tensorflow":
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    half = self.half(data)
                gradients = tape.gradient(half, weights)
            else:
                half = self.half(data)
                half.backward()
                gradients = [one.value.grad for one in weights]
            if self.own:
                for total, gradient in zip(self.sums, gradients, strict=True):
                    total.assign_add(gradient)
                self.zero_grad() if BACKEND == "torch" else None
        self.optimizer.apply([one.value for one in self.sums] if self.own else gradients, weights)
        for total in self.sums if self.own else []:
            total.assign(ops.zeros(total.shape))
        if not self.own:
            super().zero_grad(set_to_none=False)
        return {"half": ops.stop_gradient(half)}


class LossFigures(keras.Model):
    """Reports a loss with a mask, which the first batch does not have, itself; also in its evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.padding, self.dense = layers.Masking(0.0), layers.Dense(1)
        self.track = keras.metrics.Mean(name="track")

    @property
    def metrics(self) -> list[Any]:
        return [self.track]

    def call(self, inputs: Any) -> Any:
        return self.dense(
            self.padding(ops.where(ops.less(inputs, X[:8].min(axis=0)), 0.0, inputs)[..., None])
        )

    def figures(self, loss: Any) -> dict[str, Any]:
        loss = ops.stop_gradient(loss)
        self.track.update_state(loss)
        return {"loss": loss, "less": loss / 2, "track": self.track.result()}

    def loss_of(self, data: Any) -> Any:
        return self.compute_loss(x=data[0], y=data[1], y_pred=self(data[0]))

    def train_step(self, data: Any) -> Any:
        weights = self.dense.weights
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self.loss_of(data)
            gradients = tape.gradient(loss, weights)
        else:
            self.zero_grad()
            (loss := self.loss_of(data)).backward()
            gradients = [one.value.grad for one in weights]
        self.optimizer.apply(gradients, weights)
        return self.figures(loss)

    def test_step(self, data: Any) -> Any:
        return self.figures(self.loss_of(data))


def loss_figures() -> tuple[keras.Model, list[float]]:
    """See `LossFigures`."""
    model, y = LossFigures(), np.repeat(Y[:, None], 6, axis=1)
    model.build((None, 6))
    model.compile("sgd", "mse")
    found = figures(model.fit(X, y, batch_size=8, epochs=2, shuffle=False, verbose=0))
    return model, found + list(model.evaluate(X, y, batch_size=8, verbose=0, return_dict=True).values())


class Unreduced(LossFigures):
    """Reduces the loss of `compile` itself, which is a vector, without what has no label."""

    def loss_of(self, data: Any) -> Any:
        x, y = data
        labelled = ops.cast(ops.not_equal(y[..., 0], 0), "float32")
        return ops.mean(self.loss(y, self(x)) * labelled)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs[..., None])


def unreduced() -> tuple[keras.Model, list[float]]:
    """See `Unreduced`."""
    model, y = Unreduced(), np.maximum(X[..., None], 0)
    model(X[:2])
    model.compile("sgd", keras.losses.MeanSquaredError(reduction=None))
    found = figures(model.fit(X, y, batch_size=8, epochs=2, shuffle=False, verbose=0))
    return model, found + list(model.evaluate(X, y, batch_size=8, verbose=0, return_dict=True).values())


class GivenStep(Cleared):
    """Has its step as an attribute, and the class has that of Keras."""

    train_step = keras.Model.train_step

    def __init__(self, own: bool) -> None:
        super().__init__(own)
        self.train_step = MethodType(Cleared.train_step, self)


def cleared(kind: type[Cleared] = Cleared, own: bool = True) -> tuple[keras.Model, list[float]]:
    """See `Cleared`."""
    model = kind(own)
    model.compile("sgd")
    return model, figures(model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0))


def given_step() -> tuple[keras.Model, list[float]]:
    """See `GivenStep`."""
    return cleared(GivenStep)


def cleared_tensors() -> tuple[keras.Model, list[float]]:
    """The same, in PyTorch's tensors."""
    return cleared(GivenStep, own=False)


class Phased(keras.Model):
    """Updates one layer in each step but the sixth, another one in each third step, and logs what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(4, activation="tanh"), layers.Dense(1)
        self.steps = self.add_weight((), "zeros", trainable=False)
        self.late = self.add_weight((), "zeros", trainable=False)
        self.often, self.seldom = keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1)

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs))

    def loss_and_gradients(self, data: Any, weights: Any) -> Any:
        x, y = data

        def loss() -> Any:
            return ops.mean(ops.square(self(x) - y))

        if BACKEND == "torch":
            import torch

            found = loss()
            gradients = list(torch.autograd.grad(found, [one.value for one in weights]))
            return found.detach(), gradients
        import tensorflow as tf

        with tf.GradientTape() as tape:
            found = loss()
        return found, tape.gradient(found, weights)

    def train_step(self, data: Any) -> Any:
        self.steps.assign(self.steps + 1)
        loss, gradients = self.loss_and_gradients(data, self.last.trainable_weights)
        if int(self.steps) == 6:
            return {"idle": loss}
        self.often.apply(gradients, self.last.trainable_weights)
        logs = {"often": loss}
        if int(self.often.iterations) % 3 == 0:
            loss, gradients = self.loss_and_gradients(data, self.first.trainable_weights)
            self.seldom.apply(gradients, self.first.trainable_weights)
            self.late.assign(self.late + loss)
            logs["seldom"] = loss
        return logs


def phased() -> tuple[keras.Model, list[float]]:
    """See `Phased`; the last batch of an epoch has one example."""
    model = Phased()
    model(X[:2])
    model.compile(run_eagerly=True)
    logged = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: logged.append(logs))
    model.fit(X, Y, batch_size=9, epochs=2, shuffle=False, verbose=0, callbacks=[note])
    assert [[*logs] for logs in logged][1:6] == [
        ["often"],
        ["often", "seldom"],
        ["often"],
        ["often"],
        ["idle"],
    ]
    return model, [float(value) for logs in logged for value in logs.values()]


class Remembering(layers.Layer):
    """Depends on what it keeps in Python: numbers, containers, an object, an array, a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.warm = 0, 0.0
        self.seen, self.recent = [], deque(maxlen=3)
        self.notes = SimpleNamespace(counts={"calls": 0}, last=None)
        self.held, self.random = np.zeros(2), np.random.default_rng(3)
        # A replica's own values, which nothing reads.
        self.rows, self.mean, self.outputs = 0, 0.0, None

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        self.steps += 1
        self.warm = 0.9 * self.warm + 0.1
        self.seen.append(self.steps)
        self.recent.append(len(self.seen))
        self.notes.counts["calls"] += 1
        self.held[0] += self.notes.counts["calls"]
        scale = self.warm + sum(self.recent) / 100 + self.held[0] / 100 + self.random.uniform(0, 0.1)
        self.rows, self.outputs = int(inputs.shape[0]), inputs * float(scale)
        self.mean = float(ops.convert_to_numpy(ops.mean(inputs)))
        return self.outputs


def remembering() -> tuple[keras.Model, list[float]]:
    """See `Remembering`; the last batch of an epoch has one example."""
    layer = Remembering()
    model = keras.Sequential([layers.Input((6,)), layers.Dense(4), layer, layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    history = model.fit(X, Y, batch_size=9, epochs=2, verbose=0)
    assert (layer.steps, len(layer.seen), [*layer.recent]) == (10, 10, [8, 9, 10])
    assert layer.notes.counts == {"calls": 10}
    return model, [*figures(history), layer.warm, layer.held[0], layer.random.uniform()]


def fading() -> tuple[keras.Model, list[float]]:
    """A loss and a layer, modules of PyTorch, count their calls and depend on them."""
    import torch

    class Fading(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, y: Any, p: Any) -> Any:
            self.calls += 1
            return torch.square(y - p).mean() / self.calls

    class Growing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.linear = 0, torch.nn.Linear(6, 3)

        def forward(self, x: Any) -> Any:
            self.calls += self.training
            return self.linear(x) * (1 + self.calls / 10)

    with torch.random.fork_rng():
        torch.manual_seed(4)
        inner = [layers.TorchModuleWrapper(Growing()), layers.Dense(1)]
    model = keras.Sequential([layers.Input((6,)), *inner])
    model.compile("sgd", Fading())
    return model, figures(model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0))


TRAININGS = [nested, unweighted, averaged, distilled, endpoint, adapted]
ON_BACKEND = {
    "tensorflow": [
        parts,
        eager_parts,
        triplet,
        texts,
        cleared,
        given_step,
        phased,
        remembering,
        loss_figures,
        unreduced,
    ],
    "torch": [cleared, given_step, cleared_tensors, phased, remembering, fading, loss_figures, unreduced],
}


class Stop(keras.callbacks.Callback):
    """One worker requests a stop after some batches, or after an epoch."""

    def __init__(self, worker: int, batches: int, epochs: int) -> None:
        super().__init__()
        self.worker, self.batches, self.epochs = worker, batches, epochs

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches -= 1
        self.wish(self.batches)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs -= 1
        self.wish(self.epochs)

    def wish(self, left: int) -> None:
        if left == 0 and job.current().worker == self.worker:
            self.model.stop_training = True


def stopped(scope: Callable[[], Any]) -> None:
    """Print the number of steps of trainings in which one worker requests a stop: the chief decides."""
    for callback in (Stop(0, 3, 0), Stop(1, 3, 2), Stop(0, 0, 1)):
        with scope():
            model = small()
        model.fit(X, Y, batch_size=8, epochs=2, callbacks=[callback], verbose=0)
        steps = int(ops.convert_to_numpy(model.optimizer.iterations))
        print("result stopped", steps, lockstep.digest(model), flush=True)


def figures(history: Any) -> list[float]:
    return [
        float(value) for _, values in sorted(history.history.items()) for value in values if value is not None
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--adopted", action="store_true")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    known = [*TRAININGS, *ON_BACKEND.get(BACKEND, [])]
    trainings = [one for one in known if not arguments.names or one.__name__ in arguments.names]
    if arguments.both:
        train(trainings, contextlib.nullcontext, "plain")
    scope = contextlib.nullcontext if arguments.adopted else lockstep.MultiWorkerMirroredStrategy().scope
    train(trainings, scope, "numbers")
    stopped(scope)


def train(trainings: list[Callable[[], Any]], scope: Callable[[], Any], mark: str) -> None:
    for training in trainings:
        keras.utils.clear_session()
        keras.utils.set_random_seed(7)
        with scope():
            model, found = training()
        if mark == "numbers":
            print("result", training.__name__, lockstep.digest(model), flush=True)
        weights = np.concatenate(
            [np.ravel(weight) for weight in model.get_weights() if weight.dtype.kind == "f"]
        )
        print(mark, training.__name__, *found, *(float(number) for number in weights), flush=True)


if __name__ == "__main__":
    main()
