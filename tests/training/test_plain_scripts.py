"""The job trains a script without a strategy as if all of it were in a strategy's scope."""

import random
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
from lockstep.keras.backends.adapter import adapter
from lockstep.keras.fit.exactness import (
    different_denominators,
    introduction,
    kinds_per_replica,
    tried_parts,
)
from lockstep.keras.fit.trials import Trial
from lockstep.keras.fit.tried_rows import TriedBatch
from lockstep.topology import place
from lockstep.worker import job

README = Path(__file__).parents[2] / "README.md"
LEAN = Path(__file__).parents[1] / "lean"
X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
Y = X[:, :1]


@pytest.mark.parametrize(
    "backend",
    ["torch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "tensorflow"))],
    indirect=True,
)
def test_a_plain_script_has_the_bits_of_one_in_a_scope(
    launch: Callable[..., Any], backend: str, tmp_path: Path
) -> None:
    def run(workers: int, how: str) -> Any:
        done = launch(
            f"-n {workers} --replicas 2 --min-workers {workers}",
            "plain_script.py",
            str(tmp_path),
            how,
            backend=backend,
        )
        assert done.status == 0, done.stderr
        return done

    scope, lost = run(1, "scope"), run(2, "lost")
    results = scope.marked(0, "result ")
    assert len(results) == 3
    assert lost.marked(0, "result ") == lost.marked(2, "result ") == results
    introduced = (
        "plain Keras script: model.fit is distributed over 2 workers; computed per replica: Dropout\n"
    )
    assert introduced in lost.stderr
    path = re.escape(f"{tmp_path}/log-")
    differ = rf"lockstep: the path of CSVLogger is {path}\d+.csv on worker 0, which writes it, and "
    differ += rf"{path}\d+.csv on worker 1"
    assert re.search(differ, lost.stderr)
    assert "the path of" not in scope.stderr
    assert "plain Keras script" not in scope.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    "options", [pytest.param("-n 1 --threads-per-worker 2", marks=pytest.mark.slow), "-n 2"]
)
def test_the_program_of_the_readme_trains(environment: dict[str, str], tmp_path: Path, options: str) -> None:
    """One replica has the bits of plain Keras, two have its figures up to rounding."""
    program = re.search("```python\n(import keras\n.*?)```", README.read_text(), re.DOTALL)
    assert program is not None
    (tmp_path / "train.py").write_text(program[1])
    variables = environment | {"PYTHONPATH": str(LEAN), "HIDDEN_PACKAGES": "tensorflow,torch,IPython"}
    variables |= {"KERAS_BACKEND": "jax", "NPROC": "2"}
    weights = []
    for how in ("", f"-m lockstep run {options}"):
        command = [sys.executable, *how.split(), "train.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=1200
        )
        assert done.returncode == 0, done.stderr
        weights.append(keras.models.load_model(tmp_path / "model.keras").get_weights())
        (tmp_path / "model.keras").unlink()
    plain, trained = weights
    assert all(map(np.array_equal, plain, trained)) == ("-n 1" in options)
    if "-n 1" in options:
        return
    for wanted, found in zip(plain, trained, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert "plain Keras script: model.fit is distributed over 2 workers\n" in done.stderr
    assert re.search(r"finished in .*: 45 steps on 2 workers; digest \w+ of model 'sequential'", done.stderr)


@pytest.mark.ci
def test_no_adopt_lets_each_worker_train_by_itself(launch: Callable[..., Any], tmp_path: Path) -> None:
    done = launch("-n 1 --replicas 2 --no-adopt", "plain_script.py", str(tmp_path), "whole")
    assert done.status == 1
    assert len(done.marked(0, "result ")) == 1
    assert "was not compiled in the strategy's scope" in done.stderr
    assert "plain Keras script" not in done.stderr


@pytest.mark.parametrize(
    ("workers", "replicas", "parts", "text"),
    [
        (2, 2, (), "model.fit is distributed over 2 workers"),
        (1, 3, (), "model.fit is distributed over 3 replicas on 1 worker"),
        (2, 2, ("A", "B"), "model.fit is distributed over 2 workers; computed per replica: A, B"),
    ],
)
def test_the_first_note_describes_the_replicas(
    workers: int, replicas: int, parts: tuple[str, ...], text: str
) -> None:
    view = place(replicas, tuple(range(workers)))
    assert introduction("fit", view, parts) == f"plain Keras script: {text}"


def parts_of(model: Any, rows: Callable[[], Any]) -> list[str]:
    """Return the parts of a program that are per replica, after a trial of it."""
    batch = TriedBatch(rows)
    trial = Trial(job.current(), adapter().steps(), model, batch, nullcontext)
    trial.measure(["train", "test"])
    return [*kinds_per_replica(model), *tried_parts(model, batch), *trial.names]


def mean_of_squares(y: Any, p: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y - p))


def contrast(y: Any, p: Any) -> Any:
    return keras.ops.mean(keras.ops.logsumexp(p - keras.ops.transpose(p), axis=1))


class Own(keras.Sequential):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def fails(y: Any, p: Any) -> Any:
    """Fail, except where Keras builds a model from symbolic values."""
    try:
        float(keras.ops.sum(p))
    except Exception:
        return mean_of_squares(y, p)
    raise ValueError


def noisy(y: Any, p: Any) -> Any:
    return mean_of_squares(y, p) + np.random.random() + random.random()


class Adds(keras.layers.Layer):
    def __init__(self, combine: Any) -> None:
        super().__init__()
        self.combine = combine

    def call(self, x: Any) -> Any:
        self.add_loss(self.combine(x))
        return x


@pytest.mark.ci("layers4", "layers5", "layers7", "layers15")
@pytest.mark.parametrize(
    ("cls", "layers", "loss", "parts"),
    [
        (keras.Sequential, (), "mse", []),
        (keras.Sequential, (keras.layers.Dropout(0.5),), keras.losses.Huber(), ["Dropout"]),
        (keras.Sequential, (keras.layers.Dropout(0.0), keras.layers.GaussianNoise(0.0)), "mse", []),
        (
            keras.Sequential,
            (keras.layers.GaussianNoise(0.1), keras.layers.Dropout(0.1), keras.layers.Dropout(0.2)),
            "mse",
            ["GaussianNoise", "Dropout (2 layers)"],
        ),
        (keras.Sequential, (), mean_of_squares, []),
        (keras.Sequential, (), contrast, ["the loss contrast"]),
        (keras.Sequential, (), noisy, ["random numbers of Python", "random numbers of NumPy"]),
        (keras.Sequential, (), "dice", ["the loss dice"]),
        (keras.Sequential, (), fails, ["the loss fails (possibly: it could not be tested)"]),
        (
            keras.Sequential,
            (keras.layers.BatchNormalization(), keras.layers.BatchNormalization()),
            "mse",
            ["BatchNormalization (2 layers)"],
        ),
        (keras.Sequential, (keras.layers.BatchNormalization(trainable=False),), "mse", []),
        (keras.Sequential, (keras.layers.ActivityRegularization(0.1),), "mse", []),
        (keras.Sequential, (Adds(keras.ops.mean),), "mse", []),
        (keras.Sequential, (Adds(keras.ops.sum),), "mse", []),
        (keras.Sequential, (Adds(keras.ops.max),), "mse", ["add_loss of Adds"]),
        (Own, (keras.layers.BatchNormalization(),), "mse", ["BatchNormalization"]),
    ],
)
def test_parts_that_are_per_replica_are_named(
    cls: Any,
    layers: tuple[Any, ...],
    loss: Any,
    parts: list[str],
    nothing_exchanged: Callable[[str], str],
) -> None:
    model = cls([keras.layers.Input((4,)), *layers, keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", loss)
    before = [np.array(weight) for weight in model.get_weights()]
    adapter().steps().build(model, "train", lambda: (X, Y))
    drawn = random.getstate(), np.random.get_state()[2]
    assert [*map(nothing_exchanged, parts_of(model, lambda: (X, Y)))] == parts
    assert (random.getstate(), np.random.get_state()[2]) == drawn
    assert all(map(np.array_equal, before, model.get_weights()))


def test_the_overflow_of_half_precision_is_named() -> None:
    named = []
    for dtype in ("mixed_float16", "mixed_bfloat16"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype=dtype)])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
        named.append(kinds_per_replica(model))
    assert named == [["the overflow of float16 gradients"], []]


class Keeps(keras.layers.Layer):
    """Keeps a number of the batches that it has seen in a variable."""

    def __init__(self, combine: Callable[[Any, Any], Any]) -> None:
        super().__init__(name="keeps")
        self.combine = combine

    def build(self, _: Any) -> None:
        self.state = self.add_weight(name="state", initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.state.assign(self.combine(self.state, x))
        return x


class Counts(keras.layers.Layer):
    """Counts steps and examples."""

    def __init__(self) -> None:
        super().__init__(name="counts")

    def build(self, _: Any) -> None:
        self.steps, self.rows, self.even = (
            self.add_weight(name=name, dtype=dtype, initializer="zeros", trainable=False)
            for name, dtype in (("steps", "int32"), ("rows", "int32"), ("even", "bool"))
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(1)
            self.rows.assign_add(keras.ops.shape(x)[0])
            self.even.assign(keras.ops.logical_not(self.even))
        return x


def test_the_state_of_a_layer_that_counts_examples_is_named() -> None:
    model = keras.Sequential([keras.layers.Input((4,)), Counts(), keras.layers.Dense(1)], name="model")
    model.compile("sgd", "mse")
    assert parts_of(model, lambda: (X, Y)) == ["the variable model/counts/rows"]


@pytest.mark.parametrize(
    ("combine", "parts"),
    [
        (lambda _, x: keras.ops.mean(x), []),
        (lambda state, x: 0.9 * state + 0.1 * keras.ops.mean(keras.ops.square(x)), []),
        (lambda state, _: state + 1.0, []),
        (lambda state, x: state + keras.ops.cast(keras.ops.shape(x)[0], "float32"), ["model/keeps/state"]),
        (lambda state, x: keras.ops.maximum(state, keras.ops.max(x)), ["model/keeps/state"]),
        (lambda state, x: 0.9 * state + 0.1 * keras.ops.var(x), ["model/keeps/state"]),
        (fails, ["model/keeps/state (possibly: it could not be tested)"]),
    ],
)
def test_the_state_of_a_layer_is_named_if_it_is_no_mean(combine: Any, parts: list[str]) -> None:
    layer = Keeps(combine)
    model = keras.Sequential([keras.layers.Input((4,)), layer, keras.layers.Dense(1)], name="model")
    model.compile("sgd", "mse")
    assert parts_of(model, lambda: (X, Y)) == [f"the variable {part}" for part in parts]
    assert float(layer.state) == 0.0


def test_a_model_of_keras_needs_no_rows() -> None:
    layers = [keras.layers.Input((4,)), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", metrics=["mae"])
    assert parts_of(model, lambda: pytest.fail("read rows")) == []


class Centered(keras.layers.Layer):
    """Compares the examples of a batch."""

    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, axis=0)


def over_examples(x: Any) -> Any:
    return keras.ops.softmax(x, axis=0)


def first_column(x: Any) -> Any:
    return x[:, :1]


class Products(keras.layers.Layer):
    """A column for each example."""

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, keras.ops.transpose(x))


class Within(keras.layers.Layer):
    """Has a layer that compares examples."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = Centered(name="inner")

    def call(self, x: Any) -> Any:
        return self.inner(x) + 1


@pytest.mark.ci("layers2", "layers7")
@pytest.mark.parametrize(
    ("layers", "parts"),
    [
        ([Centered(name="centered")], ["the layer centered"]),
        ([Within(name="outer")], ["the layer inner"]),
        ([Adds(keras.ops.mean), keras.layers.Dense(2)], []),
        ([Centered(name="first"), Centered(name="second")], ["the layer first"]),
        (
            [keras.layers.BatchNormalization(), Within(name="outer")],
            ["BatchNormalization", "the layer inner"],
        ),
        ([keras.layers.Lambda(lambda x: x - keras.ops.mean(x, axis=0), name="less")], ["the layer less"]),
        ([keras.layers.Lambda(lambda x: x - keras.ops.mean(x, axis=1, keepdims=True))], []),
        ([keras.layers.Dense(3, activation=over_examples, name="shares")], ["the layer shares"]),
        ([keras.layers.Softmax(axis=0, name="softmax")], ["the layer softmax"]),
        ([Products(name="products"), keras.layers.Lambda(first_column)], ["the layer products"]),
    ],
)
def test_layers_that_compare_examples_are_named(layers: list[Any], parts: list[str]) -> None:
    # Layers without a name have one from when the tests were collected.
    model = keras.Sequential([keras.layers.Input((4,)), *layers, keras.layers.Dense(1, name="last")])
    model.compile("sgd", "mse")
    assert parts_of(model, lambda: (X, Y)) == parts


def with_operation(operation: Callable[[Any], Any]) -> keras.Model:
    inputs = keras.Input((4,))
    inner = keras.Model(inputs, operation(keras.layers.Dense(3)(inputs)), name="inner")
    return keras.Model(inputs, keras.layers.Dense(1)(inner(inputs)), name="outer")


@pytest.mark.parametrize(
    ("operation", "parts"),
    [
        (lambda h: h - keras.ops.mean(h, axis=0), ["the operation subtract"]),
        (lambda h: keras.ops.softmax(h, axis=0), ["the operation softmax"]),
        (lambda h: keras.ops.tanh(h) * 2, []),
    ],
)
def test_operations_of_a_functional_model_that_compare_examples_are_named(
    operation: Any, parts: list[str]
) -> None:
    keras.utils.clear_session()
    model = with_operation(operation)
    model.compile("sgd", "mse")
    assert parts_of(model, lambda: (X, Y)) == parts


class Shares(keras.Sequential):  # type: ignore[misc]
    """Predicts the shares of the examples in the sum of a batch."""

    def predict_step(self, *arguments: Any) -> Any:
        outputs, *state = super().predict_step(*arguments)
        return (outputs / keras.ops.sum(outputs, axis=0), *state)


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), []),
        (lambda: keras.Sequential([keras.Input((4,)), Centered(name="centered")]), ["the layer centered"]),
        (lambda: with_operation(lambda h: keras.ops.softmax(h, axis=0)), ["the operation softmax"]),
        (lambda: Shares([keras.Input((4,)), keras.layers.Dense(1)]), ["predict_step of Shares"]),
    ],
)
def test_predictions_that_compare_examples_are_named(
    build: Any, parts: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    keras.utils.clear_session()
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = build()
        model.compile()
    model.predict(X, batch_size=6, verbose=0)
    model.predict_on_batch(X)
    expected = [f"lockstep: model {model.name!r}: computed per replica: {', '.join(parts)}"] if parts else []
    assert [line for line in capfd.readouterr().err.splitlines() if "per replica" in line] == expected


@pytest.mark.ci
def test_a_part_is_named_again_for_another_model(
    capfd: pytest.CaptureFixture[str], nothing_exchanged: Callable[[str], str]
) -> None:
    def named(loss: Any, units: int) -> list[str]:
        with lockstep.MultiWorkerMirroredStrategy().scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)])
            model.compile("sgd", loss)
        model.fit(X, Y, batch_size=6, verbose=0)
        lines = [line for line in capfd.readouterr().err.splitlines() if "per replica" in line]
        return [nothing_exchanged(line).rpartition(": ")[2] for line in lines]

    def spread(y: Any, p: Any) -> Any:
        return keras.ops.std(y - p)

    keras.utils.clear_session()
    assert named(spread, 3) == ["the loss spread"]
    assert named(spread, 3) == []
    assert named(spread, 2) == ["the loss spread"]
    assert named("mse", 2) == []


@pytest.mark.parametrize(
    ("masked", "outputs", "weighs", "differ"),
    [
        pytest.param(True, 2, False, True, marks=pytest.mark.ci),
        (False, 2, False, False),
        (True, 1, False, False),
        pytest.param(False, 2, True, True, marks=pytest.mark.ci),
        (False, 1, True, False),
    ],
)
def test_several_losses_with_different_denominators_are_named(
    masked: bool, outputs: int, weighs: bool, differ: bool, nothing_exchanged: Callable[[str], str]
) -> None:
    tokens = keras.Input((3,), dtype="int32")
    vectors = keras.layers.Embedding(5, 4, mask_zero=masked)(tokens)
    heads = [
        keras.layers.Dense(1)(vectors),
        keras.layers.Dense(1)(keras.layers.Lambda(lambda x: x[:, 0], mask=lambda _, mask: None)(vectors)),
    ]
    model = keras.Model(tokens, heads[:outputs])
    reduction = "mean_with_sample_weight" if weighs else "sum_over_batch_size"
    model.compile("sgd", [keras.losses.MeanSquaredError(reduction) for _ in range(outputs)])
    words = np.random.default_rng(1).integers(0, 5, (12, 3)).astype("int32")
    targets = [np.zeros((12, 3, 1)), np.zeros((12, 1))][:outputs]
    weights = [np.ones((12, 3)), np.arange(12)][:outputs] if weighs else None
    found = [*map(nothing_exchanged, parts_of(model, lambda: (words, targets, weights)))]
    assert found == (["the sum of losses with different denominators"] if differ else [])
    lossless = keras.Model(tokens, heads[:outputs])
    lossless.compile("sgd")
    assert parts_of(lossless, lambda: (words, targets, weights)) == []


def test_a_model_without_a_call_does_not_have_losses_with_different_denominators() -> None:
    class Step(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.words = keras.layers.Embedding(5, 4, mask_zero=True)

        def train_step(self, *args: Any) -> Any:
            raise NotImplementedError

    model = Step()
    model.compile("sgd", "mse")
    batch = TriedBatch(lambda: (np.ones((4, 3), "int32"), np.zeros((4, 3)), None))
    assert different_denominators(model, batch) == []


@pytest.mark.parametrize("compares", [True, False])
def test_a_metric_that_compares_examples_is_named(
    compares: bool, nothing_exchanged: Callable[[str], str]
) -> None:
    class Near(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="near")
            self.count = self.add_weight(name="count", initializer="zeros")

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            del sample_weight
            near = keras.ops.abs(y[:, 0] - p) if compares else keras.ops.abs(y - p)
            self.count.assign_add(keras.ops.sum(near))

        def result(self) -> Any:
            return self.count + 0.0

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Near()])
    # Not fit: other tests in this process may have installed a strategy's.
    model.compute_metrics(X, Y, model(X))
    parts = [*map(nothing_exchanged, parts_of(model, lambda: (X, Y)))]
    assert parts == (["the metric near"] if compares else [])
