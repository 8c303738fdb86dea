"""Losses and metrics that compare the examples of a batch have the numbers of plain Keras on any replicas."""

import argparse
import collections
import inspect
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import ModelError
from lockstep.keras.backends.adapter import adapter
from lockstep.keras.backends.growth import MEAN, SUM, growths_of, set_growths
from lockstep.keras.backends.multi_update import EndOfRound
from lockstep.keras.backends.whole_batch import StepGathers, computing_with
from lockstep.keras.choices import Choices
from lockstep.keras.fit import trials
from lockstep.keras.fit.metric_states import keeps_examples
from lockstep.keras.fit.tried_rows import TriedBatch
from lockstep.keras.private.common import compiled_loss
from lockstep.worker import job
from lockstep.worker.job import Job

ops = keras.ops
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(29, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
LABELS = (np.arange(29) % 3).astype("int32")[:, None]
WEIGHTS = np.linspace(0.2, 2, 29).astype("float32")

WHOLE = slice(27)
"""The rows of three whole batches: the shares of replicas have one size, for which JAX compiles."""

EQUAL_AT_FIRST = np.where(np.arange(29)[:, None] < 9, 0, LABELS)
"""In the first batch, all labels are equal."""

Built = tuple[keras.Model, Any]


def contrast(y: Any, p: Any) -> Any:
    alike = ops.cast(ops.equal(y, ops.transpose(y)), p.dtype)
    likely = ops.log_softmax(ops.matmul(p, ops.transpose(p)))
    return -ops.mean(ops.sum(alike * likely, axis=1) / ops.sum(alike, axis=1))


def hinge(y: Any, p: Any) -> Any:
    """The loss is zero for examples with one label."""
    same = ops.equal(y, ops.transpose(y))
    distances = ops.sum(ops.square(p[:, None] - p[None]), axis=-1)
    farthest = ops.max(ops.where(same, distances, 0.0), axis=1)
    return ops.mean(ops.relu(farthest - ops.min(ops.where(same, 1e6, distances), axis=1) + 0.5))


def mean_error(y: Any, p: Any) -> Any:
    """Keras multiplies one number by the mean of the sample weights."""
    return ops.mean(ops.square(y - p))


def largest_error(y: Any, p: Any) -> Any:
    return ops.max(ops.square(ops.cast(y, p.dtype) - p)) / 16


def f1(y: Any, p: Any) -> Any:
    y, p = ops.cast(y > 0, "float32"), ops.sigmoid(p)
    return 2 * ops.sum(y * p) / (ops.sum(y) + ops.sum(p))


def hidden(**options: Any) -> Any:
    return keras.layers.Dense(3, activation="tanh", **options)


def compiled(model: keras.Model, loss: Any, optimizer: Any = None, **options: Any) -> keras.Model:
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss, **options)
    return model


def one_output(
    loss: Any, *layers: Any, y: Any = LABELS, units: int = 2, **options: Any
) -> Callable[[], Built]:
    def build() -> Built:
        parts = [layer() for layer in layers] or [hidden()]
        model = keras.Sequential([keras.Input((4,)), *parts, keras.layers.Dense(units)])
        return compiled(model, loss, **{name: make() for name, make in options.items()}), y

    return build


def two_outputs() -> Built:
    inputs = keras.Input((4,))
    shared = hidden(kernel_regularizer="l2")(inputs)
    heads = [keras.layers.Dense(2, name="first")(shared), keras.layers.Dense(1, name="second")(shared)]
    model = keras.Model(inputs, heads)
    losses = [contrast, keras.losses.MeanSquaredError(reduction="sum")]
    return compiled(model, losses, loss_weights=[0.5, 0.01]), [LABELS, Y]


def masked() -> Built:
    """Rows have unequal numbers of masked times."""
    positive = keras.layers.ReLU()
    model = keras.Sequential(
        [
            keras.Input((4,)),
            positive,
            keras.layers.Reshape((4, 1)),
            keras.layers.Masking(0.0),
            keras.layers.Dense(1, "sigmoid"),
        ]
    )
    return compiled(model, keras.losses.Dice()), np.repeat(Y[:, None] > 0, 4, axis=1).astype("float32")


class Masks(keras.layers.Layer):
    """Masks values below a limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit, self.supports_masking = limit, True

    def call(self, inputs: Any) -> Any:
        return inputs * 1

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return inputs[..., 0] > self.limit


def two_masks() -> Built:
    """Two losses whose denominators differ."""
    inputs = keras.Input((4,))
    times = keras.layers.Reshape((4, 1))(inputs)
    dense = keras.layers.Dense(1)
    model = keras.Model(inputs, [dense(Masks(0.0)(times)), dense(Masks(0.7)(times))])
    y = np.repeat(Y[:, None], 4, axis=1)
    return compiled(model, "mse", keras.optimizers.SGD(0.01)), [y, y]


def segmented() -> Built:
    """Parts of a batch have nearly the same share of positive pixels, and so nearly the same loss."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(256, activation="tanh", trainable=False),
            keras.layers.Reshape((16, 16, 1)),
            keras.layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    pixels = np.random.default_rng(1).normal(size=(29, 16, 16, 1)) > 0.5
    return compiled(model, keras.losses.Dice()), pixels.astype("float32")


class AddsMean(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(ops.mean(ops.square(x)))
        return x


class Warm(keras.Sequential):
    """A loss with a weight of its own, a temperature, which also uses the inputs."""

    def build(self, shape: Any = None) -> None:
        super().build(shape)
        self.temperature = self.add_weight(name="temperature", shape=(), initializer="ones")

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        return contrast(y, y_pred * self.temperature + ops.mean(x, axis=0)[:2]) + sum(self.losses)


def warm() -> Built:
    return compiled(
        Warm([keras.Input((4,)), hidden(kernel_regularizer="l2"), keras.layers.Dense(2)]), None
    ), LABELS


class Queues(keras.Sequential):
    """Compares outputs with those of earlier batches, and counts examples."""

    def build(self, shape: Any = None) -> None:
        super().build(shape)
        self.queue = self.add_weight(name="queue", shape=(12, 2), initializer="ones", trainable=False)
        self.seen = self.add_weight(name="seen", shape=(), initializer="zeros", trainable=False)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        before = self.queue * 1
        self.queue.assign(ops.concatenate([ops.stop_gradient(y_pred), before])[:12])
        self.seen.assign_add(ops.cast(ops.shape(y_pred)[0], "float32"))
        return ops.mean(ops.logsumexp(ops.matmul(y_pred, ops.transpose(before)), axis=1))


def with_queue() -> Built:
    return compiled(Queues([keras.Input((4,)), keras.layers.Dense(2)]), None), LABELS


class Hits(keras.Sequential):
    """A metric of the model's own, updated with all rows, is zero in the first batch."""

    def build(self, shape: Any = None) -> None:
        super().build(shape)
        self.hits = keras.metrics.Mean(name="hits")

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        self.hits.update_state(ops.cast(ops.equal(y, 2), "float32"))
        return contrast(y, y_pred)


def with_hits() -> Built:
    return compiled(Hits([keras.Input((4,)), keras.layers.Dense(2)]), None), EQUAL_AT_FIRST


class Combined(keras.metrics.Metric):
    """Its state is not a sum: it combines a number for each batch."""

    def __init__(self, combine: Any, start: float = 0) -> None:
        super().__init__(name="combined")
        self.combine, self.start = combine, start
        self.value = self.add_variable((), keras.initializers.Constant(start))

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.value.assign(self.combine(self.value, ops.max(ops.abs(ops.cast(y, p.dtype) - p))))

    def reset_state(self) -> None:
        self.value.assign(self.start)

    def result(self) -> Any:
        return self.value * 1


class Median(keras.metrics.Metric):
    """Keeps all errors in Python."""

    def __init__(self) -> None:
        super().__init__(name="median")
        self.errors: list[Any] = []

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.errors.append(ops.convert_to_numpy(ops.abs(y - p)))


class Counts(keras.metrics.Metric):
    """Keeps a number in Python that does not depend on examples."""

    batches = 0

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.batches += 1


def test_examples_that_a_metric_keeps_in_python_are_seen() -> None:
    updates = [[((X[rows], X[rows] / 2), {})] for rows in (slice(4), slice(4, 8))]
    metric = Median()
    assert keeps_examples(metric, *updates)
    assert metric.errors == []
    assert not keeps_examples(Counts(name="counts"), *updates)


def last(value: Any, batch: Any) -> Any:
    return batch


def discounted(value: Any, batch: Any) -> Any:
    return 0.9 * value + 0.1 * batch


def multiplied(value: Any, batch: Any) -> Any:
    return value * (1 + batch)


def of_metric(combine: Any, start: float = 0) -> Callable[[], Built]:
    return one_output("mse", y=Y, units=1, metrics=lambda: [Combined(combine, start)])


class OwnStep(keras.Sequential):
    """Updates a metric in a step of its own."""

    def build(self, shape: Any = None) -> None:
        super().build(shape)
        self.own = Combined(ops.maximum)

    @property
    def metrics(self) -> list[Any]:
        return [self.own]

    def updated(self, metrics: Any, y: Any, p: Any) -> tuple[dict[str, Any], Any]:
        metrics = self.own.stateless_update_state(metrics, y, p)
        return {"own": self.own.stateless_result(metrics)}, metrics

    def train_step(self, state: Any, data: Any) -> Any:
        weights, others, slots, metrics = state
        x, y = data

        def loss_of(weights: Any) -> Any:
            p, _ = self.stateless_call(weights, others, x)
            return ops.mean(ops.square(p - y)), p

        (_, p), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        logs, metrics = self.updated(metrics, y, p)
        return logs, (weights, others, slots, metrics)

    def test_step(self, state: Any, data: Any) -> Any:
        weights, others, metrics = state
        x, y = data
        p, _ = self.stateless_call(weights, others, x)
        logs, metrics = self.updated(metrics, y, p)
        return logs, (weights, others, metrics)


def with_own_step() -> Built:
    return compiled(OwnStep([keras.Input((4,)), hidden(), keras.layers.Dense(1)]), None), Y


class OwnMaximum(keras.Sequential):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "largest": ops.max(ops.abs(y_pred)), "of inputs": ops.max(x)}


class Assigns(keras.Sequential):
    """Changes the state of a metric without an update."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.own.value.assign_add(ops.max(y_pred))
        return self.get_metrics_result()


def assigning() -> Built:
    model = Assigns([keras.Input((4,)), keras.layers.Dense(1)])
    model.own = Combined(ops.add)
    return compiled(model, "mse"), Y


def with_own_maximum() -> Built:
    model = OwnMaximum([keras.Input((4,)), keras.layers.Dense(2)])
    return compiled(model, contrast, metrics=["mae"]), LABELS


class Gathers(keras.Sequential):
    """A step of its own, whose loss compares the outputs of all replicas, and adds a mean of the own ones."""

    def train_step(self, state: Any, data: Any) -> Any:
        weights, others, slots, metrics = state
        x, y = data

        def loss_of(weights: Any) -> Any:
            p, _ = self.stateless_call(weights, others, x)
            (rows,) = lockstep.gather((p,))
            labels = lockstep.gather({"y": y})["y"]
            return contrast(labels, rows) + ops.mean(ops.square(p))

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return {"loss": loss}, (weights, others, slots, metrics)


def gathering() -> Built:
    return compiled(Gathers([keras.Input((4,)), hidden(), keras.layers.Dense(2)]), None), LABELS


PROGRAMS: dict[str, Callable[[], Built]] = {
    "a loss": one_output(contrast),
    "a loss that is no number of classes": one_output(largest_error, y=Y, units=1),
    "equal labels at first": one_output(hinge, y=EQUAL_AT_FIRST),
    "no examples of a class at first": one_output(keras.losses.Dice(), y=1.0 * (EQUAL_AT_FIRST > 0), units=1),
    "regularizers": one_output(
        contrast,
        lambda: hidden(kernel_regularizer="l2", activity_regularizer="l1"),
        AddsMean,
    ),
    "a loss of Keras": one_output(keras.losses.CosineSimilarity(axis=0), y=Y, units=1),
    "a loss scale": one_output(
        contrast, optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    ),
    "accumulation": one_output(
        contrast, optimizer=lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    ),
    "not compiled": one_output(contrast, run_eagerly=lambda: True),
    "several steps per call": one_output(contrast, steps_per_execution=lambda: 2),
    "two losses": two_outputs,
    "a mask": masked,
    "two masks": two_masks,
    "a segmentation": segmented,
    "a loss of the model's own": warm,
    "a queue of outputs": with_queue,
    "a metric that is zero at first": with_hits,
    "a metric": one_output("mse", y=Y, units=1, metrics=lambda: [f1, "mae"]),
    "a metric of Keras": one_output(
        "mse", y=Y, units=1, metrics=lambda: [keras.metrics.PearsonCorrelation(axis=0)]
    ),
    "a loss and a metric": one_output(contrast, metrics=lambda: [f1, Combined(ops.maximum)]),
    "a minimum": of_metric(ops.minimum, 1e9),
    "the last batch": of_metric(last),
    "a discounted mean": of_metric(discounted),
    "a product": of_metric(multiplied, 1),
    "a metric of a step": with_own_step,
    "a metric that is assigned": assigning,
    "figures": with_own_maximum,
    "gather": gathering,
}

QUICK = {"a loss and a metric"}
SLOW = {
    *("a loss", "a loss of Keras", "a metric", "a metric of Keras"),
    *("a discounted mean", "a product", "a minimum", "the last batch", "two masks"),
}
"""Their parts are those of others."""


def results(
    build: Callable[[], Built], scope: Any, fit: Any, evaluate: Any, weights: Any = None
) -> list[float]:
    """Return the figures and weights of a training; of the last batch, some replicas have no examples."""
    keras.utils.set_random_seed(5)
    with scope:
        model, y = build()
    options = {"sample_weight": weights, "batch_size": 9, "verbose": 0}
    history = fit(model, X, y, epochs=2, shuffle=False, **options).history
    figures = [value for _, values in sorted(history.items()) for value in values]
    if not isinstance(model, Gathers):
        figures += np.ravel(evaluate(model, X, y, **options)).tolist()
    return [*figures, *np.concatenate([np.ravel(weight) for weight in model.get_weights()]).tolist()]


def assert_plain(build: Callable[[], Built], weights: Any = None, **options: Any) -> None:
    """Replicas have the numbers of plain Keras."""
    # It replaces the methods.
    strategy = lockstep.MultiWorkerMirroredStrategy(**options)
    methods = keras.Model.fit, keras.Model.evaluate
    plain = results(build, nullcontext(), *map(inspect.unwrap, methods), weights)
    found = results(build, strategy.scope(), *methods, weights)
    np.testing.assert_allclose(found, plain, rtol=2e-5, atol=2e-6)


@pytest.mark.slow(*SLOW)
@pytest.mark.ci(*PROGRAMS.keys() - QUICK - SLOW)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_compares_examples_has_the_numbers_of_plain_keras(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_plain(PROGRAMS[name])
    assert "per replica" not in capfd.readouterr().err


@pytest.mark.ci
def test_weights_of_examples_are_those_of_the_whole_batch(capfd: pytest.CaptureFixture[str]) -> None:
    assert_plain(PROGRAMS["a loss and a metric"], WEIGHTS)
    assert "per replica" not in capfd.readouterr().err


@pytest.mark.ci("a loss and a metric")
@pytest.mark.parametrize("name", ["a loss and a metric", "a loss of one number"])
def test_weights_may_come_and_go(name: str) -> None:
    """A `fit` without weights, one with them, another without: the rows that are gathered differ."""
    build = {**PROGRAMS, "a loss of one number": one_output(mean_error, y=Y, units=1)}[name]

    def trained(scope: Any, fit: Any) -> list[Any]:
        keras.utils.set_random_seed(5)
        with scope:
            model, y = build()
        options = {"batch_size": 9, "shuffle": False, "verbose": 0}
        if name == "a loss of one number":
            fit(model, X, y, validation_data=(X, y, WEIGHTS), **options)
        logs = [fit(model, X, y, sample_weight=w, **options).history for w in (None, WEIGHTS, None)]
        return [*[v for log in logs for _, v in sorted(log.items())], *map(np.ravel, model.get_weights())]

    strategy = lockstep.MultiWorkerMirroredStrategy()
    plain = trained(nullcontext(), inspect.unwrap(keras.Model.fit))
    for value, other in zip(trained(strategy.scope(), keras.Model.fit), plain, strict=True):
        np.testing.assert_allclose(value, other, rtol=2e-5, atol=2e-6)


class Weighted(keras.utils.PyDataset):
    def __init__(self, *arrays: Any) -> None:
        super().__init__()
        self._arrays = arrays

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return tuple(array[9 * index : 9 * index + 9] for array in self._arrays)


@pytest.mark.parametrize(
    "given", ["a dataset", "a dataset to validate with", "weights by class", "weights of one batch"]
)
def test_the_first_weights_may_come_later(given: str) -> None:
    """Keras multiplies a loss of one number by the mean of the weights."""
    x, labels, weights = X[WHOLE], 1.0 * (X[WHOLE, :1] > 0), WEIGHTS[WHOLE]

    def trained(scope: Any, fit: Any, train_on_batch: Any) -> Any:
        keras.utils.set_random_seed(5)
        with scope:
            model, _ = one_output(mean_error, y=Y, units=1)()
        options = {"batch_size": 9, "shuffle": False, "verbose": 0}
        if given == "a dataset to validate with":
            data = Weighted(x, labels, weights)
            return fit(model, x, labels, validation_data=data, epochs=2, **options).history["val_loss"]
        if given == "a dataset":
            fit(model, Weighted(x, labels), shuffle=False, verbose=0)
            fit(model, Weighted(x, labels, weights), shuffle=False, verbose=0)
            return list(map(np.ravel, model.get_weights()))
        fit(model, x, labels, **options)
        by_class = {} if given == "weights of one batch" else {"class_weight": {0: 0.3, 1: 2.0}}
        of_rows = () if by_class else (weights[:9],)
        for _ in range(2):
            train_on_batch(model, x[:9], labels[:9], *of_rows, **by_class)
        return list(map(np.ravel, model.get_weights()))

    # It replaces the methods.
    strategy = lockstep.MultiWorkerMirroredStrategy()
    methods = keras.Model.fit, keras.Model.train_on_batch
    plain = trained(nullcontext(), *map(inspect.unwrap, methods))
    found = trained(strategy.scope(), *methods)
    for value, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(value, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("loss", ["mse", contrast])
def test_a_loss_scale_falls_no_lower_than_in_one_process(loss: Any) -> None:
    """Gradients of rows are as large as in one process, and their sums, over fewer rows, are not larger."""

    def scale(scope: Any, fit: Any) -> float:
        keras.utils.set_random_seed(5)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**30)
        with scope:
            last = keras.layers.Dense(2, dtype="mixed_float16")
            model = keras.Sequential([keras.Input((4,)), hidden(dtype="mixed_float16"), last])
            model.compile(optimizer, loss)
        fit(model, X, LABELS, batch_size=9, epochs=8, shuffle=False, verbose=0)
        return float(optimizer.dynamic_scale)

    strategy = lockstep.MultiWorkerMirroredStrategy()
    plain = scale(nullcontext(), inspect.unwrap(keras.Model.fit))
    assert scale(strategy.scope(), keras.Model.fit) >= plain


@pytest.mark.ci
@pytest.mark.parametrize("wanted", [None, "job", "strategy"])
def test_large_rows_are_exchanged_only_if_the_job_or_a_strategy_says_so(
    wanted: str | None,
    job_of_one_worker: Job,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(job_of_one_worker, "exact_batch", wanted == "job")
    monkeypatch.setattr(trials, "LARGEST_EXCHANGE", 100)
    with nullcontext() if wanted else pytest.raises(AssertionError):
        assert_plain(PROGRAMS["a loss"], exact_batch=wanted == "strategy")
    named = "per replica: the loss contrast (its rows, 0 MiB a step, are exchanged only with --exact-batch)"
    assert (named in capfd.readouterr().err) != bool(wanted)


def test_a_metric_that_does_not_add_up_is_refused_if_its_rows_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "LARGEST_EXCHANGE", 100)
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model, y = PROGRAMS["a minimum"]()
    refused = r"does not start from zero: .*; its rows, 0 MiB a step, are exchanged only with --exact-batch"
    with pytest.raises(ModelError, match=refused):
        model.fit(X, y, verbose=0)


def test_the_means_of_outputs_count_a_replicas_share_of_the_rows() -> None:
    """Each replica has all rows; in a graph for any number of rows, a mean gets the share itself."""
    model, y = two_outputs()
    earlier: list[Any] = []
    for _ in range(2):
        gathers = StepGathers(earlier, 0, 0.25, len(X))
        with computing_with(model, gathers, frozenset({"loss"})), suppress(EndOfRound):
            model.compute_loss(X, [ops.convert_to_tensor(part) for part in y], model(X))
        earlier = [gathers.arrays]
    counts = [float(metric.count) for metric in compiled_loss(model).metrics]
    assert counts == [len(X) / 4] * 2


class OwnLargest(keras.Sequential):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        return largest_error(y, y_pred)


def own_largest() -> Built:
    return compiled(OwnLargest([keras.Input((4,)), keras.layers.Dense(1)]), None), Y


@pytest.mark.parametrize(
    ("build", "rows"),
    [pytest.param(warm, np.arange(9), marks=pytest.mark.slow), (own_largest, np.zeros(9, int))],
)
def test_the_loss_of_an_evaluation_is_exact_before_and_after_training(
    build: Callable[[], Built], rows: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Equal rows hide from the trial of the first evaluation that the loss compares examples."""

    def losses(scope: Any, fit: Any, evaluate: Any) -> list[float]:
        keras.utils.set_random_seed(5)
        with scope:
            model, y = build()
        options = {"batch_size": 9, "verbose": 0}
        before = evaluate(model, X[rows], y[rows], **options)
        history = fit(model, X[:9], y[:9], validation_data=(X[9:18], y[9:18]), **options).history
        return [before, *history["loss"], *history["val_loss"]]

    strategy = lockstep.MultiWorkerMirroredStrategy()
    methods = keras.Model.fit, keras.Model.evaluate
    plain = losses(nullcontext(), *map(inspect.unwrap, methods))
    np.testing.assert_allclose(losses(strategy.scope(), *methods), plain, rtol=2e-5)
    assert "per replica" not in capfd.readouterr().err


class CountsCalls(keras.layers.Layer):
    calls = 0

    def call(self, x: Any) -> Any:
        type(self).calls += 1
        return x


def test_evaluating_takes_one_forward_pass() -> None:
    """The loss, the metrics and what layers add to the loss follow from its outputs."""
    with lockstep.MultiWorkerMirroredStrategy().scope():
        added = hidden(kernel_regularizer="l2", activity_regularizer="l1")
        model = keras.Sequential([keras.Input((4,)), added, CountsCalls(), keras.layers.Dense(2)])
        compiled(model, contrast, metrics=[f1], run_eagerly=True)
    evaluate = partial(model.evaluate, X[:9], LABELS[:9], batch_size=9, verbose=0)
    # The first step is tried before.
    found, calls = evaluate(), CountsCalls.calls
    evaluate()
    assert CountsCalls.calls == calls + 3
    plain = inspect.unwrap(keras.Model.evaluate)(model, X[:9], LABELS[:9], batch_size=9, verbose=0)
    np.testing.assert_allclose(found, plain, rtol=1e-5)


class TwoViews(keras.Sequential):
    """Has two rows for each example, first those of one view, then those of the other."""

    def call(self, x: Any, training: Any = None, mask: Any = None) -> Any:
        return super().call(ops.concatenate([x, ops.sin(x)]), training=training)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        first, second = ops.split(y_pred, 2)
        return -ops.mean(ops.diag(ops.log_softmax(ops.matmul(first, ops.transpose(second)))))


def test_outputs_that_are_not_those_of_examples_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = TwoViews([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd")
    model.fit(X, batch_size=8, verbose=0)
    assert "computed per replica: compute_loss of TwoViews" in capfd.readouterr().err


class GathersViews(Gathers):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        return ops.mean(lockstep.gather(ops.concatenate([y_pred, y_pred])))

    train_step = keras.Sequential.train_step


def test_values_that_are_not_those_of_examples_are_refused() -> None:
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = GathersViews([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd")
    with pytest.raises(ModelError, match=r"lockstep\.gather got a value of the shape \[6, 2\]"):
        model.fit(X[:9], LABELS[:9], batch_size=9, verbose=0)


class Predicts(keras.Sequential):
    def predict_step(self, state: Any, data: Any) -> Any:
        outputs, others = super().predict_step(state, data)
        return lockstep.gather(outputs), others


def test_gather_outside_of_training() -> None:
    np.testing.assert_array_equal(lockstep.gather(X), X)
    strategy = lockstep.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = Predicts([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile()
    with pytest.raises(ModelError, match=r"lockstep\.gather in predict_step"):
        model.predict(X, verbose=0)
    with pytest.raises(ModelError, match=r"get_replica_context\(\)\.all_gather"):
        strategy.run(lambda: lockstep.gather(X))


class Weighs(keras.Sequential):
    """A loss whose comparison has a weight, which is 0 at first."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        return ops.mean(ops.square(y_pred)) + self.weight() * contrast(y, y_pred)


class ByAttribute(Weighs):
    later = 0.0

    def weight(self) -> Any:
        return self.later

    def change(self) -> None:
        self.later = 0.5


class ByVariable(Weighs):
    def build(self, shape: Any = None) -> None:
        super().build(shape)
        self.later = self.add_weight(name="later", shape=(), initializer="zeros", trainable=False)

    def weight(self) -> Any:
        return self.later

    def change(self) -> None:
        self.later.assign(0.5)


class ByCount(Weighs):
    def build(self, shape: Any = None) -> None:
        super().build(shape)
        self.epoch = self.add_weight(
            name="epoch", shape=(), initializer="zeros", trainable=False, dtype="int32"
        )

    def weight(self) -> Any:
        return ops.cast(ops.relu(self.epoch - 500) / 100, "float32")

    def change(self) -> None:
        self.epoch.assign(600)


def by_function(model: Any = None) -> keras.Model:
    """The weight is in a container of an enclosing function."""
    weights = {"later": 0.0}

    def weighed(y: Any, p: Any) -> Any:
        return ops.mean(ops.square(p)) + weights["later"] * contrast(y, p)

    model = keras.Sequential([keras.Input((4,)), hidden(), keras.layers.Dense(2)])
    model.compile("sgd", weighed, run_eagerly=True)
    model.change = lambda: weights.update(later=0.5)
    return model


class AddsSum(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.later = self.add_weight(name="later", shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.add_loss(self.later * ops.sum(ops.square(x)))
        return x


def by_layer() -> keras.Model:
    added = AddsSum()
    model = keras.Sequential([keras.Input((4,)), hidden(), added, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.change = lambda: added.later.assign(0.01)
    return model


class ByTruth(Weighs):
    """A truth value in a container decides which code runs."""

    def __init__(self, layers: Any) -> None:
        super().__init__(layers)
        self.terms = {"contrast": False}

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        return contrast(y, y_pred) if self.terms["contrast"] else ops.mean(ops.square(y_pred))

    def change(self) -> None:
        self.terms["contrast"] = not self.terms["contrast"]


def weighing(kind: Any, **options: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = kind([keras.Input((4,)), hidden(), keras.layers.Dense(2)])
        model.compile("sgd", **options)
        return model

    return build


OPTIONS = argparse.Namespace(later=np.float32(0))


class ByOption(Weighs):
    def weight(self) -> Any:
        return OPTIONS.later

    def change(self) -> None:
        OPTIONS.later = 0.5


CHANGED_LATER = {
    "a variable": weighing(ByVariable),
    "a count": weighing(ByCount),
    "an attribute": weighing(ByAttribute, run_eagerly=True),
    "a variable of a function": by_function,
    "an option": weighing(ByOption, run_eagerly=True),
    "a sum of a layer": by_layer,
    "a truth value": weighing(ByTruth, run_eagerly=True),
}


@pytest.mark.ci("a count", "an option", "a variable of a function")
@pytest.mark.parametrize("kind", CHANGED_LATER)
def test_a_term_may_have_a_weight_of_zero_at_first(kind: str) -> None:
    """A callback raises it after the first epoch, long after a trial."""

    def trained(scope: Any, fit: Any) -> list[Any]:
        keras.utils.set_random_seed(5)
        OPTIONS.later = np.float32(0)
        with scope:
            model = CHANGED_LATER[kind]()
        changes = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.change())
        options = {"batch_size": 9, "epochs": 3, "shuffle": False, "verbose": 0, "callbacks": [changes]}
        losses = fit(model, X[WHOLE], LABELS[WHOLE], **options).history["loss"]
        return [losses, *map(np.ravel, model.get_weights())]

    strategy = lockstep.MultiWorkerMirroredStrategy()
    plain = trained(nullcontext(), inspect.unwrap(keras.Model.fit))
    for value, other in zip(trained(strategy.scope(), keras.Model.fit), plain, strict=True):
        np.testing.assert_allclose(value, other, rtol=2e-5, atol=2e-6)


class Chooses(Weighs):
    """Values of several kinds decide whether examples are compared."""

    compares: Any = False
    phase, count, helper, late = "mean", 0, argparse.Namespace(on=None), False

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        compares = self.compares or self.phase == "contrast" or self.count or self.helper.on or LEVEL
        compares = compares or Switches.on or SWITCHES.on
        if compares or getattr(self, "absent", None):
            return contrast(y, y_pred)
        return ops.mean(ops.square(y_pred))


LEVEL = False


class Switches:
    """Options in a class."""

    on = False


SWITCHES: Any = types.ModuleType("switches_of_a_program")
SWITCHES.on = False


def test_what_decides_is_seen_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = weighing(Chooses, run_eagerly=True)()
    choices = Choices(model)
    assert choices.look(model) == ""
    keys = set()
    changes = [("compares", True), ("phase", "contrast"), ("count", 1), ("late", True), ("absent", 1)]
    for name, value in changes:
        setattr(model, name, value)
        keys.add(choices.look(model))
        setattr(model, name, getattr(Chooses, name, 0))
        delattr(model, name)
        assert choices.look(model) == ""
    # No code names `late`.
    assert len(keys - {""}) == 4
    model.phase = "a text that no code contains"
    model.helper.on = 0.0
    helper = choices.look(model)
    model.helper.on = None
    assert helper not in keys
    monkeypatch.setattr(sys.modules[__name__], "LEVEL", True)
    assert choices.look(model) not in {"", helper, *keys}
    assert not choices.counts
    model.count = 3
    choices.look(model)
    model.count = 4
    choices.look(model)
    assert choices.counts == {"Chooses.count#1"}
    for place in (Switches, SWITCHES):
        before = choices.look(model)
        monkeypatch.setattr(place, "on", True)
        assert choices.look(model) != before


def test_a_count_that_changes_together_with_a_truth_value_is_seen() -> None:
    model = weighing(Chooses, run_eagerly=True)()
    model.compares, model.count = False, 3
    choices = Choices(model)
    model.compares, model.count = True, 4
    choices.look(model)
    assert choices.counts == {"Chooses.count#1"}


class DenseThatCounts(keras.layers.Dense):  # type: ignore[misc]
    calls = rows = 1

    def call(self, x: Any) -> Any:
        self.calls += 1
        self.rows += len(x.shape)
        return super().call(x)


def test_numbers_that_change_in_a_step_are_named_together(capfd: pytest.CaptureFixture[str]) -> None:
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), DenseThatCounts(2)])
        model.compile("sgd", "mse", run_eagerly=True)
    model.fit(X[WHOLE], Y[WHOLE], batch_size=9, verbose=0)
    notes = [line for line in capfd.readouterr().err.splitlines() if "later values" in line]
    named = "what depends on later values of DenseThatCounts.{} (possibly: it could not be tested)".format
    assert [note.partition("per replica: ")[2] for note in notes] == [f"{named('calls')}, {named('rows')}"]


@pytest.mark.parametrize("kind", [list, collections.deque, dict])
def test_a_container_that_grows_is_one_choice(kind: Any) -> None:
    model = weighing(Chooses, run_eagerly=True)()
    model.compares = kind()
    choices = Choices(model)
    keys = []
    for number in range(80):
        if kind is dict:
            model.compares[f"step {number}"] = number / 2
        else:
            model.compares.append(number / 2)
        keys.append(choices.look(model))
    assert keys[0] != ""
    assert set(keys) == {keys[0]}
    model.compares = [True, False]
    first = choices.look(model)
    model.compares.reverse()
    assert choices.look(model) != first


def test_a_resumed_process_takes_over_the_values_at_compile() -> None:
    """It has skipped the first `fit`, whose callback has changed a value before the second `compile`."""
    original, resumed = (weighing(Chooses, run_eagerly=True)() for _ in range(2))
    original.compares = resumed.compares = True
    first = Choices(original)
    assert not first.moved
    original.compares = False
    second, other = Choices(original, first), Choices(resumed)
    other.adopt(second.moved)
    resumed.compares = False
    assert other.look(resumed) == second.look(original) == ""
    original.compares = resumed.compares = True
    assert other.look(resumed) == second.look(original) != ""


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="steps are not compiled")
def test_a_process_that_joins_does_not_compile_with_other_values() -> None:
    with lockstep.MultiWorkerMirroredStrategy().scope():
        models = [weighing(Chooses)() for _ in range(2)]
    options = {"batch_size": 9, "shuffle": False, "verbose": 0}
    member, joins = models
    flips = keras.callbacks.LambdaCallback(on_train_begin=lambda *_: setattr(member, "phase", "contrast"))
    member.fit(X[WHOLE], LABELS[WHOLE], callbacks=[flips], **options)
    # The process that has compiled it may compile it for other rows.
    member.phase = "mean"
    member.fit(X[:13], LABELS[:13], **options)
    set_growths(joins, growths_of(member))
    # Callbacks often set numbers that no step reads.
    joins.count = 3
    text = "phase = contrast, and this process, which joins or resumes, has Chooses.phase = another text"
    with pytest.raises(ModelError, match=text):
        joins.fit(X, LABELS, **options)


def test_a_model_is_not_tried_with_datasets_of_replicas_in_the_middle() -> None:
    """A worker would read the dataset of another worker's replica for it."""
    strategy = lockstep.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = weighing(ByTruth, run_eagerly=True)()
    data = strategy.distribute_datasets_from_function(
        lambda context: [(X[i : i + 4], LABELS[i : i + 4]) for i in (0, 4, 8)]
    )
    flips = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: model.change())
    model.fit(data, steps_per_epoch=3, verbose=0, callbacks=[flips])
    name = "what depends on values of Python that change, where replicas have datasets"
    assert any(each.startswith(name) for each in growths_of(model).names)


EAGER: Any = {"run_eagerly": True}


@pytest.mark.ci("evaluated")
@pytest.mark.parametrize("when", ["begun", "batches", "evaluated"])
def test_a_step_follows_what_has_changed_since_the_trial(when: str) -> None:
    """A compiled step follows the values that it is traced with, which is after the trial."""

    def trained(scope: Any, unwrap: Any) -> list[Any]:
        keras.utils.set_random_seed(5)
        with scope:
            model = weighing(ByTruth, **(EAGER if when == "batches" else {}))()
        fit, evaluate, train = map(
            unwrap, (keras.Model.fit, keras.Model.evaluate, keras.Model.train_on_batch)
        )
        if when == "batches":
            losses = []
            for start in range(0, 27, 9):
                losses.append(train(model, X[start : start + 9], LABELS[start : start + 9]))
                model.change()
            return losses
        flips = keras.callbacks.LambdaCallback(on_train_begin=lambda *_: model.change())
        options = {"batch_size": 9, "shuffle": False, "verbose": 0}
        callbacks = [flips] if when == "begun" else []
        x, y = X[WHOLE], LABELS[WHOLE]
        losses = fit(model, x, y, epochs=2, callbacks=callbacks, **options).history["loss"]
        model.change()
        figure = evaluate(model, x, y, batch_size=9, verbose=0)
        return [*losses, figure, *fit(model, x, y, **options).history["loss"]]

    strategy = lockstep.MultiWorkerMirroredStrategy()
    plain = trained(nullcontext(), inspect.unwrap)
    np.testing.assert_allclose(trained(strategy.scope(), lambda method: method), plain, rtol=2e-5)


class Far(keras.Sequential):
    """In the first batch, all distances exceed the margin, so the mean is all there is."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        return ops.mean(ops.square(y_pred)) / 1000 + hinge(y, y_pred)


class FarNamed(Far):
    """The outputs have another name, and the signature is short."""

    def compute_loss(self, x: Any, y: Any, pred: Any, w: Any = None, **_: Any) -> Any:
        return super().compute_loss(x, y, pred)


@pytest.mark.parametrize("kind", [Far, FarNamed])
def test_a_margin_that_all_distances_exceed_does_not_hide_a_comparison(kind: Any) -> None:
    model = kind([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd")
    trial = trial_of(model, 30 * np.eye(4, dtype="float32")[LABELS[:9, 0]] + 0.01 * X[:9], LABELS[:9])
    assert (trial.exact, trial.names) == ([f"compute_loss of {kind.__name__}"], [])


class Options(Weighs):
    """A program that another value of one of its numbers ends, so its numbers are tried one by one."""

    later, limit, extra, writes = 0.0, 1.0, 0, False
    written: ClassVar[list[Any]] = []

    def weight(self) -> Any:
        for i in range(self.extra):
            self.written.append(i)
        if self.writes:
            self.written.append("text")
        if self.limit != 1:
            sys.exit()
        return self.later


def trial_of(model: Any, *rows: Any) -> trials.Trial:
    """Return a trial of a compiled model, after a step of plain Keras."""
    inspect.unwrap(keras.Model.train_on_batch)(model, *rows)
    trial = trials.Trial(job.current(), adapter().steps(), model, TriedBatch(lambda: rows), nullcontext)
    trial.measure(["train", "test"])
    return trial


def test_a_trial_does_not_start_code_that_the_program_does_not_run() -> None:
    trial = trial_of(weighing(Options, run_eagerly=True)(), X[:9], LABELS[:9])
    assert (trial.exact, trial.names) == (["compute_loss of Options"], [])
    assert Options.written == []


class Turns(Weighs):
    """A variable is the number of turns of a loop, which would not end with a large number."""

    def build(self, shape: Any = None) -> None:
        super().build(shape)
        self.later = self.add_weight(name="later", shape=(), initializer="zeros", trainable=False)
        self.turns = self.add_weight(
            name="turns", shape=(), initializer="ones", dtype="int32", trainable=False
        )

    def weight(self) -> Any:
        for _ in range(int(self.turns.value)):
            weight = self.later
        return weight


@pytest.mark.ci
def test_a_trial_ends_whatever_a_count_counts() -> None:
    trial = trial_of(weighing(Turns, run_eagerly=True)(), X[:9], LABELS[:9])
    assert (trial.exact, trial.names) == (["compute_loss of Turns"], [])


class Sums(keras.Metric):
    """Sums of values with signs, which cancel each other, and of their sizes."""

    def __init__(self) -> None:
        super().__init__(name="sums")
        self.sums = self.add_variable(shape=(2,), initializer="zeros", name="sums")

    def update_state(self, values: Any, *_: Any, **__: Any) -> None:
        for column in (values[:, 0], values[:, 1]):
            self.sums.assign_add(ops.stack([ops.sum(column), ops.sum(ops.abs(column))]))

    def result(self) -> Any:
        return self.sums[1]


class Scales(keras.Sequential):
    def build(self, shape: Any = None) -> None:
        super().build(shape)
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones", trainable=False)
        self.sums = Sums()

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.sums.update_state(self.scale * x)
        return {"sums": self.sums.result()}


def test_a_metric_adds_up_whatever_the_rounding_of_other_values() -> None:
    model = compiled(Scales([keras.Input((4,)), keras.layers.Dense(1)]), "mse")
    trial = trial_of(model, np.concatenate([X[:5], -X[:5]]), Y[:10])
    assert (trial.exact, trial.names) == ([], [])


def never(y: Any, p: Any) -> Any:
    return ops.mean(ops.relu(ops.square(p[:, :1] - ops.transpose(p[:, :1])) - 1e9))


class Never(keras.Sequential):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        return never(y, y_pred)


class Slightly(keras.Sequential):
    """Compares examples by a few percent of the loss."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        return ops.mean(ops.square(y_pred - y)) + 0.03 * ops.mean(ops.square(ops.mean(y_pred, axis=0)))


@pytest.mark.parametrize(
    ("model", "dtype", "options", "name"),
    [
        (Slightly, "mixed_bfloat16", {}, "compute_loss of Slightly"),
        (keras.Sequential, "float32", {"loss": never}, "the loss never"),
        (Never, "float32", {}, "compute_loss of Never"),
        (Queues, "float32", {}, "compute_loss of Queues"),
        (keras.Sequential, "float32", {"loss": "mse", "metrics": [never]}, "the metric never"),
        (keras.Sequential, "mixed_bfloat16", {"loss": hinge}, "the loss hinge"),
    ],
)
def test_what_a_trial_does_not_show_is_computed_from_the_whole_batch(
    model: Any, dtype: str, options: Any, name: str
) -> None:
    """A value is zero for all rows, is kept in a queue, or has the rounding of one layer's half precision."""
    built = model([keras.Input((4,)), hidden(dtype=dtype), keras.layers.Dense(2)])
    built.compile("sgd", **options)
    trial = trial_of(built, X[:9], np.zeros((9, 1 if options.get("loss") is hinge else 2), "float32"))
    assert (trial.exact, trial.names) == ([name], [])


class Constant(keras.layers.Layer):
    """Adds a constant of the precision in which it was built, and fails in another one as TensorFlow does."""

    def build(self, shape: Any) -> None:
        self.constant = ops.ones(shape[-1], dtype=self.compute_dtype)

    def call(self, x: Any) -> Any:
        if x.dtype != self.constant.dtype:
            raise TypeError
        return x + self.constant


def summed(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(y - p))


@pytest.mark.parametrize(
    ("loss", "exact", "growths"), [(summed, [], {0: SUM}), (contrast, ["the loss contrast"], {})]
)
def test_a_program_that_computes_only_in_half_precision_is_tried_in_it(
    loss: Any, exact: list[str], growths: dict[int, int]
) -> None:
    layers = [Constant(dtype="mixed_bfloat16"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", loss)
    trial = trial_of(model, X[:9], LABELS[:9].astype("float32"))
    assert (trial.exact, trial.names, trial.growths.losses) == (exact, [], growths)


class Rounded(keras.layers.Layer):
    """Casts to half precision itself."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3))

    def call(self, x: Any) -> Any:
        return ops.cast(ops.matmul(ops.cast(x, "bfloat16"), ops.cast(self.kernel, "bfloat16")), "float32")


def rounded_mean(y: Any, p: Any) -> Any:
    return ops.cast(ops.mean(ops.cast(ops.square(y - p), "bfloat16")), "float32")


class RoundedMean(keras.Sequential):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        return rounded_mean(y, y_pred)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "float32"])
@pytest.mark.parametrize(("kind", "loss"), [(keras.Sequential, rounded_mean), (RoundedMean, None)])
def test_casts_of_the_program_to_half_precision_are_not_named(kind: Any, loss: Any, dtype: str) -> None:
    model = kind([keras.Input((4,)), Rounded(dtype=dtype), keras.layers.Dense(1, dtype="float32")])
    model.compile("sgd", loss)
    trial = trial_of(model, X[:16], Y[:16])
    assert (trial.exact, trial.names) == ([], [])


def mean_of_known(y: Any, p: Any) -> Any:
    """Return a mean without the rows of which the label is not known."""
    known = ops.cast(ops.logical_and(ops.not_equal(y, -1), ops.not_equal(y, 255)), p.dtype)
    return ops.sum(ops.square(ops.cast(y, p.dtype) - p) * known) / ops.sum(known)


@pytest.mark.parametrize("ignored", [-1, 255])
def test_labels_that_a_program_ignores_may_come_after_the_tried_rows(ignored: int) -> None:
    labels = LABELS.copy()
    labels[20:24] = ignored
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", mean_of_known)
    trial = trial_of(model, X, labels)
    assert (trial.exact, trial.names) == (["the loss mean_of_known"], [])


def mean_of_numbered(y: Any, p: Any) -> Any:
    """Labels are a class of three, and a number: a mean without the rows whose number is 0 or 255."""
    weight = ops.take(ops.convert_to_tensor([1.0, 2.0, 3.0]), ops.cast(y[:, 0], "int32"))
    known = ops.cast(ops.logical_and(ops.not_equal(y[:, 1], 0), ops.not_equal(y[:, 1], 255)), p.dtype)
    return ops.sum(known * weight * ops.square(p[:, 0] - ops.cast(y[:, 1], p.dtype))) / ops.sum(known)


def mean_of_large(y: Any, p: Any) -> Any:
    """Labels are a large number, and a class: a mean without the rows whose class is 255."""
    known = ops.cast(ops.not_equal(y[:, 1], 255), p.dtype)
    return ops.sum(known * ops.square(p[:, 0] - ops.cast(y[:, 0], p.dtype) / 1000)) / ops.sum(known)


@pytest.mark.parametrize("loss", [mean_of_numbered, mean_of_large])
def test_elements_of_labels_may_have_different_ranges(loss: Any) -> None:
    """The program fails, or has no number, if an element has the label of another one."""
    numbers, classes = 1 + np.arange(29) * 7 % 40, np.arange(29) % 3
    if loss is mean_of_large:
        labels = np.stack([1000 + numbers, np.where(np.arange(29) > 25, 255, classes)], 1)
    else:
        labels = np.stack([classes, numbers], 1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", loss)
    trial = trial_of(model, X, labels.astype("int32"))
    assert (trial.exact, trial.names) == ([f"the loss {loss.__name__}"], [])


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        ([3, 4, 5, 6] * 7 + [255], [28]),
        ([3] * 8 + [7] * 8 + [5, 9, 2], [18, 17]),
        ([[[3.0, 3.0], [4.0, np.nan]]] * 16 + [[[-1.0, 5.0], [5.0, 5.0]]], [16]),
        ([[1000, 3], [500, 4]] * 8 + [[600, 255], [700, 5]], [16]),
        ([[-2.0, 3.0, 5.0, np.inf]] * 17, []),
        ([np.nan] * 17, []),
        ([True, False] * 9, []),
        ([[1], [2]], []),
    ],
)
def test_examples_with_extreme_labels_are_tried(labels: Any, numbers: list[int]) -> None:
    places = np.arange(len(labels))
    batch = TriedBatch(lambda: (places, np.array(labels), None)).with_extremes()
    if not numbers:
        assert batch is None
        return
    assert batch is not None
    x, y, _ = batch.whole.data
    np.testing.assert_array_equal(x, [*numbers, *places[len(numbers) : 16]])
    np.testing.assert_array_equal(y, np.array(labels)[ops.convert_to_numpy(x)])


def test_examples_with_extremes_of_several_labels_are_whole() -> None:
    labels = {"first": np.r_[np.zeros(16), 1, 2, 3], "second": np.r_[np.ones(17), 2, 1], "last": None}
    batch = TriedBatch(lambda: [np.arange(19), labels]).with_extremes()
    assert batch is not None
    x, y, _ = batch.whole.data
    np.testing.assert_array_equal(ops.convert_to_numpy(x)[:3], [18, 17, 2])
    np.testing.assert_array_equal(ops.convert_to_numpy(y["second"])[:3], [1, 2, 1])
    assert TriedBatch(lambda: [np.arange(19), None]).with_extremes() is None
    assert TriedBatch(lambda: np.arange(19)).with_extremes() is None


@pytest.mark.parametrize(
    ("labels", "tried"),
    [
        ([[3]] * 6, [[3], [3], [3], [0], [0], [3]]),
        ([[0.0], [0.0]], [[0.0], [1.0]]),
        ([[0, 1, 0]] * 3, [[0, 1, 0], [0, 0, 1], [0, 1, 0]]),
        ([[0], [2]], [[0], [2]]),
        ([[2]], [[2], [0]]),
    ],
)
def test_the_rows_of_a_trial_have_several_labels(labels: Any, tried: Any) -> None:
    batch = TriedBatch(lambda: (X[: len(labels)], {"y": np.array(labels)}, None))
    x, y, _ = batch.whole.data
    np.testing.assert_array_equal(y["y"], tried)
    assert len(x) == len(tried) == sum(part.count for part in batch.parts)
    assert (batch.examples, batch.weighs) == (len(labels), False)


def mean_of_one_hot(y: Any, p: Any) -> Any:
    return -ops.sum(y * ops.log_softmax(p)) / ops.sum(y)


def test_labels_with_a_probability_for_each_class_have_no_padding() -> None:
    labels = np.eye(3, dtype="float32")[LABELS[:9, 0]]
    padded = TriedBatch(lambda: (X[:9], labels)).padded()
    assert padded is not None
    x, y, _ = padded.whole.data
    np.testing.assert_array_equal(y, labels)
    assert not np.any(ops.convert_to_numpy(x)[:3, 2:])
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", mean_of_one_hot)
    trial = trial_of(model, X[:9], labels)
    assert (trial.exact, trial.names, trial.growths.losses) == ([], [], {0: MEAN})


class Triplet(NamedTuple):
    anchor: Any
    labels: Any
    positive: Any
    negative: Any


@pytest.mark.parametrize("form", [tuple, Triplet])
def test_the_rows_of_a_trial_have_the_form_of_the_batch(form: Any) -> None:
    """A step of the program's own may get any number of parts."""
    parts = X[:4], np.zeros(4, int), X[4:8], X[8:12]
    given = form(*parts) if form is Triplet else parts
    batch = TriedBatch(lambda: given)
    assert not batch.weighs
    assert type(batch.whole.batch) is form
    assert len(batch.whole.batch) == 4
