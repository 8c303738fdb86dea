"""A training whose workers divide the update, and lose workers at named points of it.

dividing.py FOLDER plain|scaled [WORKER:STEP:POINT[:KIND]...]

Where the loss is scaled, weights have several dtypes, and gradients are clipped by norms.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from chaos_faults import Fault, Faults, prepare, prepare_update

import lockstep
from lockstep.keras.backends import optimizer_blocks
from lockstep.worker import job

FOLDER, SCALED = Path(sys.argv[1]), sys.argv[2] == "scaled"


def fault(text: str) -> Fault:
    worker, step, *point = text.split(":")
    return Fault(int(worker), int(step), *point)


FAULTS = Faults([each for each in map(fault, sys.argv[3:]) if each.worker == job.current().worker])
prepare(FAULTS)
prepare_update(FAULTS)
# So that each replica has several blocks.
optimizer_blocks.BLOCK = 64


class Steps(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts steps, reads the optimizer's variables, and changes the learning rate within an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = list[str]()
        self.kept = dict[int, list[Any]]()
        """On JAX: what NumPy has of the variables after some steps; it does not change with later steps."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        FAULTS.step += 1
        FAULTS.passing("before publishing")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        FAULTS.passing("after apply")
        if FAULTS.step % 4 == 0:
            variables = self.model.optimizer.variables
            if keras.backend.backend() == "jax":
                self.model.jax_state_sync()
                self.kept[len(self.sums)] = [np.asarray(variable.value) for variable in variables]
            self.sums.append(summed(variables))
        if FAULTS.step == 8:
            self.model.optimizer.learning_rate = 0.002


def summed(values: Sequence[Any]) -> str:
    return float(np.sum([float(keras.ops.sum(value)) for value in values])).hex()


def main() -> None:
    layers = keras.layers
    keras.utils.set_random_seed(5)
    updating = optimizer = keras.optimizers.AdamW(
        0.01, weight_decay=0.01, global_clipnorm=0.2 if SCALED else None
    )
    if SCALED:
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        # So large that the first steps are not finite.
        optimizer = keras.optimizers.LossScaleOptimizer(
            updating, initial_scale=2.0**18, dynamic_growth_steps=3
        )
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Dense(48, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(24, activation="relu", dtype="bfloat16" if SCALED else None),
                layers.Dense(1),
            ]
        )
        model.compile(optimizer, "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(110, 6)).astype("float32")
    steps = Steps()
    data = {"validation_data": (x[:40], x[:40, :1]), "callbacks": [steps], "verbose": 0}
    model.fit(x, x[:, :1], epochs=3, batch_size=24, **data)
    model.train_on_batch(x[:24], x[:24, :1])
    model.fit(x, x[:, :1], epochs=2, batch_size=24, **data)
    # The optimizer has other variables, and nothing decays.
    model.optimizer.learning_rate = keras.optimizers.schedules.CosineDecay(0.01, 40)
    updating.weight_decay = None
    model.fit(x, x[:, :1], epochs=1, batch_size=24, **data)
    model.save(FOLDER / f"{job.current().worker}.keras")
    scale = [float(optimizer.dynamic_scale.numpy())] if SCALED else []
    assert all(summed(values) == steps.sums[i] for i, values in steps.kept.items())
    print("result", lockstep.digest(model), *steps.sums, *scale, flush=True)


if __name__ == "__main__":
    main()
