"""Trains models whose operations GPUs compute by default in an order that varies; prints exact results.

    gpus.py [--plain] [--lose STEP]

--plain trains without Lockstep; --lose ends worker 1 with SIGKILL at the end of a step of the first training.
"""

import contextlib
import hashlib
import os
import signal
import sys
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job

layers = keras.layers
PLAIN = "--plain" in sys.argv
LOSE = int(sys.argv[sys.argv.index("--lose") + 1]) if "--lose" in sys.argv else None


class Lost(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == LOSE and job.current().context.worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def images() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(400, 28, 28, 3)).astype("float32"), generator.integers(0, 10, 400)


def words() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.integers(0, 50, (400, 24)), generator.integers(0, 2, 400).astype("float32")


def convolutional() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((28, 28, 3)),
            layers.RandomFlip(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            layers.Dropout(0.25),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, activation="softmax"),
        ]
    )


def half() -> keras.Model:
    policy = keras.DTypePolicy("mixed_bfloat16")
    return keras.Sequential(
        [
            layers.Input((28, 28, 3)),
            layers.Conv2D(32, 3, activation="relu", dtype=policy),
            layers.Flatten(dtype=policy),
            layers.Dense(256, activation="relu", dtype=policy),
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )


def recurrent() -> keras.Model:
    tokens = keras.Input((24,), dtype="int32")
    embedded = layers.Embedding(50, 32)(tokens)
    attended = layers.MultiHeadAttention(2, 16)(embedded, embedded)
    states = layers.Bidirectional(layers.LSTM(32))(layers.Add()([embedded, attended]))
    return keras.Model(tokens, layers.Dense(1, activation="sigmoid")(layers.Dropout(0.3)(states)))


def train(name: str, model: keras.Model, data: tuple[np.ndarray, np.ndarray], loss: str) -> None:
    model.compile(optimizer=keras.optimizers.Adam(1e-3, clipnorm=1.0), loss=loss, metrics=["accuracy"])
    callbacks = [Lost()] if LOSE is not None and name == "convolutional" else []
    history = model.fit(*data, batch_size=64, epochs=3, verbose=0, callbacks=callbacks).history
    rows = model.predict(data[0], batch_size=64, verbose=0)
    figures = " ".join(f"{key}={float(value[-1]).hex()}" for key, value in sorted(history.items()))
    print(f"result {name} {lockstep.digest(model)} {hashlib.sha256(rows.tobytes()).hexdigest()} {figures}")


def compute_as_workers_do() -> None:
    """Set what Lockstep sets for a worker on a GPU, before a framework uses it."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    os.environ |= {"TF_DETERMINISTIC_OPS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    if keras.backend.backend() == "torch":
        import torch

        torch.use_deterministic_algorithms(True)


def main() -> None:
    if PLAIN:
        compute_as_workers_do()
    with contextlib.nullcontext() if PLAIN else lockstep.MultiWorkerMirroredStrategy().scope():
        for build, data, loss in (
            (convolutional, images(), "sparse_categorical_crossentropy"),
            (half, images(), "sparse_categorical_crossentropy"),
            (recurrent, words(), "binary_crossentropy"),
        ):
            keras.utils.clear_session()
            keras.utils.set_random_seed(7)
            train(build.__name__, build(), data, loss)
    print("device", keras.ops.zeros(()).device)


if __name__ == "__main__":
    main()
