"""Sums and means of the program's own have the numbers of plain Keras on replicas of any sizes."""

import inspect
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.checkpoint.values import pack, unpack
from lockstep.keras.backends.growth import (
    GROWTHS,
    MEAN,
    SUM,
    TOLERANCE,
    Growths,
    growths_of,
    measured_growth,
    nearest_growth,
    parts_digest,
)
from lockstep.keras.fit.step_trial import StepTrial
from lockstep.keras.fit.trials import Trial
from lockstep.keras.state.models import CompiledModels
from lockstep.keras.state.snapshots import Snapshots
from lockstep.worker.job import Job

ops = keras.ops
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(29, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
WEIGHTS = np.linspace(0.2, 2, 29).astype("float32")
WHOLE = slice(24)
"""The rows of three whole batches: the shares of replicas have two sizes, for which JAX compiles."""

Built = tuple[keras.Model, Any]


def sum_of_squares(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(y - p))


def part_of_a_sum(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(y - p)) / 16


def mean_of_squares(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p))


def mean_error(y: Any, p: Any) -> Any:
    return ops.mean(ops.abs(y - p))


def summed_error(y: Any, p: Any) -> Any:
    return ops.sum(ops.abs(y - p))


class SumPlusOne(keras.losses.Loss):
    """A vector that Keras adds up."""

    def __init__(self) -> None:
        super().__init__(reduction="sum")

    def call(self, y: Any, p: Any) -> Any:
        return ops.square(y - p)[:, 0] + 1


def one_output(
    loss: Any, metrics: Any = (), layer: Any = keras.layers.Dense, **options: Any
) -> Callable[[], Built]:
    def build() -> Built:
        model = keras.Sequential(
            [keras.Input((4,)), layer(3, activation="tanh", **options), keras.layers.Dense(1)]
        )
        model.compile(
            keras.optimizers.SGD(0.003),
            loss,
            metrics=[one() if isinstance(one, type) else one for one in metrics],
        )
        return model, Y

    return build


def two_outputs() -> Built:
    inputs = keras.Input((4,))
    regularizer = keras.regularizers.L2(0.1)
    hidden = keras.layers.Dense(3, activation="tanh", kernel_regularizer=regularizer)(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1)(hidden), keras.layers.Dense(1)(hidden)])
    model.compile(keras.optimizers.SGD(0.003), [sum_of_squares, "mae"], loss_weights=[0.5, 2.0])
    return model, [Y, 2 * Y]


class Misses(keras.metrics.Metric):
    """Counts in variables that have the names of attributes of Keras's metrics."""

    def __init__(self) -> None:
        super().__init__(name="misses")
        self.fn = self.add_variable((), "zeros", name="fn")
        self._fn = self.add_variable((), "zeros", name="all")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.fn.assign_add(ops.sum(ops.cast((y > 0) & (p <= 0), "float32")))
        self._fn.assign_add(ops.sum(ops.ones_like(p)))

    def result(self) -> Any:
        return self.fn / self._fn


class Adding(keras.layers.Dense):
    """Adds a sum over the examples to the loss."""

    def call(self, x: Any) -> Any:
        x = super().call(x)
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class SummedLoss(keras.Sequential):
    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return ops.sum(ops.square(y - y_pred)) / 8


def with_summed_loss() -> Built:
    model = SummedLoss([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.003))
    return model, Y


class SummedStep(keras.Sequential):
    """A step of JAX that divides sums by a constant."""

    def train_step(self, state: Any, data: Any) -> Any:
        weights, others, slots, metrics = state
        x, y = data

        def loss_of(weights: Any) -> Any:
            p, _ = self.stateless_call(weights, others, x)
            return ops.sum(ops.square(y - p)) / 16

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return {"loss": loss, "mean": ops.mean(y)}, (weights, others, slots, metrics)


def with_summed_step() -> Built:
    model = SummedStep([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01))
    return model, Y


class OwnFigures(keras.Sequential):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "total": ops.sum(ops.abs(y_pred)), "rows mean": ops.mean(y_pred)}


def with_own_figures() -> Built:
    model = OwnFigures([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return model, Y


class OwnStep(keras.Sequential):
    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)


def with_own_step() -> Built:
    model = OwnStep([keras.Input((4,)), keras.layers.Dense(1)])
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model, Y


class Clipped(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return ops.maximum(x, 0)


def with_own_step_and_mask() -> Built:
    """Rows have unequal numbers of masked times."""
    layers = [Clipped(), keras.layers.Reshape((4, 1)), keras.layers.Masking(0.0)]
    model = OwnStep([keras.Input((4,)), *layers, keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model, np.repeat(Y[:, None], 4, axis=1)


class Padded(keras.layers.Layer):
    """Clears numbers that are less than those of the first batch, which has none."""

    def call(self, x: Any) -> Any:
        return ops.where(x < X[:8].min(axis=0), 0.0, x)


class OwnLossFigures(keras.Model):
    """A step of JAX that reports the loss of `compile` itself, also doubled and as a mean of batches."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.track = keras.metrics.Mean(name="track")

    @property
    def metrics(self) -> list[Any]:
        return [self.track]

    def logs_of(self, loss: Any, p: Any, metrics: Any) -> tuple[Any, Any]:
        metrics = self.track.stateless_update_state(metrics, loss)
        track = self.track.stateless_result(metrics)
        return {"loss": loss, "doubled": 2 * loss, "mean": ops.mean(p), "track": track}, metrics

    def train_step(self, state: Any, data: Any) -> Any:
        weights, others, slots, metrics = state

        def loss_of(weights: Any) -> Any:
            p, _ = self.stateless_call(weights, others, data[0])
            return self.compute_loss(x=data[0], y=data[1], y_pred=p), p

        (loss, p), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        logs, metrics = self.logs_of(loss, p, metrics)
        return logs, (weights, others, slots, metrics)

    def test_step(self, state: Any, data: Any) -> Any:
        weights, others, metrics = state
        p, _ = self.stateless_call(weights, others, data[0])
        logs, metrics = self.logs_of(self.compute_loss(x=data[0], y=data[1], y_pred=p), p, metrics)
        return logs, (weights, others, metrics)


def with_own_loss_figures(padding: type[keras.layers.Layer]) -> Callable[[], Built]:
    def build() -> Built:
        inputs = keras.Input((4,))
        x = keras.layers.Masking(0.0)(keras.layers.Reshape((4, 1))(padding()(inputs)))
        outputs = keras.layers.Dense(1)(keras.layers.Dense(3, "tanh")(x))
        model = OwnLossFigures(inputs=inputs, outputs=outputs)
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model, np.repeat(Y[:, None], 4, axis=1)

    return build


class Sparse(keras.layers.Layer):
    """Clears the least numbers of the first batch, and what is less."""

    def call(self, x: Any) -> Any:
        return ops.where(x <= X[:8].min(axis=0), 0.0, x)


def with_own_figures_of_classes(
    padding: type[keras.layers.Layer], *, kernel: str = "zeros", dtype: str = "float32", ignored: bool = False
) -> Callable[[], Built]:
    def build() -> Built:
        inputs = keras.Input((4,))
        x = keras.layers.Activation("linear", dtype=dtype)(inputs)
        x = keras.layers.Masking(0.0)(keras.layers.Reshape((4, 1))(padding(dtype="float32")(x)))
        model = OwnLossFigures(inputs=inputs, outputs=keras.layers.Dense(5, kernel_initializer=kernel)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=-1 if ignored else None
        )
        model.compile(keras.optimizers.SGD(0.1), loss)
        classes = np.arange(29 * 4).reshape(29, 4) % 5
        if ignored:
            classes[8::3, 1:] = -1
        return model, classes

    return build


class Summands(OwnLossFigures):
    """May have a second loss with another denominator later."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.share = 0.0

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        loss = super().compute_loss(x, y, y_pred)
        if self.share > 0:
            loss += self.share * keras.losses.MeanAbsoluteError()(y, y_pred)
        return loss


class Transposed(OwnLossFigures):
    """Computes a loss whose first axis is not the examples, so a trial does not thin its denominator."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        y, y_pred = ops.transpose(y), ops.transpose(y_pred, (1, 0, 2))
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)(y, y_pred)


def trained(build: Callable[[], Built], fit: Any, rows: int = len(X)) -> Any:
    keras.utils.set_random_seed(5)
    model, y = build()
    fit(model, X[:rows], y[:rows], batch_size=8, epochs=1, shuffle=False, verbose=0)
    return model.get_weights()


# Slow tests also try a step that runs eagerly.
@pytest.mark.parametrize("kind", [pytest.param(Summands, marks=pytest.mark.slow), Transposed])
def test_figures_that_may_follow_the_denominator_of_a_loss_are_named(
    kind: type[OwnLossFigures], capfd: pytest.CaptureFixture[str]
) -> None:
    def build() -> Built:
        inputs = keras.Input((4,))
        x = keras.layers.Reshape((4, 1))(Padded()(inputs))
        x = keras.layers.Masking(0.0)(x) if kind is Summands else x[:, :3]
        model = kind(inputs=inputs, outputs=keras.layers.Dense(1 if kind is Summands else 5)(x))
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=kind is Summands)
        classes = np.arange(29 * 4).reshape(29, 4) % 5
        classes[8::3, 1:] = 4 if kind is Summands else -1
        return model, classes[..., None] if kind is Summands else classes[:, :3]

    # The second batch has what the first one does not.
    plain = trained(build, inspect.unwrap(keras.Model.fit), 16)
    with lockstep.MultiWorkerMirroredStrategy().scope():
        found = trained(build, keras.Model.fit, 16)
    for value, wanted in zip(found, plain, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=1e-6)
    note = capfd.readouterr().err
    assert "the figure loss of" in note
    assert "the figure doubled of" in note
    assert "the metric track" in note
    assert ("the figure mean of" in note) == (kind is Transposed)


def mean_without_padding(y: Any, p: Any) -> Any:
    """Return a mean over the elements that a mask of the program keeps; the first batch has no padding."""
    mask = ops.cast(ops.not_equal(y, 0), p.dtype)
    return ops.sum(ops.square(y - p) * mask) / ops.sum(mask)


class AddingWithoutPadding(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(mean_without_padding(x, ops.tanh(x)))
        return x


class LossWithoutPadding(keras.Sequential):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        return mean_without_padding(y, y_pred)


class FigureWithoutPadding(OwnLossFigures):
    def logs_of(self, loss: Any, p: Any, metrics: Any) -> tuple[Any, Any]:
        return {"loss": loss, "masked": mean_without_padding(self.labels, p)}, metrics

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        self.labels = y
        return super().compute_loss(x, y, y_pred)


class StepWithoutPadding(OwnLossFigures):
    def logs_of(self, loss: Any, p: Any, metrics: Any) -> tuple[Any, Any]:
        return {}, metrics

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        return mean_without_padding(y, y_pred)


def padded_later(loss: Any = "mse", metrics: Any = (), kind: Any = keras.Sequential) -> Callable[[], Built]:
    def build() -> Built:
        inputs = keras.Input((4,))
        layer = AddingWithoutPadding() if loss is None else keras.layers.Dense(4)
        outputs = keras.layers.Dense(4)(layer(inputs))
        if kind is keras.Sequential:
            model = keras.Model(inputs, outputs)
        elif issubclass(kind, keras.Sequential):
            model = kind([inputs, layer, keras.layers.Dense(4)])
        else:
            model = kind(inputs=inputs, outputs=outputs)
        model.compile(keras.optimizers.SGD(0.1), loss or "mse", metrics=metrics)
        y = 1 + np.abs(X @ np.ones((4, 4), "float32"))
        y[8:][np.arange(21)[:, None] % 4 < np.arange(4)] = 0
        return model, y

    return build


PROGRAMS: dict[str, Callable[[], Built]] = {
    "a sum": one_output(sum_of_squares),
    "a sum divided by a constant": one_output(part_of_a_sum),
    "a mean": one_output(mean_of_squares),
    "a vector that is added up": one_output(SumPlusOne()),
    "a sum of Keras": one_output(keras.losses.MeanSquaredError(reduction="sum")),
    "a sum and a mean": two_outputs,
    "metrics": one_output("mse", [mean_error, summed_error, "mae", Misses]),
    "a sum that a layer adds": one_output("mse", layer=Adding),
    "a regularizer of sums": one_output("mse", activity_regularizer=lambda a: 0.1 * ops.sum(ops.abs(a))),
    "a regularizer of means": one_output("mse", activity_regularizer=lambda a: ops.mean(ops.square(a))),
    "the model's own sum": with_summed_loss,
    "a step's own sum": with_summed_step,
    "an own step with a denominator": with_own_step,
    "an own step with a mask": with_own_step_and_mask,
    "figures": with_own_figures,
    "own figures of a loss with a mask": with_own_loss_figures(Clipped),
    "own figures of a loss whose mask comes later": with_own_loss_figures(Padded),
    "own figures of a loss with few padded elements": with_own_figures_of_classes(Sparse),
    "own figures of a loss with ignored classes": with_own_figures_of_classes(
        keras.layers.Identity, ignored=True
    ),
    "own figures of a loss in half precision": with_own_figures_of_classes(
        Padded, kernel="glorot_uniform", dtype="mixed_bfloat16"
    ),
    "a loss with its own mask": padded_later(mean_without_padding),
    "a metric with its own mask": padded_later(metrics=[mean_without_padding]),
    "a compute_loss with its own mask": padded_later(kind=LossWithoutPadding),
}


QUICK = {
    "a sum and a mean",
    "a step's own sum",
    "an own step with a mask",
    "own figures of a loss whose mask comes later",
}


def results(build: Callable[[], Built], scope: Any, fit: Any, evaluate: Any) -> list[float]:
    """Return the figures and weights of a training whose last batches have other sizes."""
    keras.utils.set_random_seed(5)
    # Figures are sorted by names such as dense_9.
    keras.utils.clear_session(free_memory=False)
    with scope:
        model, y = build()
    history = fit(model, X, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    figures = [value for _, values in sorted(history.items()) for value in values]
    if not isinstance(model, SummedStep):
        figures += np.ravel(evaluate(model, X, y, batch_size=8, verbose=0)).tolist()
    return [*figures, *np.concatenate([np.ravel(weight) for weight in model.get_weights()]).tolist()]


@pytest.mark.ci(*PROGRAMS.keys() - QUICK)
@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_and_means_have_the_numbers_of_plain_keras(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    build = PROGRAMS[name]
    plain = results(
        build, nullcontext(), inspect.unwrap(keras.Model.fit), inspect.unwrap(keras.Model.evaluate)
    )
    strategy = lockstep.MultiWorkerMirroredStrategy()
    found = results(build, strategy.scope(), keras.Model.fit, keras.Model.evaluate)
    np.testing.assert_allclose(found, plain, rtol=2e-5, atol=1e-6)
    assert "per replica" not in capfd.readouterr().err


class Sampling(keras.layers.Layer):
    """Draws without a generator."""

    def call(self, x: Any) -> Any:
        return x + self.noise(x)

    def noise(self, x: Any) -> Any:
        return keras.random.normal(ops.shape(x), stddev=0.1, seed=3)


class SamplingOfItsOwn(Sampling):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.generator = keras.random.SeedGenerator(3)

    def noise(self, x: Any) -> Any:
        return jax.random.normal(self.generator.next(), x.shape)


class ByNumPy(Sampling):
    def noise(self, x: Any) -> Any:
        return np.random.normal(size=x.shape[-1:]).astype("float32")


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (Sampling, "random numbers of Sampling.noise"),
        (SamplingOfItsOwn, ""),
        (ByNumPy, "random numbers of NumPy"),
        (lambda **options: keras.layers.Dropout(0.5, **options), ""),
    ],
    ids=["keras", "own", "numpy", "layer of Keras"],
)
def test_random_numbers_that_are_not_of_a_layer_are_named(
    layer: Callable[..., Any], names: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Replicas draw other numbers than one process; a layer with a generator is named by its kind."""
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), layer(name="drawing"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(X[WHOLE], Y[WHOLE], batch_size=8, verbose=0)
    told = [line for line in capfd.readouterr().err.splitlines() if "per replica" in line]
    assert [line.partition("per replica: ")[2] for line in told] == ([names] if names else [])


class DividedStep(SummedStep):
    """Divides a mean by the number of replicas, as programs for `tf.distribute` do."""

    def train_step(self, state: Any, data: Any) -> Any:
        weights, others, slots, metrics = state

        def loss_of(weights: Any) -> Any:
            p, _ = self.stateless_call(weights, others, data[0])
            return ops.mean(ops.square(data[1] - p)) / STRATEGIES[-1].num_replicas_in_sync

        gradients = jax.grad(loss_of)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return {"mean": ops.mean(data[1])}, (weights, others, slots, metrics)


STRATEGIES: list[lockstep.MultiWorkerMirroredStrategy] = []


def test_a_mean_divided_by_the_number_of_replicas_is_exact_for_equal_shares(
    capfd: pytest.CaptureFixture[str],
) -> None:
    STRATEGIES.append(lockstep.MultiWorkerMirroredStrategy())
    keras.utils.set_random_seed(2)
    with STRATEGIES[-1].scope():
        model = DividedStep([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1))
    kernel, bias = (np.array(weight, "float64") for weight in model.get_weights())
    for batch in (X[:12], X[12:24]):
        error = 2 * (batch @ kernel + bias - batch.sum(axis=1, keepdims=True)) / 12
        kernel, bias = kernel - 0.1 * batch.T @ error, bias - 0.1 * error.sum(axis=0)
    model.fit(X[:24], Y[:24], batch_size=12, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], kernel, rtol=1e-4, atol=1e-6)
    named = "computed per replica: train_step of DividedStep where replicas have unequal shares\n"
    assert named in capfd.readouterr().err


def f1(y: Any, p: Any) -> Any:
    right = ops.sum(ops.cast(y > 0, "float32") * ops.sigmoid(p))
    return 2 * right / (ops.sum(ops.cast(y > 0, "float32")) + ops.sum(ops.sigmoid(p)))


def mean_of_positives(y: Any, p: Any) -> Any:
    """Return a mean over some examples: nearly one over all of them, while the outputs are nearly equal."""
    positive = ops.cast(y > 0, "float32")
    return ops.sum(ops.exp(p) * positive) / ops.sum(positive)


def nearly_equal_outputs(loss: Any) -> Callable[[], Built]:
    def build() -> Built:
        dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(1e-6))
        model = keras.Sequential([keras.Input((4,)), dense])
        model.compile(keras.optimizers.SGD(0.003), loss)
        return model, Y

    return build


class Sparse(keras.regularizers.Regularizer):
    def __call__(self, a: Any) -> Any:
        return ops.sum(ops.log(0.1 + ops.square(ops.mean(a, axis=0))))


class ClippedStep(SummedStep):
    """Clips the gradients of the whole batch, which replicas do not have."""

    def train_step(self, state: Any, data: Any) -> Any:
        apply = self.optimizer.stateless_apply
        weights, others, slots, metrics = state

        def loss_of(weights: Any) -> Any:
            p, _ = self.stateless_call(weights, others, data[0])
            return ops.mean(ops.square(data[1] - p))

        gradients = jax.grad(loss_of)(weights)
        gradients = [ops.clip(gradient, -0.01, 0.01) / 3 + gradient**2 for gradient in gradients]
        weights, slots = apply(slots, gradients, weights)
        return {"most": ops.max(data[1])}, (weights, others, slots, metrics)


class OwnMaximum(keras.Sequential):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {"largest": ops.max(y_pred)}


def clipped() -> Built:
    model = ClippedStep([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01))
    return model, Y


def with_own_maximum() -> Built:
    model = OwnMaximum([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model, Y


@pytest.mark.ci("cosine", "correlation", "f1", "f1 loss", "maximum", "sparse")
@pytest.mark.parametrize(
    ("build", "names"),
    [
        (one_output(lambda y, p: 1 - f1(y, p)), "the loss lambda"),
        (one_output("mse", [f1]), "the metric f1"),
        (nearly_equal_outputs(mean_of_positives), "the loss mean_of_positives"),
        (one_output(keras.losses.CosineSimilarity(axis=0)), "the loss cosine_similarity"),
        (one_output("mse", [keras.metrics.PearsonCorrelation(axis=0)]), "the metric pearson_correlation"),
        (one_output("mse", activity_regularizer=Sparse()), "the activity_regularizer of dense"),
        (with_own_maximum, "the figure largest of compute_metrics"),
        (clipped, "train_step of ClippedStep, the figure most of train_step"),
        (
            padded_later(kind=FigureWithoutPadding),
            "the figure masked of train_step, the figure masked of test_step",
        ),
        (padded_later(kind=StepWithoutPadding), "train_step of StepWithoutPadding"),
        (padded_later(None), "add_loss of AddingWithoutPadding"),
    ],
    ids=[
        "f1 loss",
        "f1",
        "nearly equal",
        "cosine",
        "correlation",
        "sparse",
        "maximum",
        "clipped",
        "figure with its own mask",
        "step with its own mask",
        "add_loss with its own mask",
    ],
)
def test_what_is_neither_is_named(
    build: Callable[[], Built],
    names: str,
    capfd: pytest.CaptureFixture[str],
    nothing_exchanged: Callable[[str], str],
) -> None:
    keras.utils.clear_session()
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model, y = build()
    model.fit(X[WHOLE], y[WHOLE], batch_size=8, verbose=0)
    assert f"computed per replica: {names}\n" in nothing_exchanged(capfd.readouterr().err)


class RowsThatCompare(OwnLossFigures):
    """Tracks distances of each row from the others, which grow with the number of rows."""

    def logs_of(self, loss: Any, p: Any, metrics: Any) -> tuple[Any, Any]:
        metrics = self.track.stateless_update_state(metrics, distances(p))
        return {"track": self.track.stateless_result(metrics)}, metrics


def distances(p: Any) -> Any:
    return ops.sum(ops.abs(p[:, None] - p[None]), axis=(1, 2))


@pytest.mark.usefixtures("nothing_exchanged")
def test_a_metric_of_rows_that_compare_is_the_mean_of_those_of_the_replicas(job_of_one_worker: Job) -> None:
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model, y = padded_later(kind=RowsThatCompare)()
    shares = np.array_split(ops.convert_to_numpy(model(X)), job_of_one_worker.view.replicas)
    wanted = np.concatenate([distances(share) for share in shares]).mean()
    history = model.fit(X, y, batch_size=29, shuffle=False, verbose=0).history
    assert history["track"][0] == pytest.approx(wanted, 1e-5)


class Ratio(keras.metrics.Metric):
    """Has two large sums and no count."""

    def __init__(self) -> None:
        super().__init__(name="track")
        self.distances = self.add_variable((), "zeros", name="distances")
        self.sizes = self.add_variable((), "zeros", name="sizes")

    def update_state(self, p: Any) -> None:
        self.distances.assign_add(ops.sum(distances(p)))
        self.sizes.assign_add(1000 * ops.sum(ops.abs(p)))

    def result(self) -> Any:
        return self.distances / self.sizes


class RatioThatCompares(OwnLossFigures):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.track = Ratio()

    def logs_of(self, loss: Any, p: Any, metrics: Any) -> tuple[Any, Any]:
        metrics = self.track.stateless_update_state(metrics, p)
        return {"track": self.track.stateless_result(metrics)}, metrics


@pytest.mark.usefixtures("nothing_exchanged")
def test_a_large_sum_beside_a_sum_that_compares_is_not_a_count_of_rows(job_of_one_worker: Job) -> None:
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model, y = padded_later(kind=RatioThatCompares)()
    p = ops.convert_to_numpy(model(X))
    shares = np.array_split(p, job_of_one_worker.view.replicas)
    of_shares = np.array([float(np.sum(distances(share))) for share in shares])
    # The sum of all pairs grows with the square of the rows: as a sum divided by a replica's part of them.
    nearest = np.sum(of_shares * [len(p) / len(share) for share in shares])
    whole = float(np.sum(distances(p)))
    assert abs(nearest - whole) < abs(np.sum(of_shares) - whole)
    history = model.fit(X, y, batch_size=29, shuffle=False, verbose=0).history
    assert history["track"][0] == pytest.approx(nearest / (1000 * np.abs(p).sum()), 1e-5)


def test_weights_of_examples_take_part_in_the_trial(
    capfd: pytest.CaptureFixture[str], nothing_exchanged: Callable[[str], str]
) -> None:
    """Keras multiplies the one number of a loss by the mean weight of the batch: a product of two means."""
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model, _ = one_output(mean_of_squares)()
    model.fit(X[WHOLE], Y[WHOLE], sample_weight=WEIGHTS[WHOLE], batch_size=8, verbose=0)
    assert "computed per replica: the loss mean_of_squares\n" in nothing_exchanged(capfd.readouterr().err)


class TrainedOnly(keras.Sequential):
    """Counts the losses of layers twice, and refuses to be evaluated eagerly."""

    def compute_loss(self, x: Any, y: Any, p: Any, weight: Any, training: bool = True) -> Any:
        if not (training or isinstance(p, jax.core.Tracer)):
            raise NotImplementedError
        return super().compute_loss(x, y, p, weight, training) + sum(self.losses)


def test_a_failed_trial_leaves_the_losses_of_layers_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    losses = []
    scopes = [nullcontext(), lockstep.MultiWorkerMirroredStrategy().scope()]
    for fit, scope in zip((inspect.unwrap(keras.Model.fit), keras.Model.fit), scopes, strict=True):
        keras.utils.set_random_seed(0)
        with scope:
            layer = keras.layers.Dense(1, activity_regularizer=keras.regularizers.L2(0.5))
            model = TrainedOnly([keras.Input((4,)), layer])
            model.compile(keras.optimizers.SGD(0.01), "mse")
        losses.append(fit(model, X, Y, batch_size=8, verbose=0).history["loss"])
    assert losses[1] == pytest.approx(losses[0], 1e-5)
    assert "compute_loss of TrainedOnly (possibly: it could not be tested)" in capfd.readouterr().err


def largest_error(y: Any, p: Any) -> Any:
    return ops.max(ops.square(y - p))


def test_equal_rows_do_not_hide_a_comparison(
    capfd: pytest.CaptureFixture[str], nothing_exchanged: Callable[[str], str]
) -> None:
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model, _ = one_output(largest_error)()
    rows = np.ones((8, 4), "float32")
    model.fit(rows, rows[:, :1], batch_size=8, verbose=0)
    assert "computed per replica: the loss largest_error\n" in nothing_exchanged(capfd.readouterr().err)


class AddsLater(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


def test_a_layer_that_is_added_after_a_training_is_tried() -> None:
    def losses(scope: Any, fit: Any) -> list[float]:
        keras.utils.set_random_seed(5)
        with scope:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.003), "mse", run_eagerly=True)
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        first = fit(model, X[WHOLE], Y[WHOLE], **options).history["loss"]
        model.add(AddsLater())
        return [*first, *fit(model, X[WHOLE], Y[WHOLE], **options).history["loss"]]

    strategy = lockstep.MultiWorkerMirroredStrategy()
    plain = losses(nullcontext(), inspect.unwrap(keras.Model.fit))
    np.testing.assert_allclose(losses(strategy.scope(), keras.Model.fit), plain, rtol=2e-5)


def masked_accuracy(y: Any, p: Any) -> Any:
    """The share of right classes among the labels that are not 0."""
    counts = ops.cast(y[:, 0] > 0, "float32")
    right = ops.cast(ops.equal(ops.argmax(p, axis=-1), ops.cast(y[:, 0], "int32")), "float32")
    return ops.sum(right * counts) / (ops.sum(counts) + 1e-7)


def test_a_figure_that_is_zero_at_first_is_tried_with_right_outputs(
    capfd: pytest.CaptureFixture[str], nothing_exchanged: Callable[[str], str]
) -> None:
    layers = [keras.Input((4,)), keras.layers.Dense(4, kernel_initializer="zeros", name="zeros")]
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential(layers)
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=[masked_accuracy])
    labels = np.array([0, 1, 2, 3, 1, 0, 0, 2] * 3)[:, None]
    model.fit(X[:24], labels, batch_size=24, verbose=0)
    assert "computed per replica: the metric masked_accuracy\n" in nothing_exchanged(capfd.readouterr().err)


def test_modules_of_pytorch_that_use_a_batch_or_draw_numbers() -> None:
    torch = pytest.importorskip("torch")
    from lockstep.keras.private.torch import normalizing_or_dropping

    class Frozen(torch.nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Any:
            return super().train(False)

    modules = [torch.nn.BatchNorm2d(3), torch.nn.Dropout(0.1), torch.nn.BatchNorm1d(3).eval()]
    others = [Frozen(3).train(), torch.nn.Dropout(0.0), torch.nn.Linear(2, 2)]
    assert normalizing_or_dropping(torch.nn.Sequential(*others, *modules)) == modules


@given(st.integers(0, 1000), st.sampled_from(GROWTHS), st.integers(1, 7))
def test_the_growth_of_a_value_is_found(seed: int, growth: int, first: int) -> None:
    """A value that grows with n as n ** growth times a mean over n examples."""
    random = np.random.default_rng(seed)
    rows = random.normal(1, 1, (8, 3))

    def value(part: np.ndarray) -> np.ndarray:
        mean: np.ndarray = part.mean(axis=0) * (len(part) / 8) ** growth
        return mean

    parts = [rows[:first], rows[first:]]
    weights = [len(part) / 8 for part in parts]
    assert measured_growth(value(rows), [value(part) for part in parts], weights, TOLERANCE) == growth
    largest = [part.max(axis=0) for part in (rows, *parts)]
    assert measured_growth(largest[0], largest[1:], weights, TOLERANCE) is None


class Decibels(SummedLoss):
    """Has a figure that is nearly 0 for the first batch: a logarithm."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {"level": ops.log(ops.mean(ops.square(y_pred)) / 0.9)}


def test_a_logarithm_is_the_mean_of_those_of_the_replicas(
    job_of_one_worker: Job, capfd: pytest.CaptureFixture[str], nothing_exchanged: Callable[[str], str]
) -> None:
    rows = np.linspace(0.2, 1.45, 8).astype("float32")[:, None]
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = Decibels([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd")
    found = model.evaluate(rows, -rows, batch_size=8, verbose=0, return_dict=True)
    parts = np.array_split(rows, job_of_one_worker.view.replicas)
    levels = [np.log(np.mean(np.square(part)) / 0.9) for part in parts]
    np.testing.assert_allclose(found["level"], np.average(levels, weights=list(map(len, parts))), rtol=1e-5)
    told = nothing_exchanged(capfd.readouterr().err)
    assert "computed per replica: the figure level of compute_metrics\n" in told


@pytest.mark.parametrize(
    ("whole", "parts", "growth"),
    [
        (44.4, [8.0, 26.4], SUM),
        (44.4, [50.0, 41.0], MEAN),
        (0.3, [0.5, 0.7], MEAN),
        (-0.1, [0.02, -0.1], MEAN),
        (2.8, [1.5, 2.6], MEAN),
        ([3.0, 2.0, 2.0], [[3.0, 0.0, 0.5], [0.0, 1.9, 1.0]], SUM),
    ],
    ids=["sum", "mean", "half of a mean", "signs", "logarithm", "apart"],
)
def test_a_value_without_a_growth_is_rather_a_sum_or_a_mean(whole: Any, parts: Any, growth: int) -> None:
    arrays = [np.array(part) for part in parts]
    weights = [5 / 16, 11 / 16]
    assert measured_growth(np.array(whole), arrays, weights, TOLERANCE) is None
    assert nearest_growth(np.array(whole), arrays, weights) == growth


def test_a_checkpoint_keeps_what_trials_have_shown() -> None:
    model, _ = one_output("mse")()
    growths = Growths(
        {0: SUM},
        {id(model.layers[1]): -1},
        {"train": {(1, "gradient/0"): SUM}, "test": {(0, "metric/2"): -1}},
        2,
        frozenset({"loss", "inputs"}),
        {"train": 3, "test": 0},
        "a digest",
        True,
        ("the layer centered",),
        ("the loss contrast",),
        "C.phase#1 = full",
        {"": Growths({0: SUM}, tried={"train": 3})},
        {"test": "C.phase#1 = full"},
    )
    removed = replace(growths, layers={**growths.layers, id(keras.layers.Dense(1)): SUM})
    assert removed.packed(model) == growths.packed(model)
    packed, arrays = pack(growths.packed(model), "growths")
    assert Growths.unpacked(model, unpack(json.loads(json.dumps(packed)), arrays)) == growths
    # A checkpoint of a version that did not keep the last three.
    values = {k: v for k, v in growths.packed(model).items() if k not in ("choices", "others", "traced")}
    assert Growths.unpacked(model, values) == replace(growths, choices="", others={}, traced={})


def test_growths_of_a_checkpoint_are_taken_once_if_they_are_of_this_model() -> None:
    model, _ = one_output("mse", ["mae"])()
    unused: Any = None
    models = CompiledModels(unused)
    models.add(model)
    values = Growths({0: SUM}, tried={"train": 1}, parts=parts_digest(model)).packed(model)
    # The metrics of `compile` are built with the first training.
    model.predict(X, verbose=0)
    model.evaluate(X, Y, verbose=0)
    packed = {0: (1, values)}
    taken = models.taken_growths(packed, model)
    assert taken is not None
    assert taken.losses == {0: SUM}
    assert models.taken_growths(packed, model) is None
    assert models.taken_growths({0: (2, values)}, model) is None
    # A checkpoint of a version that did not keep them.
    without = {name: value for name, value in values.items() if name != "parts"}
    assert models.taken_growths({0: (1, without)}, model) is None
    model.add(AddsLater())
    assert models.taken_growths({0: (1, values)}, model) is None


def test_a_process_that_joins_again_takes_the_trials_of_a_changed_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has tried the model before the program added a layer; the members have tried it afterwards."""
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model, _ = one_output("mse")()
    model.fit(X, Y, batch_size=29, verbose=0)
    model.add(AddsLater())
    members = replace(growths_of(model), parts=parts_digest(model), names=("the members' name",))
    monkeypatch.setattr(Snapshots, "growths", lambda self, model: members)
    monkeypatch.setattr(Trial, "measure", lambda self, kinds: pytest.fail("it has tried the model"))
    model.fit(X, Y, batch_size=29, verbose=0)
    assert growths_of(model) is members


def test_the_metrics_of_a_compiled_model_within_another_one_are_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of the outer model does not update them, and trying it takes seconds on JAX."""
    tried: list[Any] = []
    monkeypatch.setattr(StepTrial, "_rounds", lambda self, *arguments: tried.append(arguments) or [])
    with lockstep.MultiWorkerMirroredStrategy().scope():
        inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        inner.compile("sgd", "mse", metrics=["mae"])
        outer = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), inner])
        outer.compile("sgd", "mse")
    outer.fit(X, Y, batch_size=29, verbose=0)
    assert tried == []
