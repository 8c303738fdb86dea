"""Training steps that users write run on replicas as in plain Keras, with the same results.

They run with a strategy or, unchanged, without one.
"""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import jax
import keras
import numpy as np
import pytest

import lockstep
from lockstep.keras.numbered_calls import NumberedCalls

Launch = Callable[..., Any]


IN_GRAPHS = ("parts", "eager_parts", "unreduced")
"""Trainings on TensorFlow in `make test-ci`."""
OF_DATASETS = ("triplet", "texts")
"""Other trainings on TensorFlow only."""
IN_ATTRIBUTES = ("cleared", "given_step")
"""Steps that keep gradients, or that are attributes, on TensorFlow and PyTorch."""
EAGER = ("phased", "remembering", "loss_figures")
"""Trainings on TensorFlow and PyTorch that other tests resemble."""
ON_TORCH = (*EAGER, *IN_ATTRIBUTES, "cleared_tensors", "fading", "unreduced")
TRAININGS = ("nested", "unweighted", "averaged", "distilled", "endpoint", "adapted")


@pytest.mark.slow("torch")
@pytest.mark.ci
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        pytest.param("jax", TRAININGS, marks=pytest.mark.slow, id="jax"),
        pytest.param("tensorflow", IN_GRAPHS, id="tensorflow"),
        pytest.param(
            "tensorflow",
            (*TRAININGS, *EAGER, *IN_ATTRIBUTES, *OF_DATASETS),
            marks=pytest.mark.slow,
            id="tensorflow-rest",
        ),
        pytest.param("torch", (*TRAININGS, *ON_TORCH), id="torch"),
    ],
    indirect=["backend"],
)
def test_users_steps_have_equal_bits_and_the_numbers_of_plain_keras(
    launch: Launch, backend: str, names: Sequence[str]
) -> None:
    one = launch("-n 1 --replicas 2 --no-adopt", "own_steps.py", "--both", *names, backend=backend)
    two = launch("-n 2 --replicas 2", "own_steps.py", "--adopted", *names, backend=backend)
    assert (one.status, two.status) == (0, 0), one.stderr + two.stderr
    results = one.marked(0, "result ")
    assert results == two.marked(0, "result ") == two.marked(1, "result ")
    assert [line.split()[2] for line in results if "stopped" in line] == ["3", "10", "5"]
    expected = one.marked(0, "plain ")
    assert {line.split()[1] for line in expected} == {*names}
    for found, wanted in zip(one.marked(0, "numbers "), expected, strict=True):
        (_, name, *got), (_, _, *figures) = found.split(), wanted.split()
        distance = np.linalg.norm(np.array(got, "float64") - np.array(figures, "float64"))
        assert distance <= 1e-5 * np.linalg.norm(np.array(figures, "float64")), name


def test_calls_within_a_call_do_not_change_the_numbers_of_the_calls_after_it() -> None:
    with_inner, without = NumberedCalls(), NumberedCalls()
    numbers = []
    with with_inner.enter("fit") as fit:
        for _ in range(2):
            with with_inner.enter("validation") as call:
                numbers.append(call.number)
    with without.enter("fit"):
        pass
    with with_inner.enter("fit") as one, without.enter("fit") as other:
        assert one.number == other.number == fit.number + 1
    assert len({*numbers, fit.number, one.number}) == 4


def test_seeds_of_runs_depend_on_their_position_and_not_on_other_seeds() -> None:
    one, other = NumberedCalls(), NumberedCalls()
    for calls in (one, other):
        calls.next_run_seed()
    before = other.next_seed()
    with one.enter("steps") as call, other.enter("steps") as its_call:
        # The step that a process takes before it joins or resumes has the same position.
        first = [one.next_run_seed() for _ in range(2)]
        one.repeat_run_seeds()
        assert [one.next_run_seed() for _ in range(2)] == first
        call.steps = its_call.steps = 1
        other.next_seed()
        later = one.next_run_seed()
        assert other.next_run_seed() == later
    assert len({*first, later, before}) == 4


def own_step(self: Any, state: Any, data: Any) -> Any:
    """A step on JAX that computes its gradients itself."""
    weights, others, slots, metrics = state
    x, y = data

    def loss_of(weights: Any) -> Any:
        found, _ = self.stateless_call(weights, others, x)
        return keras.ops.mean((found - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
    return {"loss": loss}, (weights, others, slots, metrics)


def test_the_gradients_of_a_step_that_is_an_attribute_are_weighted_by_the_examples() -> None:
    """Of three replicas, one has 4 of 10 examples."""
    x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
    y = x[:, :1] ** 2
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    kernel, bias = model.get_weights()
    model.train_step = MethodType(own_step, model)
    model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
    errors = x @ kernel + bias - y
    wanted = [kernel - 0.1 * 2 * x.T @ errors / 10, bias - 0.1 * 2 * errors.mean(axis=0)]
    for found, value in zip(model.get_weights(), wanted, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)


class Resting(keras.Model):
    """Adds up gradients, applies their sum in each second step, and logs another figure then."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 4))
        self.sums = [self.add_weight(one.shape, "zeros", trainable=False) for one in self.dense.weights]
        self.steps = self.add_weight((), "zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, state: Any, data: Any) -> Any:
        weights, others, slots, metrics = state
        x, y = data

        def loss_of(weights: Any) -> Any:
            found, _ = self.stateless_call(weights, others, x)
            return keras.ops.mean((found - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        *sums, steps = others
        sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
        logs = {"waiting": loss}
        if int(steps) % 2:
            weights, slots = self.optimizer.stateless_apply(slots, sums, weights)
            sums = [0 * total for total in sums]
            logs = {"applied": loss}
        return logs, (weights, [*sums, steps + 1], slots, metrics)


def test_an_eager_step_on_jax_may_differ_from_the_step_before() -> None:
    """With three replicas, of which two have no examples in the last step."""
    x = np.random.default_rng(0).normal(size=(31, 4)).astype("float32")
    y = x[:, :1] ** 2
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = Resting()
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    kernel, bias = model.dense.get_weights()
    logged: list[Any] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: logged.append(dict(logs)))
    model.fit(x, y, batch_size=10, shuffle=False, verbose=0, callbacks=[note])
    sums, wanted = [np.zeros((4, 1)), np.zeros(1)], []
    for step in range(4):
        rows, targets = x[10 * step : 10 * step + 10], y[10 * step : 10 * step + 10]
        errors = rows @ kernel + bias - targets
        gradients = [2 * rows.T @ errors / len(rows), 2 * errors.mean(axis=0)]
        sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
        wanted.append(("applied" if step % 2 else "waiting", pytest.approx((errors**2).mean(), rel=1e-5)))
        if step % 2:
            kernel, bias = kernel - 0.1 * sums[0], bias - 0.1 * sums[1]
            sums = [0 * total for total in sums]
    assert [(name, float(value)) for logs in logged for name, value in logs.items()] == wanted
    for found, value in zip(model.dense.get_weights(), (kernel, bias), strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-6)
