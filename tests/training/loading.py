"""A program that trains under the command, and one that loads the checkpoint in plain Keras.

    loading.py train FOLDER [module]
    loading.py load CHECKPOINT [module]
    loading.py step CHECKPOINT FOLDER

With "module", the model has a PyTorch module with state.
The first two print equal lines for equal state. The third prints the results of one more step, after loading
the checkpoint, and after loading the file that `train` has saved in FOLDER.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import lockstep

STEPS = 10
"""The number of steps of `train`."""
MODULE = sys.argv[-1] == "module" and sys.argv.pop()

random = np.random.default_rng(0)
x = random.normal(size=(120, 6)).astype("float32")
y = x[:, :1] * 2 + 0.1 * random.normal(size=(120, 1)).astype("float32")


def build() -> Any:
    layers = keras.layers
    dense = [layers.Dense(16, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.3)]
    if MODULE:
        import torch

        dense.append(layers.TorchModuleWrapper(torch.nn.BatchNorm1d(16)))
    model = keras.Sequential([layers.Input((6,)), *dense, layers.Dense(1)])
    model.compile(keras.optimizers.Nadam(1e-2), "mse", metrics=["mae"])
    return model


def sha(variables: list[Any]) -> str:
    """The SHA-256 of all variables except integers, whose dtypes depend on the backend."""
    state = hashlib.sha256()
    for variable in variables:
        array = keras.ops.convert_to_numpy(variable.value)
        if array.dtype.kind not in "iu":
            state.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return state.hexdigest()


def generator(model: Any) -> Any:
    """The state of the random generator."""
    (found,) = (seed for layer in model._flatten_layers() for seed in layer._seed_generators)
    return found.state


def show(model: Any) -> None:
    print("weights", sha(model.variables))
    if MODULE:
        print("module", {name: tensor.tolist() for name, tensor in model.layers[3].named_buffers()})
    print("optimizer", sha(model.optimizer.variables), int(model.optimizer.iterations))
    # On PyTorch, the same bits are a number with a sign.
    print("random", [int(one) % 2**32 for one in keras.ops.convert_to_numpy(generator(model).value)])
    print("predictions", [f"{one:.4f}" for one in model.predict(x[:5], verbose=0).ravel()])


def train(folder: Path) -> None:
    keras.utils.set_random_seed(5)
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = build()
    model.fit(x, y, batch_size=24, epochs=STEPS // 5, verbose=0)
    show(model)
    print("metrics", [f"{float(variable.value):.6f}" for variable in model.metrics_variables])
    if not MODULE:
        model.save(folder / "saved.keras")


def load(checkpoint: Path) -> None:
    model = build()
    model(x[:1])
    print("loaded", vars(lockstep.load_checkpoint(model, checkpoint)))
    show(model)
    # Keras creates metrics with the first batch.
    model.test_on_batch(x[:1], y[:1])
    lockstep.load_checkpoint(model, checkpoint)
    print("metrics", [f"{float(variable.value):.6f}" for variable in model.metrics_variables])


def step(checkpoint: Path, folder: Path) -> None:
    model = build()
    lockstep.load_checkpoint(model, checkpoint)
    for one in (model, keras.models.load_model(folder / "saved.keras")):
        one.reset_metrics()
        # Keras's file has no random states; PyTorch has its own.
        generator(one).assign([1, 2])
        keras.utils.set_random_seed(1)
        figures = [float(figure).hex() for figure in one.train_on_batch(x[:48], y[:48])]
        print("step", figures, sha(one.variables), sha(one.optimizer.variables))


if __name__ == "__main__":
    {"train": train, "load": load, "step": step}[sys.argv[1]](*map(Path, sys.argv[2:]))
