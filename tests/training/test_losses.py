"""Losses and metrics that replicas combine differently from one process, as the docs list them."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
from lockstep.topology import split_evenly

ops = keras.ops
REPLICAS = 3
"""The number of replicas of the job that this process belongs to."""
X = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(10, 4, 1)).astype("float32")


class Added(keras.layers.Layer):
    """Adds a loss that depends on its inputs as a whole."""

    def __init__(self, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.loss = loss

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.loss(inputs))
        return inputs


def one_model(*layers: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((4, 1)), *(layer() for layer in layers), keras.layers.Dense(1)])

    return build


KINDS = {
    "examples compared with each other": one_model(
        lambda: keras.layers.Dense(2), lambda: Added(lambda rows: ops.mean(ops.std(rows, axis=0)))
    ),
    "BatchNormalization": one_model(keras.layers.BatchNormalization),
}


def compiled(kind: str, scope: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    with scope:
        model = KINDS[kind]()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def after_a_step(model: keras.Model, rows: slice, fit: Any) -> list[Any]:
    fit(model, X[rows, :, None], Y[rows], batch_size=10, shuffle=False, verbose=0)
    return [np.asarray(variable.value) for variable in model.trainable_variables]


@pytest.mark.ci("BatchNormalization")
@pytest.mark.parametrize("kind", KINDS)
def test_losses_listed_as_per_replica_are_the_mean_of_the_replicas(kind: str) -> None:
    """With SGD, that is the mean of the weights after each replica's examples, weighted by their numbers."""
    found = after_a_step(
        compiled(kind, lockstep.MultiWorkerMirroredStrategy().scope()), slice(None), keras.Model.fit
    )
    counts = split_evenly(len(X), REPLICAS)
    ends = np.cumsum(counts)
    alone = [
        after_a_step(compiled(kind, nullcontext()), slice(end - count, end), inspect.unwrap(keras.Model.fit))
        for count, end in zip(counts, ends, strict=True)
    ]
    whole = after_a_step(compiled(kind, nullcontext()), slice(None), inspect.unwrap(keras.Model.fit))
    for got, wanted in zip(found, zip(*alone, strict=True), strict=True):
        np.testing.assert_allclose(got, np.average(wanted, axis=0, weights=counts), rtol=1e-5, atol=1e-6)
    assert any(not np.allclose(got, other, rtol=1e-3) for got, other in zip(found, whole, strict=True))


def test_a_mean_that_a_train_step_updates_with_a_number_weighs_it_by_the_examples() -> None:
    class Counting(keras.Sequential):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.mine = keras.metrics.Mean(name="mine")

        def train_step(self, state: Any, data: Any) -> Any:
            logs, (*rest, metrics) = super().train_step(state, data)
            index = [variable is self.mine.total for variable in self.metrics_variables].index(True)
            kept = [metrics[index], metrics[index + 1]]
            kept = self.mine.stateless_update_state(kept, ops.mean(data[0]))
            metrics = [*metrics[:index], *kept, *metrics[index + 2 :]]
            return {**logs, "mine": self.mine.stateless_result(kept)}, (*rest, metrics)

    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = Counting([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(X, Y[:, 0], batch_size=10, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["mine"][0], X.mean(), rtol=1e-5)


@pytest.mark.ci("a vector")
@pytest.mark.parametrize("kind", ["a vector", "an old id"])
def test_losses_that_layers_add_are_those_of_plain_keras(kind: str) -> None:
    """Keras adds up the elements of a vector. A loss may have the id of one that a layer added before."""
    constant = ops.convert_to_tensor(0.5)
    losses: dict[str, Callable[[Any], Any]] = {
        "a vector": lambda rows: 0.1 * ops.sum(ops.square(rows), axis=-1),
        "an old id": lambda rows: constant,
    }
    layers = Added(losses[kind]), Added(lambda rows: ops.mean(rows))

    class Ages(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            layers[1]._loss_ids.add(id(constant))

    def loss(scope: Any, fit: Any, callbacks: Any) -> float:
        keras.utils.set_random_seed(3)
        with scope:
            model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=kind == "an old id")
        history = fit(model, X, Y[:, 0], batch_size=10, shuffle=False, verbose=0, callbacks=callbacks).history
        return float(history["loss"][0])

    found = loss(lockstep.MultiWorkerMirroredStrategy().scope(), keras.Model.fit, [Ages()])
    np.testing.assert_allclose(found, loss(nullcontext(), inspect.unwrap(keras.Model.fit), []), rtol=1e-5)
