"""A step of replicas is compared with plain Keras: what is equal, what is named, and every planted fault."""

import errno
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jax
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.data import batch as batches
from lockstep.data.batch import GlobalBatch
from lockstep.keras.backends.contract import GATHERED
from lockstep.keras.backends.jax import JaxProgram
from lockstep.keras.fit import global_step, introductions, mirrored, outputs
from lockstep.keras.fit.compared_step import ComparedStep
from lockstep.keras.fit.deviations import deviation
from lockstep.keras.fit.global_step import GlobalStep
from lockstep.keras.fit.part_names import explaining
from lockstep.keras.fit.plain_function import rounded_outputs, single_precision
from lockstep.keras.fit.random_rows import equal_draws
from lockstep.keras.fit.step_comparison import StepComparison
from lockstep.keras.fit.trials import Trial
from lockstep.keras.private.common import mask_of
from lockstep.keras.rounds import Round
from lockstep.observability.events import CheckEnded, Event, StepCompared
from lockstep.worker.job import Job

ops = keras.ops
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(29, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
WEIGHTS = np.linspace(0.2, 2, 29).astype("float32")


@pytest.fixture(autouse=True)
def checks(job_of_one_worker: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the job of this process check scripts."""
    check("first", job_of_one_worker, monkeypatch)


def check(calls: str, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(job.settings, checks=calls)
    monkeypatch.setattr(job, "_context", replace(job.context, settings=settings))


@pytest.fixture
def compared(published: list[Event]) -> Callable[[], list[StepCompared]]:
    """Return the comparisons since the last call."""
    published.clear()

    def take() -> list[StepCompared]:
        found = [event for event in published if isinstance(event, StepCompared)]
        published.clear()
        return found

    return take


def built(
    *layers: Any, loss: Any = "mse", optimizer: Any = None, cls: Any = keras.Sequential, **options: Any
) -> keras.Model:
    keras.utils.set_random_seed(3)
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = cls([keras.Input((4,)), *layers, keras.layers.Dense(1, name="last")])
        model.compile(optimizer or keras.optimizers.Adam(0.01), loss, **options)
    return model


def hidden(**options: Any) -> Any:
    return keras.layers.Dense(4, activation="tanh", name="hidden", **options)


def fit(model: keras.Model, y: Any = Y, **options: Any) -> None:
    model.fit(X, y, **{"batch_size": 29, "verbose": 0} | options)


def differing(compared: list[StepCompared]) -> dict[str, str]:
    """Return the deviations by part; each step must have been compared."""
    assert compared
    assert not [one.reason for one in compared if one.reason]
    return {part.part: part.deviation for one in compared for part in one.differences}


class Squares(keras.layers.Layer):
    """Adds a sum over the examples to the loss, and keeps a mean of them."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x))
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class Mean(keras.layers.Layer):
    """Keeps a mean of the examples."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any) -> Any:
        self.mean.assign(ops.mean(x))
        return x


class Rounding(keras.layers.Layer):
    """Casts to half precision itself."""

    def call(self, x: Any) -> Any:
        return ops.cast(ops.square(ops.cast(x, "bfloat16")), "float32")


class OnlyHalf(keras.layers.Layer):
    """Fails in another precision."""

    def call(self, x: Any) -> Any:
        if keras.backend.standardize_dtype(x.dtype) != "bfloat16":
            raise TypeError
        return x


class HalfProduct(OnlyHalf):
    """Has a weight."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")

    def call(self, x: Any) -> Any:
        return ops.tanh(ops.matmul(super().call(x), ops.cast(self.kernel, x.dtype)))


def first_error(y: Any, p: Any) -> Any:
    """Return one number for a batch."""
    return ops.mean(ops.abs(y - p)[:, 0])


class WithFigure(keras.Sequential):
    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {**logs, "labels": ops.mean(data[1])}, state


def summed(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(y - p))


def with_mask(**options: Any) -> None:
    x, y = X.copy(), np.repeat(Y[:, None], 4, axis=1)
    x[:5, 1:] = 0
    layers = keras.layers.Reshape((4, 1)), keras.layers.Masking(0.0)
    model = built(*layers, keras.layers.SimpleRNN(3, return_sequences=True), **options)
    model.fit(x, y, batch_size=29, verbose=0)


def predicting() -> None:
    built(hidden()).predict(X, verbose=0)


EQUAL: dict[str, Callable[[], None]] = {
    "noise": lambda: fit(
        built(
            keras.layers.GaussianNoise(0.3),
            hidden(),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
        )
    ),
    "a compiled step": lambda: fit(built(hidden(), metrics=["mae"])),
    "several steps at a time": lambda: fit(
        built(hidden(), steps_per_execution=3), batch_size=8, validation_data=(X, Y)
    ),
    "sample weights": lambda: fit(built(hidden(), weighted_metrics=["mae"]), sample_weight=WEIGHTS),
    "sums and state": lambda: fit(built(hidden(), Squares(), loss=summed, optimizer="sgd")),
    "regularizers": lambda: fit(
        built(hidden(kernel_regularizer="l2", activity_regularizer="l1"), keras.layers.Dropout(0.2))
    ),
    "a figure": lambda: fit(built(hidden(), cls=WithFigure)),
    "a mask": with_mask,
    "a gradient of zeros": lambda: fit(built(hidden(), loss=lambda y, p: ops.mean(p - ops.stop_gradient(p)))),
    # At the initial scale, the gradients of the whole batch overflow, but not those of replicas.
    "a loss scale": lambda: fit(
        built(
            hidden(dtype="mixed_float16"),
            optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
        ),
        y=3 * Y,
    ),
    "half precision": lambda: fit(built(hidden(dtype="mixed_bfloat16"))),
    "casts to half precision": lambda: fit(built(hidden(), Rounding())),
    "half precision only": lambda: fit(built(hidden(), OnlyHalf(dtype="mixed_bfloat16"))),
    "validation": lambda: fit(built(hidden()), validation_data=(X[:7], Y[:7])),
    "predictions": predicting,
}


QUICK = {"sums and state", "predictions"}


@pytest.mark.ci(*EQUAL.keys() - QUICK)
@pytest.mark.parametrize("name", EQUAL)
def test_steps_that_are_exact_are_equal(name: str, compared: Callable[[], list[StepCompared]]) -> None:
    EQUAL[name]()
    steps = compared()
    assert differing(steps) == {}
    for step in steps:
        assert {"train": "loss", "test": "loss", "predict": "outputs"}[step.kind] in step.equal
        assert step.kind != "train" or any(part.startswith("gradient ") for part in step.equal)


def contrast(y: Any, p: Any) -> Any:
    return -ops.mean(ops.log_softmax(ops.matmul(p, ops.transpose(p)) + y))


class Centered(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0, keepdims=True)


def test_a_difference_that_a_note_names_has_the_name(
    compared: Callable[[], list[StepCompared]], nothing_exchanged: Callable[[str], str]
) -> None:
    fit(built(hidden(), loss=contrast))
    (step,) = compared()
    assert {part.part.partition(" ")[0] for part in step.differences} >= {"loss", "gradient"}
    assert {nothing_exchanged(part.named) for part in step.differences} == {"the loss contrast"}


@pytest.mark.ci
def test_a_loss_that_compares_examples_is_equal(compared: Callable[[], list[StepCompared]]) -> None:
    fit(built(hidden(), loss=contrast, metrics=[keras.metrics.PearsonCorrelation(axis=0)]))
    steps = compared()
    assert differing(steps) == {}
    assert {"loss", "pearson_correlation"} <= {part for step in steps for part in step.equal}


def test_a_layer_with_which_a_difference_begins_is_told(compared: Callable[[], list[StepCompared]]) -> None:
    fit(built(hidden(), Centered(name="centered"), keras.layers.ReLU()))
    (step,) = compared()
    assert {part.begins for part in step.differences} == {"layer centered"}
    assert {part.named for part in step.differences} == {"the layer centered"}


@pytest.mark.parametrize(
    "name",
    [
        "a weight is a little too small",
        "a gradient is doubled",
        "a prediction is repeated",
        "a metric counts examples of one replica",
        "the state of a layer is added up",
    ],
)
def test_a_name_does_not_explain_what_no_replica_computes(
    name: str, compared: Callable[[], list[StepCompared]], monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[name].plant(monkeypatch)
    model = eager(hidden(), Mean(), Centered(name="centered"), metrics=["mae", first_error])
    if name == "a prediction is repeated":
        model.predict(X, verbose=0)
    else:
        fit(model)
    (step,) = compared()
    unnamed = [part for part in step.differences if not part.named]
    assert any(part.part.startswith(FAULTS[name].part) for part in unnamed), step
    assert all(part.deviation.endswith("for the rows of each replica") for part in unnamed)


@pytest.mark.ci
def test_a_sum_in_the_loss_does_not_hide_a_state(
    compared: Callable[[], list[StepCompared]], monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS["the state of a layer is added up"].plant(monkeypatch)
    fit(eager(hidden(), Squares(), Centered(name="centered"), optimizer="sgd"))
    (step,) = compared()
    (part,) = (part for part in step.differences if not part.named)
    assert part.part.startswith("state ")
    assert "squares" in part.part


class WithSum(keras.Sequential):
    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {**logs, "sum": ops.sum(data[1])}, state


def test_a_sum_among_the_figures_does_not_hide_a_gradient(
    compared: Callable[[], list[StepCompared]], monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS["a gradient is doubled"].plant(monkeypatch)
    fit(eager(hidden(), Centered(name="centered"), cls=WithSum))
    (step,) = compared()
    assert {part.part.partition(" ")[0] for part in step.differences if not part.named} == {"gradient"}


def test_a_name_does_not_explain_a_sum(
    compared: Callable[[], list[StepCompared]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.keras.fit.tried_model.measured_growth", lambda *args, **options: None)
    fit(eager(hidden(), loss=summed, optimizer="sgd"))
    (step,) = compared()
    unnamed = [part for part in step.differences if not part.named]
    assert len(unnamed) == 4
    assert all(part.part.startswith("gradient ") for part in unnamed)
    assert all(part.deviation.endswith(", although it is the sum over the replicas") for part in unnamed)


def test_the_name_of_an_optimizer_does_not_hide_the_state_of_a_layer(
    compared: Callable[[], list[StepCompared]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(introductions, "summed_occurrences", lambda model: [OCCURRENCES])
    # As if a gradient were a list of occurrences, from which plain Keras may make another update.
    monkeypatch.setattr(ComparedStep, "expected_update", lambda self, replicas: {})
    # As if the rows of a replica could not be computed alone.
    monkeypatch.setattr(StepComparison, "_unexplained", lambda self, *args, **options: {})
    for fault in ("the state of a layer is added up", "an update is too large"):
        FAULTS[fault].plant(monkeypatch)
    fit(eager(hidden(), Mean()))
    (step,) = compared()
    named = {part.part: part.named for part in step.differences}
    assert [name for part, name in named.items() if part.endswith("/mean")] == [""]
    assert {name for part, name in named.items() if not part.endswith("/mean")} == {OCCURRENCES}


@pytest.mark.parametrize(("owner", "method"), [(StepComparison, "_uncombined"), (ComparedStep, "plain")])
def test_only_a_failure_of_the_program_lets_a_name_explain_all(
    owner: type, method: str, compared: Callable[[], list[StepCompared]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, method)

    def failing(self: Any, *args: Any, **options: Any) -> Any:
        if method == "_uncombined" or options.get("batch") is not None:
            raise KeyError("dense")
        return original(self, *args, **options)

    monkeypatch.setattr(owner, method, failing)
    fit(eager(hidden(), Centered(name="centered")))
    (step,) = compared()
    assert bool(step.reason) == (method == "_uncombined")
    assert step.reason or {part.named for part in step.differences} == {"the layer centered"}


class Twice(keras.layers.Layer):
    """Repeats a column; in batches of odd numbers of rows, the second one differs in the last bits."""

    def call(self, x: Any) -> Any:
        return ops.concatenate([x, x * (1 + 2e-7 * (ops.shape(x)[0] % 2))], axis=1)


def test_an_order_of_equal_outputs_is_rounding(compared: Callable[[], list[StepCompared]]) -> None:
    def first_is_larger(y: Any, p: Any) -> Any:
        return ops.cast(p[:, 0] > p[:, 1], "float32")

    keras.utils.set_random_seed(3)
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), Twice()])
        model.compile(loss="mse", metrics=[first_is_larger])
    model.evaluate(X, np.repeat(Y, 2, axis=1), batch_size=29, verbose=0)
    (step,) = compared()
    assert differing([step]) == {}
    assert "first_is_larger" in step.equal


def test_rounded_outputs_keep_whole_numbers_and_masks() -> None:
    keras.utils.set_random_seed(3)
    masking, dense = keras.layers.Masking(), keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((3, 1)), masking, dense])
    masks, whole = [], []
    with rounded_outputs(model, 1e-4):
        for size in (1.0, 0.5):
            x = ops.convert_to_tensor(np.full((5, 3, 1), size, "float32"))
            masked = masking(x)
            masks.append(mask_of(masked))
            whole.append(np.array_equal(masked, x))
            outputs = np.asarray(dense(x))
            assert len(np.unique(outputs[:, :, 0])) > 10
            np.testing.assert_allclose(outputs, np.broadcast_to(outputs[:1, :1], outputs.shape), 1e-3)
    assert whole == [True, False]
    assert all(mask is not None for mask in masks)


DRAWS: dict[str, Callable[[Any, int], Any]] = {
    "normal": lambda x, seed: keras.random.normal(x.shape, seed=seed),
    "gamma": lambda x, seed: keras.random.gamma(x.shape, x, seed=seed),
    "beta": lambda x, seed: keras.random.beta(x.shape, x, 2.0, seed=seed),
    "binomial": lambda x, seed: keras.random.binomial(x.shape, 3.0, x / 4, seed=seed),
    "categorical": lambda x, seed: keras.random.categorical(x, 2, seed=seed),
    "shuffle": lambda x, seed: keras.random.shuffle(x, seed=seed),
    "dropout": lambda x, seed: keras.random.dropout(x, 0.5, seed=seed),
}


@pytest.mark.ci("beta", "binomial")
@pytest.mark.parametrize("name", DRAWS)
def test_a_constant_draw_of_a_row_does_not_depend_on_the_others(name: str) -> None:
    draw = DRAWS[name]
    x = ops.convert_to_tensor(np.abs(X))
    with equal_draws(lambda function: None, constant=True):
        whole, part = draw(x, 1), draw(x[7:], 2)
    np.testing.assert_array_equal(whole[7:], part)
    assert whole.dtype == draw(x, 1).dtype


@pytest.mark.parametrize("constant", [False, True])
def test_other_threads_draw_and_cast_as_always(constant: bool) -> None:
    """They may read data ahead."""
    x = ops.convert_to_tensor(np.abs(X))

    def read() -> list[Any]:
        values = [draw(x, 1) for draw in DRAWS.values()]
        return [*values, keras.random.normal((3, 2), seed=1), ops.cast(x, "bfloat16")]

    layer = keras.layers.Dense(1)
    with ThreadPoolExecutor(1) as other, single_precision(layer) as computed:
        with equal_draws(lambda function: None, constant=constant):
            values = other.submit(read).result()
        assert computed == []
        assert ops.cast(x, "bfloat16").dtype == "float32"
        assert computed == [True]
    for value, expected in zip(values, read(), strict=True):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_truncated_draw_of_jax_repeats_its_row(constant: bool, by_name: bool) -> None:
    def drawn(rows: int) -> Any:
        key, shape = jax.random.key(1), (rows, 2)
        if by_name:
            return jax.random.truncated_normal(key, -2.0, 2.0, shape=shape)
        return jax.random.truncated_normal(key, -2.0, 2.0, shape)

    with equal_draws(lambda function: None, constant=constant):
        whole, part = drawn(5), drawn(3)
    assert whole.shape == (5, 2)
    np.testing.assert_array_equal(whole[2:], part)


@pytest.mark.parametrize("constant", [False, True])
def test_a_function_of_the_program_in_place_of_a_draw_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, constant: bool
) -> None:
    """Its arguments may differ, and it need not draw anything."""
    normal = jax.random.normal

    @functools.wraps(normal)
    def like(array: Any, scale: float = 2.0) -> Any:
        return scale * array

    monkeypatch.setattr(jax.random, "normal", like)
    monkeypatch.setattr(jax.random, "uniform", functools.partial(np.full, fill_value=3.0))
    notes: list[str] = []
    with equal_draws(notes.append, constant=constant):
        np.testing.assert_array_equal(jax.random.normal(X), 2.0 * X)
        np.testing.assert_array_equal(jax.random.uniform(4), np.full(4, 3.0))
    assert notes == []


ALWAYS, OCCURRENCES = (
    {"the loss contrast", "random numbers of NumPy", "train_step of Model"},
    "Adam with repeated ids of an Embedding",
)


EXCHANGED = "its rows, 20 MiB a step, are exchanged only with --exact-batch"
MAE = f"the metric mae ({EXCHANGED})"
VARIABLE = "the variable dense/mean (possibly: it could not be tested)"


def test_constant_draws_are_those_of_other_backends() -> None:
    places = [(31 * 5 + 17 * column + 5) % 1009 for column in range(6)]
    fractions = [(place + 0.5) / 1009 for place in places]
    with equal_draws(lambda function: None, constant=True):
        uniform, normal = keras.random.uniform((2, 6), 1.0, 3.0), keras.random.normal((2, 6), 1.0, 2.0)
        truncated, whole = keras.random.truncated_normal((40, 60)), keras.random.randint((2, 6), 2, 9)
    np.testing.assert_allclose(uniform[1], [1 + 2 * fraction for fraction in fractions], 1e-5)
    np.testing.assert_allclose(normal[1], [NormalDist(1, 2).inv_cdf(each) for each in fractions], 1e-4, 1e-5)
    np.testing.assert_array_equal(whole[1], [int(2 + 7 * fraction) for fraction in fractions])
    assert 1.5 < float(ops.max(ops.abs(truncated))) < 2


@pytest.mark.parametrize(
    ("part", "explanations"),
    [
        ("loss", ALWAYS),
        ("gradient dense/kernel", ALWAYS),
        ("mae", ALWAYS | {MAE}),
        ("out_mae", ALWAYS | {MAE}),
        ("out_weighted_mae", ALWAYS | {MAE}),
        ("state of mae", ALWAYS | {MAE}),
        ("their_mae", ALWAYS),
        ("error_a", ALWAYS),
        ("of my error", ALWAYS | {"the figure of my error of train_step"}),
        ("update dense/kernel", {OCCURRENCES, "train_step of Model"}),
        ("state embedding/embeddings", ALWAYS | {OCCURRENCES}),
        ("state dense/mean", ALWAYS | {VARIABLE}),
        ("state dense/count", ALWAYS),
    ],
)
def test_a_name_explains_the_parts_that_it_changes(part: str, explanations: set[str]) -> None:
    names = [*ALWAYS, OCCURRENCES, MAE, VARIABLE, "the figure of my error of train_step"]
    names += ["random numbers of Model.call", f"random numbers of Model.call ({EXCHANGED})"]
    updated, outputs = {"embedding/embeddings"}, ["out"]
    assert set(explaining(part, names, updated, outputs)) == explanations


@pytest.mark.parametrize(
    "part", ["gradient dense/kernel (update 2)", "loss", "state of mae", "state dense/mean"]
)
def test_an_optimizer_explains_what_follows_from_its_update_in_a_step(part: str) -> None:
    assert explaining(part, [OCCURRENCES], (), (), 2) == [OCCURRENCES]
    assert explaining("gradient dense/kernel", [OCCURRENCES], (), (), 2) == []


class TwoUpdates(keras.Sequential):
    def train_step(self, state: Any, data: Any) -> Any:
        _, state = super().train_step(state, data)
        return super().train_step(state, data)


def test_what_follows_from_two_updates_does_not_follow_from_the_rows_of_a_replica(
    compared: Callable[[], list[StepCompared]],
) -> None:
    fit(eager(hidden(), Mean(), Centered(name="centered"), cls=TwoUpdates, metrics=["mae"], optimizer="sgd"))
    (step,) = compared()
    assert all(part.named for part in step.differences)
    assert any(part.part.endswith("(update 2)") for part in step.differences)
    assert "mae" in {part.part for part in step.differences}


# Planted faults.


def eager(*layers: Any, **options: Any) -> keras.Model:
    """Return a model whose partials have their own names, and compile nothing."""
    return built(*layers, run_eagerly=True, **options)


@dataclass
class Fault:
    """A fault in how replicas are combined.

    Attributes:
        plant: plants it.
        part: the beginning of the name of a part that deviates.
        model: trains or predicts.
    """

    plant: Callable[[pytest.MonkeyPatch], None]
    part: str
    model: Callable[[], None] = lambda: fit(eager(hidden(), metrics=["mae"]))


def of_share(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = GlobalBatch.share
        patch.setattr(GlobalBatch, "share", lambda *args: change(original(*args)))

    return plant


def of_data(change: Callable[[Any, int], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return of_share(lambda share: share._replace(data=lambda: change(share.data(), share.replica)))


def of_partial(prefix: str, change: Callable[[Any, int, str], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Change the arrays of replicas whose names begin with `prefix`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = JaxProgram.compute

        def compute(self: Any, state: Any, share: Any, earlier: Any) -> Any:
            partial = dict(original(self, state, share, earlier))
            return {
                name: change(array, share.replica, name) if name.startswith(prefix) else array
                for name, array in partial.items()
            }

        patch.setattr(JaxProgram, "compute", compute)

    return plant


def of_total(change: Callable[[dict[str, Any]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Round.sum

        def changed(self: Any, view: Any, communicator: Any) -> Any:
            total = {name: np.array(array) for name, array in original(self, view, communicator).items()}
            change(total)
            return total

        patch.setattr(Round, "sum", changed)

    return plant


def of_update(change: Callable[[Any, Any, Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Change (program, state before, state after) of an update."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = JaxProgram.apply

        def apply(self: Any, state: Any, totals: Any) -> Any:
            before = jax.tree_util.tree_map(lambda array: array + 0, state)
            logs, after = original(self, state, totals)
            return logs, change(self, before, after)

        patch.setattr(JaxProgram, "apply", apply)

    return plant


def of_metrics(change: Callable[[Any, Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Let the values of metrics after a step be `change(before, total)`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def after(self: Any, metrics: list[Any], total: Any) -> list[Any]:
            return [change(before, total[f"metric/{i}"]) for i, before in enumerate(metrics)]

        patch.setattr(JaxProgram, "_metrics_after", after)

    return plant


def of_rows(change: Callable[[slice, int], slice]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = batches.replica_rows
        patch.setattr(
            batches, "replica_rows", lambda examples, r, replicas: change(original(examples, r, replicas), r)
        )

    return plant


def of_outputs(change: Callable[[list[Any]], list[Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = outputs.joined
        patch.setattr(global_step, "joined", lambda parts: [change([leaf])[0] for leaf in original(parts)])

    return plant


def only(replica: int) -> Callable[[Any, int, str], Any]:
    return lambda array, r, name: array if r == replica else array * 0


def double(total: dict[str, Any], prefix: str) -> None:
    for name in total:
        if name.startswith(prefix):
            total[name] = 2 * total[name]


def lose(total: dict[str, Any], prefix: str) -> None:
    """Lose the largest element of each array."""
    for name in total:
        if name.startswith(prefix) and total[name].size:
            total[name].flat[np.argmax(np.abs(total[name]))] = 0


def swap(total: dict[str, Any], one: str, other: str) -> None:
    first, second = total[one], total[other]
    total[one], total[other] = second.reshape(first.shape), first.reshape(second.shape)


def half_precision(array: Any, replica: int, name: str) -> Any:
    return array.astype("float16").astype(array.dtype)


def with_weights() -> None:
    fit(eager(hidden(), weighted_metrics=["mae"]), sample_weight=WEIGHTS)


def with_state() -> None:
    fit(eager(hidden(), Squares(), keras.layers.BatchNormalization()))


def with_whole_batch() -> None:
    fit(eager(hidden(), loss=contrast))


def with_sum() -> None:
    fit(eager(hidden(), loss=summed, optimizer="sgd"))


def evaluating() -> None:
    eager(hidden(), metrics=["mae"]).evaluate(X, Y, batch_size=29, verbose=0)


def first_without_update(program: Any, before: Any, after: Any) -> Any:
    return ([before[0][0], *after[0][1:]], *after[1:])


def slots_before(program: Any, before: Any, after: Any) -> Any:
    return (after[0], after[1], before[2], after[3])


def faster(program: Any, before: Any, after: Any) -> Any:
    return ([new + 0.1 * (new - old) for old, new in zip(before[0], after[0], strict=True)], *after[1:])


FAULTS: dict[str, Fault] = {
    "all replicas weigh the same": Fault(of_share(lambda s: s._replace(weight=1 / 3)), "gradient "),
    "no replica is weighted": Fault(of_share(lambda s: s._replace(weight=1.0)), "gradient "),
    "a weight is a little too small": Fault(
        of_share(lambda s: s._replace(weight=s.weight * 0.999)), "gradient "
    ),
    "the last row is lost": Fault(
        of_rows(lambda rows, r: slice(rows.start, rows.stop - (r == 2))), "gradient "
    ),
    "a row counts twice": Fault(
        of_rows(lambda rows, r: slice(rows.start - (r == 1), rows.stop)), "gradient "
    ),
    "a replica has the rows of another": Fault(
        of_rows(lambda rows, r: slice(0, rows.stop - rows.start)), "gradient "
    ),
    "labels are one row off": Fault(
        of_data(lambda data, r: (data[0], np.roll(data[1], 1, axis=0), *data[2:])), "gradient "
    ),
    "labels of a replica are missing": Fault(
        of_data(lambda data, r: (data[0], data[1] * (r != 1), *data[2:])), "gradient "
    ),
    "sample weights are ignored": Fault(
        of_data(lambda data, r: (*data[:2], np.ones_like(data[2]))), "gradient ", with_weights
    ),
    "sample weights are divided by their mean in a replica": Fault(
        of_data(lambda data, r: (*data[:2], data[2] / data[2].mean())), "gradient ", with_weights
    ),
    "features are scaled": Fault(of_data(lambda data, r: (1.001 * data[0], *data[1:])), "gradient "),
    "a gradient is doubled": Fault(
        of_partial("gradient/", lambda array, r, name: array * (1 + (r == 1))), "gradient "
    ),
    "a gradient of half precision is doubled": Fault(
        of_partial("gradient/", lambda array, r, name: array * (1 + (r == 1))),
        "gradient ",
        lambda: fit(eager(hidden(dtype="mixed_bfloat16"))),
    ),
    "a gradient of half precision is a little too large": Fault(
        of_partial("gradient/", lambda array, r, name: array * 1.01),
        "gradient ",
        lambda: fit(eager(hidden(dtype="mixed_bfloat16"))),
    ),
    "a gradient has the wrong sign": Fault(
        of_partial("gradient/", lambda array, r, name: -array if r == 2 else array), "gradient "
    ),
    "a gradient is lost": Fault(of_partial("gradient/1", only(0)), "gradient "),
    "gradients of one replica count": Fault(of_partial("gradient/", only(1)), "gradient "),
    "gradients are rounded to half precision": Fault(of_partial("gradient/", half_precision), "gradient "),
    "gradients are clipped in a replica": Fault(
        of_partial("gradient/", lambda array, r, name: ops.clip(array, -0.01, 0.01)), "gradient "
    ),
    "a gradient is not averaged": Fault(
        of_partial("gradient/0", lambda array, r, name: array * 3), "gradient "
    ),
    "the bias has the gradient of another replica": Fault(
        of_partial("gradient/3", lambda array, r, name: array * 3 if r == 0 else array * 0), "gradient "
    ),
    "a metric is doubled": Fault(of_partial("metric/", lambda array, r, name: 2 * array), "state of "),
    "a metric counts one replica": Fault(of_partial("metric/", only(0)), "loss"),
    "a sum of a metric counts one replica": Fault(of_partial("metric/2", only(0)), "mae"),
    "a metric counts examples of one replica": Fault(of_partial("metric/3", only(0)), "mae"),
    "a metric forgets": Fault(of_metrics(lambda before, total: total), "state of "),
    "a metric in an evaluation forgets": Fault(
        of_metrics(lambda before, total: total), "state of ", evaluating
    ),
    "a metric in an evaluation is doubled": Fault(
        of_partial("metric/", lambda array, r, name: 2 * array), "state of ", evaluating
    ),
    "an evaluation counts one replica": Fault(of_partial("metric/", only(2)), "loss", evaluating),
    "the state of a layer is added up": Fault(
        of_partial("state/", lambda array, r, name: 3 * array), "state ", with_state
    ),
    "the state of a layer is that of a replica": Fault(of_partial("state/0", only(1)), "state ", with_state),
    "a figure is added up": Fault(
        of_partial("log/", lambda array, r, name: 3 * array),
        "labels",
        lambda: fit(eager(hidden(), cls=WithFigure)),
    ),
    "a figure is that of a replica": Fault(
        of_partial("log/", lambda array, r, name: array * (29 / 10) if r == 0 else 0 * array),
        "labels",
        lambda: fit(eager(hidden(), cls=WithFigure)),
    ),
    "a denominator is ignored": Fault(
        of_partial("density", lambda array, r, name: ops.ones_like(array)),
        "gradient ",
        lambda: with_mask(run_eagerly=True),
    ),
    "the total is halved": Fault(of_total(lambda total: double(total, "gradient/0")), "gradient "),
    "an element of a total is lost": Fault(of_total(lambda total: lose(total, "gradient/0")), "gradient "),
    "an element of the last total is lost": Fault(
        of_total(lambda total: lose(total, "gradient/3")), "gradient "
    ),
    "totals are swapped": Fault(of_total(lambda total: swap(total, "gradient/1", "gradient/2")), "gradient "),
    "a total is transposed": Fault(
        of_total(lambda total: total.update({"gradient/0": total["gradient/0"].T.copy()})), "gradient "
    ),
    "a total is reversed": Fault(
        of_total(lambda total: total.update({"gradient/1": total["gradient/1"][::-1].copy()})), "gradient "
    ),
    "a total of a metric is lost": Fault(of_total(lambda total: lose(total, "metric/")), "loss"),
    "an element of the whole batch is lost": Fault(
        of_total(lambda total: lose(total, GATHERED)), "gradient ", with_whole_batch
    ),
    "the whole batch is doubled": Fault(
        of_total(lambda total: double(total, GATHERED)), "gradient ", with_whole_batch
    ),
    "a total is not a number": Fault(
        of_total(lambda total: total.update({"gradient/0": total["gradient/0"] * np.nan})), "gradient "
    ),
    "a variable is not updated": Fault(of_update(first_without_update), "update "),
    "the optimizer keeps its old state": Fault(of_update(slots_before), "update "),
    "an update is too large": Fault(of_update(faster), "update "),
    "a sum is not added up": Fault(
        of_partial("gradient/", lambda array, r, name: array / 3), "gradient ", with_sum
    ),
    "predictions are in the wrong order": Fault(
        of_outputs(lambda leaves: [leaf[::-1] for leaf in leaves]), "outputs", predicting
    ),
    "a prediction is repeated": Fault(
        of_outputs(lambda leaves: [np.concatenate([leaf[:1], leaf[:-1]]) for leaf in leaves]),
        "outputs",
        predicting,
    ),
    "a prediction is missing": Fault(
        of_outputs(lambda leaves: [leaf[:-1] for leaf in leaves]), "outputs", predicting
    ),
    "predictions are rounded": Fault(
        of_outputs(lambda leaves: [leaf.astype("float16").astype("float32") for leaf in leaves]),
        "outputs",
        predicting,
    ),
    "a replica predicts for the rows of another": Fault(
        of_rows(lambda rows, r: slice(0, rows.stop - rows.start) if r == 1 else rows), "outputs", predicting
    ),
}


QUICK_FAULTS = {
    "a weight is a little too small",
    "a gradient is doubled",
    "gradients are rounded to half precision",
    "a metric is doubled",
    "an update is too large",
    "a prediction is repeated",
}


@pytest.mark.ci(*FAULTS.keys() - QUICK_FAULTS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_combination_is_seen(
    name: str, compared: Callable[[], list[StepCompared]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    fault.model()
    steps = compared()
    assert not [step.reason for step in steps if step.reason]
    found = [part for step in steps for part in step.differences]
    assert any(part.part.startswith(fault.part) for part in found), found
    assert not any(part.named for part in found)


def test_a_fault_is_seen_whatever_metrics_have_counted_before(
    compared: Callable[[], list[StepCompared]], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_partial("metric/", only(2))(monkeypatch)
    model = eager(hidden())
    for variable in model.metrics_variables:
        variable.assign(1e4)
    model.evaluate(X, Y, batch_size=29, verbose=0)
    assert "loss" in differing(compared())


def test_a_fault_is_seen_although_the_outputs_of_a_layer_cannot_be_moved(
    compared: Callable[[], list[StepCompared]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: Any, size: float) -> None:
        raise TypeError("a layer returns sparse outputs")

    monkeypatch.setattr("lockstep.keras.fit.step_comparison.rounded_outputs", refuse)
    of_partial("metric/", only(2))(monkeypatch)
    eager(hidden()).evaluate(X, Y, batch_size=29, verbose=0)
    (step,) = compared()
    assert step.reason == ""
    assert "loss" in differing([step])


def test_what_a_trial_leaves_behind_is_seen(
    compared: Callable[[], list[StepCompared]], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Trial.measure

    def leaving(self: Trial, kinds: Any) -> None:
        measure(self, kinds)
        model.layers[-1].bias.assign([0.1])

    monkeypatch.setattr(Trial, "measure", leaving)
    model = eager(hidden())
    model.evaluate(X, Y, batch_size=29, verbose=0)
    assert "loss" in differing(compared())


def test_what_an_earlier_call_has_learned_is_seen(
    compared: Callable[[], list[StepCompared]], job_of_one_worker: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("every-fit", job_of_one_worker, monkeypatch)
    once, known = GlobalStep.compute_once, dict[int, Any]()

    def learning(self: GlobalStep, batch: GlobalBatch) -> Any:
        return known.setdefault(id(self), once(self, batch))

    monkeypatch.setattr(GlobalStep, "compute_once", learning)
    model = eager(hidden())
    model.predict(X, verbose=0)
    assert differing(compared()) == {}
    model.predict(2 * X, verbose=0)
    assert differing(compared()).keys() == {"outputs"}
    model.compile(run_eagerly=True)
    model.predict(3 * X, verbose=0)
    assert differing(compared()) == {}


class SwitchedLayer(Centered):
    contrasts = False

    def call(self, x: Any) -> Any:
        return super().call(x) if self.contrasts else x


@pytest.mark.ci
@pytest.mark.parametrize("eagerly", [True, False])
def test_a_step_follows_values_of_python_as_plain_keras_does(
    eagerly: bool,
    compared: Callable[[], list[StepCompared]],
    job_of_one_worker: Job,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check("every-fit", job_of_one_worker, monkeypatch)
    layer = SwitchedLayer(name="switched")
    model = built(hidden(), layer, run_eagerly=eagerly)
    fit(model)
    layer.contrasts = True
    compared()
    fit(model)
    (step,) = compared()
    assert {part.named for part in step.differences} == ({"the layer switched"} if eagerly else set())
    assert step.equal


class Batches(keras.utils.PyDataset):
    """Batches that are known as they come."""

    def __init__(self, batches: Any) -> None:
        super().__init__()
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class Tripled(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return 3 * x


@pytest.mark.ci
def test_a_step_that_another_backend_has_taken_is_taken_again(
    compared: Callable[[], list[StepCompared]],
    job_of_one_worker: Job,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    settings = replace(job_of_one_worker.settings, checks="first", kept_steps=tmp_path)
    monkeypatch.setattr(job_of_one_worker, "_context", replace(job_of_one_worker.context, settings=settings))

    def train(*layers: Any, rate: float = 0.01) -> list[StepCompared]:
        # Both have equal names, and other weights.
        keras.utils.clear_session()
        model = built(hidden(), *layers, optimizer=keras.optimizers.Adam(rate), metrics=["mae"])
        for weight in model.trainable_weights:
            weight.assign(RANDOM.normal(size=weight.shape))
        fit(model)
        return compared()

    def again(*layers: Any, **options: Any) -> StepCompared:
        """Train the model of another backend; return the comparison with the step in the folder."""
        (kept,) = tmp_path.iterdir()
        kept.rename(tmp_path / f"fit {int(kept.name.split()[1]) + 1} train.npz")
        _, of_other = train(*layers, **options)
        assert of_other.reference == "jax"
        assert not of_other.reason
        return of_other

    assert [step.reference for step in train(keras.layers.Dropout(0.5))] == [""]
    same = again(keras.layers.Dropout(0.5))
    assert same.differences == ()
    assert {"loss", "mae", "gradient sequential/last/kernel"} <= {*same.equal}
    assert any(part.startswith("update ") for part in same.equal)
    other = again(Tripled(name="tripled"), rate=0.005)
    assert {part.begins for part in other.differences} == {"layer tripled"}
    deviations = {part.part: part.deviation for part in other.differences}
    assert {"loss", "gradient sequential/hidden/kernel"} <= deviations.keys()
    assert deviations["update sequential/last/kernel"] == "half (differs by 50 %)"


def test_a_step_that_cannot_be_kept_says_why(
    compared: Callable[[], list[StepCompared]],
    job_of_one_worker: Job,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def full(file: Any, *arrays: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    settings = replace(job_of_one_worker.settings, kept_steps=tmp_path)
    monkeypatch.setattr(job_of_one_worker, "_context", replace(job_of_one_worker.context, settings=settings))
    monkeypatch.setattr(np, "savez", full)
    model = eager(hidden())
    model.evaluate(X, Y, batch_size=29, verbose=0)
    own, of_others = compared()
    assert (own.reference, own.reason) == ("", "")
    assert of_others.reference == "another backend"
    assert of_others.reason.endswith("OSError: [Errno 28] No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_validation_is_compared_once(
    compared: Callable[[], list[StepCompared]], job_of_one_worker: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it may bring the first sample weights, so that it is tried again."""
    check("every-fit", job_of_one_worker, monkeypatch)
    model = built(hidden(), loss=lambda y, p: ops.mean(ops.square(y - p)), run_eagerly=True)
    model.fit(X, Y, batch_size=29, verbose=0, validation_data=Batches([(X[:8], Y[:8])]))
    assert [(step.call.split()[0], step.kind) for step in compared()] == [("fit", "train"), ("fit", "test")]


def test_later_calls_are_also_compared_in_half_precision(
    compared: Callable[[], list[StepCompared]], job_of_one_worker: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled functions of a program that computes only in half precision last for several calls."""
    check("every-fit", job_of_one_worker, monkeypatch)
    model = built(hidden(), HalfProduct(dtype="mixed_bfloat16"))
    for _ in range(3):
        fit(model)
    model.evaluate(X, Y, batch_size=29, verbose=0)
    steps = compared()
    assert [step.kind for step in steps] == ["train", "train", "train", "test"]
    assert differing(steps) == {}


def test_only_the_first_batches_of_a_check_train(
    published: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrored, "_MOST_UNTAKEN", 2)
    model = eager(hidden())
    losses = [model.train_on_batch(X, Y) for _ in range(5)]
    assert losses[0] > losses[1] > losses[2] == losses[3] == losses[4]
    with pytest.raises(SystemExit):
        model.train_on_batch(X, Y)
    assert published[-1] == CheckEnded("the script calls train_on_batch more than 2 times")


# Rounding.

FLOATS = st.floats(-1e3, 1e3, width=32, allow_subnormal=False)


@given(st.lists(FLOATS, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_rounding_is_no_deviation(values: list[float], random: Any) -> None:
    reference = np.array(values, "float32")
    epsilon = float(np.finfo("float32").eps)

    def rounded() -> Any:
        factors = [1 + epsilon * random.choice([-1, 0, 1]) for _ in values]
        return (reference * np.array(factors)).astype("float32")

    assert deviation(reference, rounded(), [rounded()], epsilon) is None


@given(st.lists(FLOATS, min_size=1, max_size=30), st.sampled_from([0.5, 2.0, -1.0, 3.0]))
def test_a_multiple_deviates_in_its_direction(values: list[float], factor: float) -> None:
    reference = np.array(values, "float32")
    found = deviation(reference, factor * reference, [reference], float(np.finfo("float32").eps))
    if not np.any(reference):
        assert found is None
        return
    assert found is not None
    words = {0.5: "half", 2.0: "double", -1.0: "the negative of", 3.0: "3 times"}
    assert found.direction == words[factor]
