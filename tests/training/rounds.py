"""Trainings whose steps update weights several times, or use them after an update.

    rounds.py [--plain] [--exact] [--eager] [--fail] [NAME...]

Prints a digest of the results of each, or of those that are named; with --exact, nothing is random, and the
numbers are printed. With --fail, the last training ends with an error.
"""

import argparse
import contextlib
import sys
from typing import Any

import keras
import numpy as np

import lockstep

layers, ops = keras.layers, keras.ops
BACKEND = keras.backend.backend()


def gradients(loss: Any, variables: Any) -> Any:
    """Differentiate `loss()` with TensorFlow or PyTorch; return (loss, gradients)."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss()
        return value, tape.gradient(value, variables)
    if BACKEND == "torch":
        import torch

        value = loss()
        return value, torch.autograd.grad(value, [variable.value for variable in variables])
    raise NotImplementedError(BACKEND)


class Gan(keras.Model):
    """Two optimizers, one of them in a dictionary, whose updates follow each other; then a logged value."""

    def __init__(self, exact: bool) -> None:
        super().__init__()
        random = [] if exact else [layers.Dropout(0.3), layers.BatchNormalization()]
        self.critic = keras.Sequential(
            [layers.Input((6,)), layers.Dense(8, activation="tanh"), *random, layers.Dense(1)]
        )
        self.painter = keras.Sequential(
            [layers.Input((4,)), layers.Dense(8, activation="relu"), layers.Dense(6)]
        )
        self.noise = None if exact else keras.random.SeedGenerator(5)
        self.told, self.taken = keras.metrics.Mean(name="told"), keras.metrics.Mean(name="taken")
        self.built = True

    def compile(self, critic: Any, painter: Any, **options: Any) -> None:
        super().compile(**options)
        self.critic_optimizer, self.others = critic, {"painter": painter}

    def train_step(self, data: Any) -> Any:
        x, noise = data
        count = ops.shape(x)[0]
        loss = keras.losses.BinaryCrossentropy(from_logits=True)

        def drawn() -> Any:
            extra = 0 if self.noise is None else keras.random.normal(ops.shape(noise), seed=self.noise)
            return self.painter(noise + extra, training=True)

        def apart() -> Any:
            real, fake = self.critic(x, training=True), self.critic(drawn(), training=True)
            return loss(ops.ones_like(real), real) + loss(ops.zeros_like(fake), fake)

        def fooled() -> Any:
            fake = self.critic(drawn(), training=True)
            return loss(ops.ones_like(fake), fake)

        told, first = gradients(apart, self.critic.trainable_variables)
        self.critic_optimizer.apply(first, self.critic.trainable_variables)
        taken, second = gradients(fooled, self.painter.trainable_variables)
        self.others["painter"].apply(second, self.painter.trainable_variables)
        self.told.update_state(told, sample_weight=count)
        self.taken.update_state(taken, sample_weight=count)
        after = self.critic(x, training=False)
        return {"told": self.told.result(), "taken": self.taken.result(), "after": ops.mean(after)}


class Twice(keras.Model):
    """Two updates by one optimizer; then a norm of the new weights, and a slow copy of them."""

    def __init__(self, exact: bool) -> None:
        super().__init__()
        random = [] if exact else [layers.Dropout(0.3)]
        self.net = keras.Sequential([layers.Input((6,)), layers.Dense(8, activation="tanh"), *random])
        self.top, self.slow = layers.Dense(1), layers.Dense(1, trainable=False)
        self.top.build((None, 8))
        self.slow.build((None, 8))

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.top(self.net(inputs, training=training))

    def train_step(self, *arguments: Any) -> Any:
        if BACKEND == "jax":
            return self.jax_step(*arguments)
        super().train_step(*arguments)
        logs = super().train_step(*arguments)
        self.slow.kernel.assign(0.9 * self.slow.kernel + 0.1 * self.top.kernel)
        return {**logs, "norm": ops.norm(self.top.kernel)}

    def jax_step(self, state: Any, data: Any) -> Any:
        _, state = super().train_step(state, data)
        logs, (trainable, others, *rest) = super().train_step(state, data)
        top = trainable[[v is self.top.kernel for v in self.trainable_variables].index(True)]
        slow = [v is self.slow.kernel for v in self.non_trainable_variables].index(True)
        others = [0.9 * old + 0.1 * top if i == slow else old for i, old in enumerate(others)]
        return {**logs, "norm": ops.norm(top)}, (trainable, others, *rest)


class Fail(keras.callbacks.Callback):
    """Raises in the second epoch, if asked to."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1 and "--fail" in sys.argv:
            raise RuntimeError("epoch 1 fails")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    scope = contextlib.nullcontext if arguments.plain else lockstep.MultiWorkerMirroredStrategy().scope
    random = np.random.default_rng(0)
    # The shares of all batches have 4 or 5 rows, because a backend compiles for each number.
    x, noise = random.normal(size=(98, 6)).astype("float32"), random.normal(size=(98, 4)).astype("float32")
    adam = keras.optimizers.Adam
    kinds = [Twice] if BACKEND == "jax" else [Twice, Gan]
    kinds = [kind for kind in kinds if kind.__name__ in arguments.names or not arguments.names]
    for kind in kinds:
        keras.utils.set_random_seed(7)
        with scope():
            model = kind(arguments.exact)
            if kind is Gan:
                model.compile(adam(1e-2), adam(1e-2), run_eagerly=arguments.eager)
            else:
                model.compile(adam(1e-2), "mse", metrics=["mae"], run_eagerly=arguments.eager)
        y = noise if kind is Gan else x[:, :1]
        options = {"shuffle": not arguments.exact, "verbose": 0}
        if kind is kinds[-1]:
            options["callbacks"] = [Fail()]
        history = model.fit(x, y, epochs=3, batch_size=20, **options).history
        print("result", kind.__name__, lockstep.digest(model))
        if arguments.exact:
            weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
            figures = [value for _, values in sorted(history.items()) for value in values]
            print("numbers", *(float(number) for number in [*figures, *weights]))


if __name__ == "__main__":
    main()
