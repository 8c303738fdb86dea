"""Custom loops of different kinds.

    custom_loops.py [--near] [--kill WORKER STEP] [NAME...]

Prints a digest of the results of each. With --near, each runs twice more without parts that are random or
per replica, and the numbers are printed: with the strategy and with plain Keras, which must agree; a loop
without such parts runs only once with the strategy. On TensorFlow, functions run eagerly. --kill kills a
worker in the loop that Lockstep drives, before gradients are summed.
"""

import argparse
import hashlib
import os
import random
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job

layers, ops = keras.layers, keras.ops
BACKEND = keras.backend.backend()
Step = Callable[[Any, Any], tuple[Any, Any, list[Any]]]


class Alone:
    """Replaces the strategy in a program without Lockstep."""

    num_replicas_in_sync = 1

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        return fn(*map(ops.convert_to_tensor, args))

    def reduce(self, op: str, value: Any, axis: int | None = None) -> Any:
        if axis is None:
            return value
        return ops.sum(value, axis) if op == "SUM" else ops.mean(value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        return value

    def experimental_distribute_dataset(self, dataset: Any) -> Any:
        return dataset


class Context:
    def __init__(self, strategy: Any, exact: bool = False, killed: Sequence[int] = ()) -> None:
        self.strategy, self.exact, self.killed = strategy, exact, list(killed)
        self.plain = isinstance(strategy, Alone)

    def random(self, *some: keras.Layer) -> list[keras.Layer]:
        """The layers, unless the results must be those of plain Keras."""
        return [] if self.exact else list(some)

    def all_reduce(self, op: str, value: Any) -> Any:
        return value if self.plain else lockstep.get_replica_context().all_reduce(op, value)

    def all_gather(self, value: Any) -> Any:
        return value if self.plain else lockstep.get_replica_context().all_gather(value, axis=0)

    def batches(self, size: int, count: int = 29) -> Any:
        generator = np.random.default_rng(0)
        x = generator.normal(size=(count, 6)).astype("float32")
        y = (x @ generator.normal(size=(6, 3))).argmax(axis=1).astype("int32")
        whole = [(x[i : i + size], y[i : i + size]) for i in range(0, count, size)]
        return self.strategy.experimental_distribute_dataset(whole)


def differentiated(model: Any, loss_of: Callable[[Any, Any], Any]) -> Step:
    """Return `step(x, y) -> (loss, outputs, gradients)` with the backend's automatic differentiation."""
    if BACKEND == "jax":
        import jax

        @jax.jit
        def compute(trainable: Any, others: Any, x: Any, y: Any) -> Any:
            def loss(trainable: Any) -> Any:
                outputs, after = model.stateless_call(trainable, others, x, training=True)
                return loss_of(y, outputs), (outputs, after)

            return jax.value_and_grad(loss, has_aux=True)(trainable)

        def jax_step(x: Any, y: Any) -> tuple[Any, Any, list[Any]]:
            trainable, others = model.trainable_variables, model.non_trainable_variables
            values = [[variable.value for variable in group] for group in (trainable, others)]
            (loss, (outputs, after)), gradients = compute(*values, x, y)
            for variable, value in zip(others, after, strict=True):
                variable.assign(value)
            return loss, outputs, gradients

        return jax_step
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.config.run_functions_eagerly(True)

        def tensorflow_step(x: Any, y: Any) -> tuple[Any, Any, list[Any]]:
            with tf.GradientTape() as tape:
                outputs = model(x, training=True)
                loss = loss_of(y, outputs)
            return loss, outputs, tape.gradient(loss, model.trainable_variables)

        return tensorflow_step

    def step(x: Any, y: Any) -> tuple[Any, Any, list[Any]]:
        if context.plain:
            # A replica begins without gradients.
            model.zero_grad()
        outputs = model(x, training=True)
        loss = loss_of(y, outputs)
        loss.backward()
        return loss, outputs, [variable.value.grad for variable in model.trainable_variables]

    return step


def classifier(*extra: keras.Layer) -> keras.Model:
    return keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="relu"), *extra, layers.Dense(3)])


def summed(y: Any, outputs: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    return loss(y, outputs) / 6


def full() -> Any:
    """Normalization, Dropout and metrics; an uneven last batch."""
    model = classifier(*context.random(layers.BatchNormalization(), layers.Dropout(0.3)))
    optimizer = keras.optimizers.Adam(1e-2)
    metrics = [keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean(), keras.metrics.Sum()]
    step = differentiated(model, summed)

    def train(x: Any, y: Any) -> Any:
        loss, outputs, gradients = step(x, y)
        optimizer.apply(gradients, model.trainable_variables)
        metrics[0].update_state(y, outputs)
        metrics[1].update_state(ops.sum(outputs, axis=1))
        metrics[2].update_state(loss)
        return {"loss": loss, "rows": outputs[:, 0]}

    figures = []
    for _ in range(3):
        for metric in metrics:
            metric.reset_state()
        for batch in context.batches(6):
            results = context.strategy.run(train, args=batch)
            figures.append(context.strategy.reduce("SUM", results["loss"]))
            figures.append(context.strategy.gather(results["rows"], axis=0))
        figures += [metric.result() for metric in metrics]
    return [model, optimizer], figures


def pure() -> Any:
    """Gradients are returned, summed and applied outside of the function; unseeded random numbers."""
    model = classifier()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    step = differentiated(model, summed)

    def compute(x: Any, y: Any) -> Any:
        noise = 0 if context.exact else keras.random.normal(ops.shape(x)) + np.random.normal()
        loss, _, gradients = step(x + noise, y)
        return loss, gradients

    figures = []
    for batch in context.batches(6):
        loss, gradients = context.strategy.reduce("SUM", context.strategy.run(compute, args=batch))
        optimizer.apply(gradients, model.trainable_variables)
        figures.append(loss)
    return [model, optimizer], figures


def two() -> Any:
    """Two optimizers in one function, the second after the first update; a copy of weights."""
    first, second = (
        classifier(*context.random(layers.Dropout(0.2))),
        keras.Sequential([layers.Input((6,)), layers.Dense(3)]),
    )
    copy = keras.Variable(np.zeros((8, 3), "float32"), trainable=False)
    optimizers = [keras.optimizers.Adam(1e-2), keras.optimizers.RMSprop(1e-2)]
    step = differentiated(first, summed)

    def follow(y: Any, outputs: Any) -> Any:
        return ops.sum(ops.square(outputs - y)) / 6

    chase = differentiated(second, follow)

    def train(x: Any, y: Any) -> Any:
        loss, _, gradients = step(x, y)
        optimizers[0].apply(gradients, first.trainable_variables)
        other, _, gradients = chase(x, ops.stop_gradient(first(x)))
        optimizers[1].apply_gradients(zip(gradients, second.trainable_variables, strict=True))
        copy.assign(0.5 * copy + 0.5 * first.layers[-1].kernel)
        return loss, other

    figures = []
    for batch in context.batches(6):
        figures += context.strategy.reduce("SUM", context.strategy.run(train, args=batch))
    return [first, second, *optimizers, copy], figures


def talk() -> Any:
    """Merges in the middle of a function; a model that its first step builds."""
    model = keras.Sequential([layers.Dense(8), *context.random(layers.BatchNormalization()), layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.05)

    def train(x: Any, y: Any) -> Any:
        outputs = model(x, training=True)
        total, rows = context.all_reduce("SUM", (ops.sum(ops.abs(outputs)), len(x)))
        gathered = context.all_gather(outputs)
        share = ops.sum(ops.abs(outputs)) / total
        mean = context.all_reduce("MEAN", ops.cast(rows, "float32"))
        # Not a gradient, but with the same sum.
        optimizer.apply(
            [share + ops.zeros(v.shape) for v in model.trainable_variables], model.trainable_variables
        )
        return share, ops.sum(gathered, axis=0), mean

    figures = []
    for batch in context.batches(6):
        share, gathered, mean = context.strategy.run(train, args=batch)
        figures += context.strategy.reduce("SUM", share), context.strategy.reduce("MEAN", gathered)
        figures.append(context.strategy.reduce("MEAN", mean))
    return [model, optimizer], figures


def gradient(function: Callable[[Any], Any], at: Any) -> Any:
    """Return the gradient of a function of one tensor; it is differentiable."""
    if BACKEND == "jax":
        import jax

        return jax.grad(function)(at)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(at)
            value = function(at)
        return tape.gradient(value, at)
    if BACKEND == "torch":
        import torch

        at = at if at.requires_grad else at.detach().requires_grad_()
        return torch.autograd.grad(function(at), at, create_graph=True)[0]
    raise NotImplementedError(BACKEND)


def through() -> Any:
    """Gradients through merges: a contrastive loss, joint statistics, a penalty."""
    weight = keras.Variable(np.random.default_rng(1).normal(size=(6, 4)).astype("float32"))
    optimizer = keras.optimizers.SGD(0.01)
    share = 1 / context.strategy.num_replicas_in_sync

    def contrast(rows: Any, weight: Any) -> Any:
        """Each row against all others; the second leaf has integers."""
        own = ops.tanh(ops.matmul(rows, weight))
        found = context.all_gather({"rows": own, "ids": ops.arange(ops.shape(rows)[0])})
        return ops.sum(ops.logsumexp(ops.matmul(own, ops.transpose(found["rows"])), axis=1)) / 6

    def normalized(rows: Any, weight: Any) -> Any:
        own = ops.matmul(rows, weight)
        count = context.all_reduce("SUM", ops.shape(rows)[0])
        mean = context.all_reduce("SUM", ops.sum(own, 0)) / ops.cast(count, "float32")
        spread = context.all_reduce("MEAN", [ops.sum(ops.square(own - mean), 0)])[0] / share
        return ops.sum((own - mean) ** 3 / ops.sqrt(spread + 1)) / 6

    def penalty(rows: Any, weight: Any) -> Any:
        """A second derivative of a sum over all replicas."""
        whole = gradient(lambda w: share * ops.sum(context.all_gather(ops.matmul(rows, w)) ** 3), weight)
        return share * ops.mean(context.all_reduce("SUM", whole) ** 2) / 1e3

    def train(x: Any, y: Any) -> Any:
        losses = [contrast, normalized, penalty]
        gradients = [gradient(lambda w, loss=loss: loss(x, w), weight.value + 0) for loss in losses]
        optimizer.apply([sum(ops.stop_gradient(one) for one in gradients)], [weight])

    for batch in context.batches(6, 12):
        context.strategy.run(train, args=batch)
    return [weight, optimizer], []


def tiny() -> Any:
    """Fewer examples than replicas, a result for each row, and the mean over all rows.

    Gradients are added up in variables, which are cleared after the update.
    """
    model = classifier(*context.random(layers.Dropout(0.5)))
    optimizer = keras.optimizers.SGD(0.1)
    sums = [
        keras.Variable(np.zeros(one.shape, "float32"), trainable=False) for one in model.trainable_variables
    ]
    step = differentiated(model, summed)
    seen = keras.metrics.Sum()

    def train(x: Any, y: Any) -> Any:
        _, outputs, gradients = step(x, y)
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient)
        optimizer.apply(
            [total if BACKEND == "jax" else total.value for total in sums], model.trainable_variables
        )
        for total in sums:
            total.assign(ops.zeros(total.shape))
        seen.update_state(ops.ones_like(y))
        return outputs

    def evaluate(x: Any, y: Any) -> Any:
        return ops.square(model(x))

    figures = []
    for batch in context.batches(2, 9):
        outputs = context.strategy.run(train, args=batch)
        figures += context.strategy.gather(outputs, axis=0), context.strategy.reduce("SUM", outputs, axis=0)
        squares = context.strategy.run(evaluate, args=batch)
        figures.append(context.strategy.reduce("MEAN", squares, axis=0))
    return [model, optimizer], [*figures, seen.result()]


def driven() -> Any:
    """A loop that Lockstep drives: returned gradients are summed after a worker may have been lost."""
    model = classifier()
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    step = differentiated(model, summed)
    batches = iter(context.batches(6, 48))
    losses: list[float] = []

    def compute(x: Any, y: Any) -> Any:
        noise = 0 if context.exact else keras.random.normal(ops.shape(x)) + np.random.normal()
        loss, _, gradients = step(x + noise, y)
        return loss, gradients

    state = {"model": model, "optimizer": optimizer, "batches": batches, "losses": losses}
    for number in range(8) if context.plain else context.strategy.steps(8, state):
        results = context.strategy.run(compute, args=next(batches))
        if [job.current().worker, number] == context.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        loss, gradients = context.strategy.reduce("SUM", results)
        optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(loss))
    return [model, optimizer], losses


def differing() -> Any:
    """Weights that depend on the worker, which is refused."""
    model = classifier()
    model.layers[0].bias.assign(np.full(8, job.current().worker))
    optimizer = keras.optimizers.SGD(0.1)
    step = differentiated(model, summed)

    def train(x: Any, y: Any) -> None:
        _, _, gradients = step(x, y)
        optimizer.apply(gradients, model.trainable_variables)

    for batch in context.batches(6):
        context.strategy.run(train, args=batch)
    return [model], []


EXACT = ("through",)
"""Loops in which nothing is random or computed per replica."""


def numbers_in(owners: Iterable[Any], figures: Iterable[Any]) -> list[np.ndarray]:
    variables = [v for owner in owners for v in getattr(owner, "variables", [owner])]
    values = [variable.value for variable in variables]
    return [np.asarray(ops.convert_to_numpy(value)) for value in [*values, *figures]]


def main(names: Sequence[str], near: bool = False) -> None:
    """Run loops; with `near`, also print the numbers of those that are exact anyway."""
    for name in names:
        random.seed(7)
        found = numbers_in(*globals()[name]())
        if not context.exact:
            print("result", name, hashlib.sha256(b"".join(array.tobytes() for array in found)).hexdigest())
        if context.exact or (near and name in EXACT):
            mark = "plain" if context.plain else "numbers"
            print(mark, name, *(float(number) for array in found for number in np.ravel(array)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--near", action="store_true")
    parser.add_argument("--kill", type=int, nargs=2, default=[])
    parser.add_argument(
        "names", nargs="*", default=["driven", "full", "pure", "two", "talk", "through", "tiny"]
    )
    arguments = parser.parse_args()
    strategy = lockstep.MultiWorkerMirroredStrategy()
    context = Context(strategy, killed=arguments.kill)
    main(arguments.names, arguments.near)
    if arguments.near:
        context = Context(strategy, exact=True)
        main([name for name in arguments.names if name not in EXACT])
        context = Context(Alone(), exact=True)
        main(arguments.names)
