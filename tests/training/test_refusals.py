"""Steps that replicas cannot compute are refused by name at the first step."""

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
from lockstep.errors import ConfigError, DataError, LockstepError, ModelError, ScopeError
from lockstep.keras.input.readings import whole_batch
from lockstep.observability.events import CallStarted, Event

X = np.ones((9, 4), "float32")
Y = np.ones((9, 1), "float32")


@pytest.fixture(scope="module")
def strategy() -> lockstep.MultiWorkerMirroredStrategy:
    return lockstep.MultiWorkerMirroredStrategy()


def build(cls: type[keras.Model] = keras.Sequential, **options: Any) -> keras.Model:
    model = cls([keras.layers.Input((4,)), keras.layers.Dense(1)], name="wanted")
    model.compile("sgd", "mse", **options)
    return model


def test_a_model_compiled_outside_the_scope_is_not_trained(
    strategy: lockstep.MultiWorkerMirroredStrategy,
) -> None:
    model = build()
    with pytest.raises(ScopeError, match="'wanted' was not compiled in the strategy's scope"):
        model.fit(X, Y, verbose=0)
    assert model.predict(X, verbose=0).shape == (9, 1)


def test_the_number_of_replicas_is_the_jobs(strategy: lockstep.MultiWorkerMirroredStrategy) -> None:
    assert strategy.num_replicas_in_sync == 3


def test_a_tf_config_that_is_set_after_the_strategy_is_refused_when_it_is_entered(
    strategy: lockstep.MultiWorkerMirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, each of its tasks would train alone."""
    # The refusal replaces it.
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    cluster = {"worker": ["127.0.0.1:20001", "127.0.0.1:20002"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    refused = pytest.raises(ConfigError, match="TF_CONFIG was set after the first strategy was created")
    with refused, strategy.scope():
        build()


@pytest.mark.parametrize("inputs", [object, lambda: "text", lambda: None])
def test_inputs_that_cannot_be_split_are_refused(
    strategy: lockstep.MultiWorkerMirroredStrategy, inputs: Any
) -> None:
    with strategy.scope():
        model = build()
    with pytest.raises(DataError, match=r"an input of type .* cannot be split over replicas"):
        model.fit(inputs(), verbose=0)


def test_a_second_optimizer_on_jax_is_refused_with_the_shape_that_works(
    strategy: lockstep.MultiWorkerMirroredStrategy,
) -> None:
    class Two(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            logs, (weights, others, optimizer, metrics) = super().train_step(state, data)
            weights, _ = self.second.stateless_apply(
                [v.value for v in self.second.variables], [w * 2 for w in weights], weights
            )
            return logs, (weights, others, optimizer, metrics)

    with strategy.scope():
        model = build(Two)
        model.second = keras.optimizers.SGD()
        model.second.build(model.trainable_variables)
    with pytest.raises(ModelError, match=r"compile a model for each of them, as in .*examples/gan\.py"):
        model.fit(X, Y, verbose=0)


def test_a_missing_row_of_a_replica_is_an_error(
    strategy: lockstep.MultiWorkerMirroredStrategy,
) -> None:
    class Pairs(keras.Sequential):
        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, *others: Any, **named: Any
        ) -> Any:
            return keras.ops.mean(keras.ops.square(y_pred[0] - y_pred[2]))

    with strategy.scope():
        model = build(Pairs)
    with pytest.raises(ModelError, match=r"which has 1 of the 3 rows of a batch, failed .* at .*\.py:\d+"):
        model.fit(X[:3], Y[:3], batch_size=3, verbose=0)


def test_weights_change_through_the_optimizer_only(
    strategy: lockstep.MultiWorkerMirroredStrategy,
) -> None:
    class Clipped(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            logs, (weights, *rest) = super().train_step(state, data)
            return logs, ([keras.ops.clip(weight, -0.01, 0.01) for weight in weights], *rest)

    class Replaced(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            logs, (_, *rest) = super().train_step(state, data)
            return logs, (state[0], *rest)

    for kind in (Clipped, Replaced):
        with strategy.scope():
            model = build(kind)
        with pytest.raises(ModelError, match="returns weights that its optimizer did not update"):
            model.fit(X, Y, verbose=0)


def test_a_loss_that_is_a_vector_is_refused(strategy: lockstep.MultiWorkerMirroredStrategy) -> None:
    with strategy.scope():
        model = build()
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=None))
    with pytest.raises(ModelError, match="reduction=None: it is a vector"):
        model.fit(X, Y, verbose=0)


def test_a_vector_that_only_a_validation_refuses_is_refused_before_the_first_epoch(
    strategy: lockstep.MultiWorkerMirroredStrategy,
) -> None:
    class Reduced(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            raise AssertionError("the training has begun")

    with strategy.scope():
        model = build(Reduced)
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=None))
    with pytest.raises(ModelError, match="reduction=None: it is a vector"):
        model.fit(X, Y, validation_data=(X, Y), verbose=0)


def test_synchronized_statistics_are_refused_by_name(strategy: lockstep.MultiWorkerMirroredStrategy) -> None:
    layer = keras.layers.BatchNormalization(name="mine")
    # Only TensorFlow lets a script request it.
    layer.synchronized = True
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"layer '.*mine' has synchronized=True"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("inside", [True, False])
def test_a_loaded_model_is_compiled_and_trains(
    strategy: lockstep.MultiWorkerMirroredStrategy, tmp_path: Path, inside: bool
) -> None:
    with strategy.scope():
        build().save(tmp_path / "model.keras")
    with strategy.scope() if inside else nullcontext():
        model = keras.models.load_model(tmp_path / "model.keras")
    assert model.compiled
    if inside:
        model.fit(X, Y, verbose=0)
    else:
        with pytest.raises(ScopeError):
            model.fit(X, Y, verbose=0)


@pytest.mark.filterwarnings("ignore:.build\\(\\). was called:UserWarning")
def test_layers_that_are_never_built_are_allowed(strategy: lockstep.MultiWorkerMirroredStrategy) -> None:
    class Unused(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = keras.layers.Dense(1), keras.layers.Dense(5)

        def call(self, inputs: Any) -> Any:
            return self.used(inputs)

        def compute_loss(
            self,
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            training: bool = True,
        ) -> Any:
            return keras.ops.mean((y - y_pred) ** 2)

    with strategy.scope():
        model = Unused()
        model.compile("sgd")
    model.fit(X, Y, verbose=0, validation_data=(X, Y))
    model.evaluate(X, Y, verbose=0)
    assert model.predict(X, verbose=0).shape == (9, 1)


def test_predicting_within_training_does_not_change_the_metrics(
    strategy: lockstep.MultiWorkerMirroredStrategy,
) -> None:
    class Predict(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.predict(X, verbose=0)

    losses = []
    for callbacks in ([], [Predict()]):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = build()
        history = model.fit(X, Y, batch_size=3, shuffle=False, verbose=0, callbacks=callbacks)
        losses.append(history.history["loss"])
    assert losses[0] == losses[1]


class Counter(keras.layers.Layer):
    """Has state that is not floating-point; `count` returns by how much its counter grows."""

    def __init__(self, count: Any) -> None:
        super().__init__(name="counter")
        self.count = count

    def build(self, shape: Any) -> None:
        self.steps = self.add_weight(shape=(2,), dtype="int32", trainable=False, name="steps")
        self.odd = self.add_weight(shape=(), dtype="bool", trainable=False, name="odd")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(keras.ops.stack([1, self.count(inputs)]))
            self.odd.assign(keras.ops.logical_not(self.odd))
        return inputs


def counting(strategy: lockstep.MultiWorkerMirroredStrategy, count: Any, **options: Any) -> Any:
    layer = Counter(count)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), layer, keras.layers.Dense(1)], name="wanted")
        model.compile("sgd", "mse", **options)
    return model, layer


@pytest.mark.parametrize("eager", [False, True])
def test_integer_state_that_all_replicas_change_equally_is_kept(
    strategy: lockstep.MultiWorkerMirroredStrategy, eager: bool
) -> None:
    """In the last step of an epoch, two of three replicas have no examples."""
    model, layer = counting(strategy, lambda x: -(2**20), run_eagerly=eager)
    model.fit(X, Y, batch_size=4, epochs=3, verbose=0)
    assert layer.steps.numpy().tolist() == [9, -9 * 2**20]
    assert bool(layer.odd.numpy())


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "count", [lambda x: keras.ops.shape(x)[0], lambda x: keras.ops.cast(2 * x[0, 0], "int32")]
)
def test_integer_state_that_replicas_change_differently_is_refused_by_name(
    strategy: lockstep.MultiWorkerMirroredStrategy, count: Any, eager: bool
) -> None:
    """Two replicas have three examples, and one has two."""
    model, _ = counting(strategy, count, run_eagerly=eager)
    x = np.repeat(np.arange(4, dtype="float32"), 8).reshape(8, 4)
    with pytest.raises(ModelError, match="set the int32 variable 'wanted/counter/steps' to different values"):
        model.fit(x, Y[:8], batch_size=8, shuffle=False, verbose=0)


class Kept(keras.metrics.Metric):
    """Keeps a value when it is reset."""

    def __init__(self, start: str, combine: Any) -> None:
        super().__init__(name="kept")
        self.value = self.add_variable((), initializer=start, name="value")
        self.combine = combine

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.value.assign(self.combine(self.value, keras.ops.sum(y - 0 * prediction)))

    def reset_state(self) -> None:
        pass

    def result(self) -> Any:
        return self.value * 1


@pytest.mark.parametrize(("start", "first"), [("zeros", 0), ("ones", 1)])
def test_a_metric_that_keeps_its_state_adds_up_over_calls(
    strategy: lockstep.MultiWorkerMirroredStrategy, start: str, first: int
) -> None:
    with strategy.scope():
        model = build(metrics=[Kept(start, lambda value, total: value + total)])
    found = [model.fit(X, Y, batch_size=4, epochs=2, verbose=0).history["kept"] for _ in range(2)]
    assert found == [[first + 9, first + 18], [first + 27, first + 36]]


@pytest.mark.parametrize(
    ("combine", "values"),
    [
        (lambda value, total: value * (1 + total), [50, 2500]),
        (lambda value, total: value / 2 + total, [4.125, 4.515625]),
    ],
)
def test_a_metric_whose_increments_depend_on_the_state_that_it_keeps_is_updated_once(
    strategy: lockstep.MultiWorkerMirroredStrategy, combine: Any, values: list[float]
) -> None:
    with strategy.scope():
        model = build(metrics=[Kept("ones", combine)])
    assert model.fit(X, Y, batch_size=4, epochs=2, verbose=0).history["kept"] == values


class Watches(keras.layers.Layer):
    """Updates a metric with a number, which replicas cannot join."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def call(self, x: Any) -> Any:
        self.metric.update_state(keras.ops.mean(x), 0)
        return x


@pytest.mark.parametrize(
    ("combine", "why"),
    [
        (lambda value, total: value + total * (1 + value), "not the sum of both alone"),
        (lambda value, total: value * (1 + total), "depends on this"),
    ],
)
def test_a_metric_that_gets_a_number_and_does_not_add_up_is_refused_by_name(
    strategy: lockstep.MultiWorkerMirroredStrategy, combine: Any, why: str
) -> None:
    start = "ones" if "depends" in why else "zeros"
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Watches(Kept(start, combine)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=f"metric variable '.*value' does not add up: .*{why}"):
        model.fit(X, Y, verbose=0)


def test_a_metric_that_gets_a_number_and_does_not_start_from_zero_is_refused_by_name(
    strategy: lockstep.MultiWorkerMirroredStrategy,
) -> None:
    class Lowest(Kept):
        def reset_state(self) -> None:
            self.value.assign(1e9)

    with strategy.scope():
        metric = Lowest("zeros", keras.ops.minimum)
        model = keras.Sequential([keras.Input((4,)), Watches(metric), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"metric variable '.*value' does not start from zero"):
        model.fit(X, Y, verbose=0)


def test_a_metric_with_a_bool_is_refused_by_name(strategy: lockstep.MultiWorkerMirroredStrategy) -> None:
    class Large(Kept):
        def __init__(self) -> None:
            super().__init__("zeros", keras.ops.maximum)
            self.found = self.add_variable((), "zeros", dtype="bool", name="found")

    with strategy.scope():
        model = build(metrics=[Large()])
    with pytest.raises(ModelError, match=r"metric variable '.*found' is a bool, which cannot be summed"):
        model.fit(X, Y, verbose=0)


def test_nan_passes_through_as_in_keras(strategy: lockstep.MultiWorkerMirroredStrategy) -> None:
    x = X.copy()
    x[4, 2] = np.nan
    with strategy.scope():
        model = build()
    history = model.fit(x, Y, batch_size=9, epochs=2, verbose=0)
    assert np.isnan(history.history["loss"]).all()
    assert all(np.isnan(weight).any() for weight in model.get_weights())


def test_a_recompiled_and_a_second_model_train_too(strategy: lockstep.MultiWorkerMirroredStrategy) -> None:
    with strategy.scope():
        first, second = build(), build()
    first.fit(X, Y, verbose=0)
    second.fit(X, Y, verbose=0)
    first.compile("adam", "mae")
    before = lockstep.digest(first)
    first.fit(X, Y, verbose=0)
    assert lockstep.digest(first) != before
    assert lockstep.digest(first) != lockstep.digest(second)


def test_calls_are_reported(strategy: lockstep.MultiWorkerMirroredStrategy, published: list[Event]) -> None:
    with strategy.scope():
        model = build()
    del published[:]
    model.fit(X, Y, validation_data=(X, Y), verbose=0)
    model.evaluate(X, Y, verbose=0)
    names = [re.sub(r" \d+", "", event.name) for event in published if isinstance(event, CallStarted)]
    assert names == ["fit", "validation within fit", "evaluate"]


def test_a_model_loaded_outside_the_scope_is_refused_with_a_remedy(
    strategy: lockstep.MultiWorkerMirroredStrategy, tmp_path: Path
) -> None:
    build().save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    with pytest.raises(ScopeError, match=r"load it with keras\.models\.load_model, under `with strategy"):
        model.fit(X, Y, verbose=0)
    with strategy.scope():
        keras.models.load_model(tmp_path / "model.keras").fit(X, Y, verbose=0)


def test_a_change_of_trainable_without_compiling_again_is_refused(
    strategy: lockstep.MultiWorkerMirroredStrategy,
) -> None:
    with strategy.scope():
        model = build()
        model.fit(X, Y, verbose=0)
        model.layers[-1].trainable = False
        for call in (model.fit, model.train_on_batch):
            with pytest.raises(
                ModelError, match=r"'wanted/dense.*/kernel' is no longer trainable, .*compile"
            ):
                call(X, Y)
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)


def test_a_stateful_layer_is_refused_by_name(strategy: lockstep.MultiWorkerMirroredStrategy) -> None:
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((2, 4), batch_size=6), keras.layers.LSTM(3, stateful=True, name="kept")]
        )
        model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"'.*kept' is stateful.*--replicas 1"):
        model.fit(np.ones((6, 2, 4)), np.ones((6, 3)), batch_size=6, verbose=0)


def test_a_fixed_batch_is_named_where_a_step_fails_with_it(
    strategy: lockstep.MultiWorkerMirroredStrategy,
) -> None:
    class Merged(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return keras.ops.reshape(keras.ops.reshape(inputs, (24,)), (6, 4))

    def fixed(*between: Any) -> keras.Model:
        model = keras.Sequential(
            [keras.layers.Input((4,), batch_size=6, name="six"), *between, keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        return model

    with strategy.scope():
        fixed().fit(X, Y, batch_size=6, verbose=0)
        model = fixed(Merged())
    with pytest.raises(ModelError, match=r"has 2 of the 6 rows .* failed .* input 'six' .* fixed batch of 6"):
        model.fit(X[:6], Y[:6], batch_size=6, verbose=0)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_program_that_expects_the_rows_of_the_batch_is_named_with_its_line(
    strategy: lockstep.MultiWorkerMirroredStrategy, method: str
) -> None:
    class Noisy(keras.Sequential):
        def call(self, inputs: Any, training: Any = None) -> Any:
            return super().call(inputs + keras.ops.ones((6, 4)))

    line = Noisy.call.__code__.co_firstlineno + 1
    with strategy.scope():
        model = build(Noisy)
    arrays = (X[:6],) if method == "predict" else (X[:6], Y[:6])
    with pytest.raises(ModelError, match="has 2 of the 6 rows of a batch, failed") as refusal:
        getattr(model, method)(*arrays, batch_size=6, verbose=0)
    assert f" at {Path(__file__).name}:{line}, " in str(refusal.value)
    assert "ops.shape(x)[0], or run with one replica (--replicas 1)" in str(refusal.value)


@pytest.mark.parametrize("rows", [1, 6])
def test_a_mistake_of_the_program_keeps_its_own_error(
    strategy: lockstep.MultiWorkerMirroredStrategy, rows: int
) -> None:
    """Although an inner model has the batch of its first data, 6 rows, as a fixed one."""

    class Wrong(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.Sequential([keras.layers.Dense(1)])

        def build(self, shape: Any) -> None:
            self.inner.build((6, 4))

        def call(self, inputs: Any) -> Any:
            found = self.inner(inputs["rows"])
            return found + keras.ops.ones((7, 7)) @ inputs["more"] if "more" in inputs else found

    with strategy.scope():
        model = Wrong()
        model.compile("sgd", "mse")
    model.fit({"rows": X[:6]}, Y[:6], batch_size=6, verbose=0)
    with pytest.raises(Exception, match="7") as failure:
        model.predict({"rows": X[:rows], "more": X[:rows]}, verbose=0)
    assert not isinstance(failure.value, LockstepError)


def test_a_metric_is_tried_before_the_first_single_batch(
    strategy: lockstep.MultiWorkerMirroredStrategy,
) -> None:
    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.found = self.add_weight(shape=(), initializer="zeros", name="found")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.found.assign(keras.ops.maximum(self.found.value, keras.ops.max(y_true)))

        def result(self) -> Any:
            return self.found.value

    with strategy.scope():
        model = build(metrics=[Largest()])
    logs = [model.train_on_batch(X, scale * Y, return_dict=True) for scale in (2, 1)]
    assert [log["largest"] for log in logs] == [2, 1]


def test_unequal_parts_of_a_batch_are_split_in_proportion_or_refused() -> None:
    batch = whole_batch((np.arange(12), np.arange(6)), 3)
    shares = [batch.share(replica).data() for replica in range(3)]
    assert [(a.tolist(), b.tolist()) for a, b in shares] == [
        ([0, 1, 2, 3], [0, 1]),
        ([4, 5, 6, 7], [2, 3]),
        ([8, 9, 10, 11], [4, 5]),
    ]
    with pytest.raises(DataError, match="parts of 12 and 5 rows"):
        whole_batch((np.arange(12), np.arange(5)), 3).share(0).data()
