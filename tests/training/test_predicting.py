"""`predict` returns the outputs of plain Keras, or refuses by name what replicas cannot put together."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.errors import ModelError

X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
BATCH = 9
"""Three rows for each of the three replicas; the last batch has 2 rows, and one replica without any."""


@pytest.fixture(scope="module")
def strategy() -> lockstep.MultiWorkerMirroredStrategy:
    return lockstep.MultiWorkerMirroredStrategy()


class Returning(keras.Model):
    """Returns what a function of the model and its inputs returns."""

    def __init__(self, outputs: Callable[["Returning", Any], Any]) -> None:
        super().__init__()
        self.dense, self.table = layers.Dense(2), layers.Embedding(6, 2)
        self.unused = layers.Dense(2)
        self.outputs_of = outputs

    def build(self, shape: Any) -> None:
        self.dense.build((None, 4))
        self.table.build()

    def call(self, x: Any) -> Any:
        return self.outputs_of(self, x)


def made(strategy: lockstep.Strategy, outputs: Callable[[Returning, Any], Any]) -> Returning:
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = Returning(outputs)
        model.compile("sgd", "mse")
    return model


def joined(outputs: list[Any]) -> Any:
    """The outputs of batches, as plain Keras joins them."""
    return keras.tree.map_structure(
        lambda *parts: np.concatenate([ops.convert_to_numpy(part) for part in parts]), *outputs
    )


def assert_close(found: Any, expected: Any) -> None:
    keras.tree.assert_same_structure(found, expected)
    for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def first_rows(count: int) -> Callable[[Returning, Any], Any]:
    return lambda model, x: {"rows": model.dense(x), "table": model.table(ops.arange(count))}


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param(first_rows(5), id="a table"),
        pytest.param(first_rows(3), id="a table with as many rows as a replica"),
        pytest.param(first_rows(1), id="a table with as many rows as a replica of the last batch"),
        pytest.param(lambda model, x: ops.repeat(model.dense(x), 2, axis=0), id="two rows for each example"),
        pytest.param(lambda model, x: [(model.dense(x),), {"b": x, "a": x * 2}], id="a nest"),
        pytest.param(lambda model, x: ops.squeeze(model.dense(x)[:, :1], -1), id="numbers"),
    ],
)
def test_outputs_are_joined_as_plain_keras_joins_them(
    strategy: lockstep.MultiWorkerMirroredStrategy, outputs: Callable[[Returning, Any], Any]
) -> None:
    model = made(strategy, outputs)
    found = model.predict(X, batch_size=BATCH, verbose=0)
    assert_close(found, joined([model(X[start : start + BATCH]) for start in range(0, len(X), BATCH)]))
    assert_close(model.predict_on_batch(X[:9]), joined([model(X[:9])]))
    assert_close(model.predict_on_batch(X[:1]), joined([model(X[:1])]))


def test_a_single_number_is_that_of_the_batch(strategy: lockstep.MultiWorkerMirroredStrategy) -> None:
    model = made(strategy, lambda model, x: (model.dense(x), ops.sum(model.table(ops.arange(6)))))
    rows, number = model.predict_on_batch(X)
    assert rows.shape == (20, 2)
    assert number == pytest.approx(model.table.get_weights()[0].sum(), abs=1e-6)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        pytest.param(
            lambda model, x: {"rows": model.dense(x), "mean": ops.mean(x, axis=0)},
            "output 'mean' of the model has no row for each example, and replicas 0 and 1 compute different",
            id="a mean over the batch",
        ),
        pytest.param(
            lambda model, x: {"rows": model.dense(x), "count": ops.sum(ops.ones_like(x))},
            "output 'count' of the model has no row for each example, and changes with their number",
            id="equal on all replicas, but not that of the batch",
        ),
        pytest.param(
            lambda model, x: [model.dense(x), ops.matmul(x, ops.transpose(x))],
            r"output '1' of the model has the shape \[3, 3\] for 3 rows and \[6, 6\] for 6",
            id="a column for each example",
        ),
        pytest.param(
            lambda model, x: ops.concatenate([model.dense(x), -model.dense(x)], axis=0),
            "the output of the model has 6 rows for 3 examples, which are not in the order of the examples",
            id="rows in another order",
        ),
    ],
)
def test_outputs_that_do_not_follow_from_those_of_replicas_are_refused(
    strategy: lockstep.MultiWorkerMirroredStrategy,
    outputs: Callable[[Returning, Any], Any],
    message: str,
) -> None:
    model = made(strategy, outputs)
    with pytest.raises(ModelError, match=message) as refusal:
        model.predict(X, batch_size=BATCH, verbose=0)
    assert "run with one replica (--replicas 1)" in str(refusal.value)


def of_inputs(model: Returning, x: dict[str, Any]) -> Any:
    rows = {name: model.dense(x[name]) for name in x}
    return rows if len(rows) > 1 else [rows["a"], x["a"]]


def test_each_call_has_its_own_outputs(strategy: lockstep.MultiWorkerMirroredStrategy) -> None:
    model = made(strategy, of_inputs)
    for names in ("a", "ab", "ac", "abc", "a"):
        x = {name: X + number for number, name in enumerate(names)}
        assert_close(model.predict(x, batch_size=32, verbose=0), joined([model(x)]))
        assert_close(model.predict_on_batch(x), joined([model(x)]))


class Varied(keras.Model):
    """Draws random numbers, changes its state and reports figures, depending on its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.generator = layers.Dense(1), keras.random.SeedGenerator(4)

    def build(self, shape: Any) -> None:
        self.dense.build((None, 4))
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, x: dict[str, Any]) -> Any:
        rows = self.dense(x["a"])
        if "b" in x:
            rows = rows + 0 * keras.random.normal(ops.shape(rows), seed=self.generator)
        if "c" in x:
            self.seen.assign(self.seen + ops.mean(x["c"]))
        return rows

    def test_step(self, *given: Any) -> Any:
        x, y = given[-1][:2]
        logs = {"mean": ops.mean(y)} | {f"mean of {name}": ops.mean(x[name]) for name in x}
        return logs if len(given) == 1 else (logs, given[0])


def test_what_a_step_does_may_depend_on_its_inputs(strategy: lockstep.MultiWorkerMirroredStrategy) -> None:
    with strategy.scope():
        model = Varied()
        model.compile("sgd", "mse")
    seen = 0.0
    for names in ("a", "ab", "a", "ac", "abc", "ab", "ac"):
        x = {name: X[:9] + number for number, name in enumerate(names)}
        before = np.array(model.generator.state)
        figures = model.evaluate(x, X[:9, :1], batch_size=9, verbose=0, return_dict=True)
        expected = {"mean": X[:9, 0].mean()} | {f"mean of {name}": rows.mean() for name, rows in x.items()}
        assert figures == pytest.approx(expected, abs=1e-5)
        assert model.predict(x, batch_size=9, verbose=0).shape == (9, 1)
        seen += x["c"].mean() if "c" in x else 0
        assert float(ops.convert_to_numpy(model.seen)) == pytest.approx(seen, abs=1e-5)
        assert np.array_equal(before, np.array(model.generator.state)) == ("b" not in x)


def test_a_layer_that_the_model_never_calls_hides_no_rows(
    strategy: lockstep.MultiWorkerMirroredStrategy,
) -> None:
    """Keras on PyTorch does not call the model first, as it does on JAX while a layer is not built."""
    model = made(strategy, lambda model, x: model.dense(x))
    assert model.predict(X, batch_size=BATCH, verbose=0).shape == (20, 2)
    assert not model.unused.built


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow has strings")
@pytest.mark.parametrize("steps", [1, 2])
def test_strings_are_joined(strategy: lockstep.MultiWorkerMirroredStrategy, steps: int) -> None:
    names = ["low", "high", "größer"]
    with strategy.scope():
        lookup = layers.StringLookup(vocabulary=names, num_oov_indices=0, invert=True)
        model = keras.Sequential([keras.Input((1,), dtype="int64"), lookup])
        model.compile(steps_per_execution=steps)
    found = model.predict(np.arange(7).reshape(-1, 1) % 3, batch_size=4, verbose=0)
    assert [word.decode() for word in found.ravel()] == (names * 3)[:7]


@pytest.mark.slow("jax", "tensorflow")
@pytest.mark.ci
def test_workers_predict_what_one_process_predicts(
    plain: Callable[..., str], launch: Callable[..., Any], backend: str
) -> None:
    run = launch("-n 2", "predicting.py", backend=backend)
    assert run.status == 0, run.stderr
    printed = plain("predicting.py", backend=backend).splitlines()
    expected = [line for line in printed if line.startswith("predicted")]
    assert len(expected) >= 11
    assert run.marked(0, "predicted") == run.marked(1, "predicted") == expected
