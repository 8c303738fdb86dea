"""Two custom loops that Lockstep drives; prints their results.

driven_loops.py [WORKER LOOP STEP]: kills WORKER there, if it started with the job.
"""

import hashlib
import os
import signal
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import lockstep
from lockstep.keras.state import resumable_calls
from lockstep.worker import job

# Each skipped element is reported, as if it took long.
resumable_calls.SKIPPING_EVERY = 0.0
BATCH = 16
ROWS = np.random.default_rng(0).normal(size=(200, 6)).astype("float32")
LABELS = (ROWS.sum(1) > 0).astype("int64")
KILLED = tuple(int(number) for number in sys.argv[1:])

strategy = lockstep.MultiWorkerMirroredStrategy()
data = tf.data.Dataset.from_tensor_slices((ROWS, LABELS)).shuffle(100, seed=3).repeat().batch(BATCH)
dataset = strategy.experimental_distribute_dataset(data)


class Trained:
    """A model whose variables, and those of its optimizer, its first step creates."""

    def __init__(self) -> None:
        self.model = keras.Sequential(
            [
                keras.layers.Dense(8, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(2),
            ]
        )
        self.optimizer = keras.optimizers.Adam(0.02)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.saves = tf.train.Checkpoint(model=self.model)
        self.counter = self.saves.save_counter

    def step(self, inputs: Any) -> Any:
        rows, labels = inputs
        with tf.GradientTape() as tape:
            predictions = self.model(rows, training=True)
            loss = self.loss(labels, predictions)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.accuracy.update_state(labels, predictions)
        return loss

    @tf.function
    def train(self, iterator: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(self.step, args=(next(iterator),)))

    @property
    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "accuracy", "counter")
        return {name: getattr(self, name) for name in names}


first, second = Trained(), Trained()
notes: dict[str, list[float]] = {"losses": []}
best = np.full(1, np.inf)

for loop in range(3):
    batches = iter(dataset)
    trained = (first, second)[loop % 2]
    named = {f"first {name}": part for name, part in first.state.items()}
    named |= {f"second {name}": part for name, part in second.state.items()} if loop else {}
    for step in strategy.steps(12, {**named, "batches": batches, "notes": notes, "best": best}):
        if (job.current().worker, loop, step) == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = float(trained.train(batches))
        trained.saves.save(f"{job.current().context.folder}/of-{loop}")
        notes["losses"].append(loss)
        best[0] = min(best[0], loss)

figures = (notes, best.tolist(), [int(one.counter) for one in (first, second)])
print("figures:", hashlib.sha256(repr(figures).encode()).hexdigest())
print("first:", lockstep.digest(first.model))
print("second:", lockstep.digest(second.model))
