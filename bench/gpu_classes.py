"""One process that computes steps of each class of operations, for `bench/gpu.py`: what equal bits cost.

    gpu_classes.py NAME DTYPE TURNS STEPS tiny|large

In each turn, a model of each class takes STEPS steps of SGD from the same weights. The answer has the seconds
and a hash of the weights after it, by class. It is deterministic if the variables of Lockstep are set.
"""

import hashlib
import os
import sys
import time
from typing import Any

import keras
import numpy as np

from turns import Turns

NAME, DTYPE = sys.argv[1:3]
TURNS, STEPS = map(int, sys.argv[3:5])
TINY = sys.argv[5] == "tiny"
ROWS, SIDE, WIDTH, LENGTH = (2, 8, 8, 4) if TINY else (64, 56, 256, 128)
layers = keras.layers
IMAGES, ROW, TOKENS, SEQUENCE = (SIDE, SIDE, 8 if TINY else 64), (WIDTH,), (LENGTH,), (LENGTH, WIDTH)


def attention(x: Any) -> Any:
    return layers.MultiHeadAttention(4, WIDTH // 4)(x, x)


CLASSES: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "convolution": (IMAGES, [layers.Conv2D(IMAGES[-1], 3), layers.Conv2D(IMAGES[-1], 3)]),
    "batch normalization": (IMAGES, [layers.BatchNormalization(), layers.ReLU()]),
    "pooling": (IMAGES, [layers.Conv2D(IMAGES[-1], 1), layers.MaxPooling2D()]),
    "matrix product": (ROW, [layers.Dense(8 * WIDTH, activation="relu"), layers.Dense(WIDTH)]),
    "attention": (SEQUENCE, [attention]),
    "embedding": (TOKENS, [layers.Embedding(100 if TINY else 32_000, WIDTH)]),
    "recurrent": (SEQUENCE, [layers.LSTM(WIDTH)]),
}


def model_of(name: str) -> tuple[keras.Model, Any]:
    shape, made = CLASSES[name]
    generator = np.random.default_rng(0)
    if name == "embedding":
        x: Any = generator.integers(0, 100 if TINY else 32_000, (ROWS, *shape))
    else:
        x = generator.normal(size=(ROWS, *shape)).astype("float32")
    inputs = keras.Input(shape, dtype="int32" if name == "embedding" else "float32")
    outputs = inputs
    for layer in made:
        outputs = layer(outputs)
    outputs = layers.Dense(1, dtype="float32")(layers.Flatten()(outputs))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    return model, (np.tile(x, (STEPS, *[1] * len(shape))), np.ones((STEPS * ROWS, 1), "float32"))


def main() -> None:
    if "CUBLAS_WORKSPACE_CONFIG" in os.environ and keras.backend.backend() == "torch":
        import torch

        torch.use_deterministic_algorithms(True)
    keras.config.set_dtype_policy({"bfloat16": "mixed_bfloat16"}.get(DTYPE, DTYPE))
    keras.utils.set_random_seed(1)
    programs = {name: model_of(name) for name in CLASSES}
    first = {name: model.get_weights() for name, (model, _) in programs.items()}
    turns: Turns | None = None
    for _ in range(TURNS + 1):
        if turns is not None:
            turns.wait()
        answer = {}
        for name, (model, data) in programs.items():
            model.set_weights(first[name])
            begun = time.perf_counter()
            model.fit(*data, batch_size=ROWS, shuffle=False, verbose=0)
            weights = [np.asarray(weight) for weight in model.get_weights()]
            digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()
            answer[name] = time.perf_counter() - begun, digest
        if turns is not None:
            turns.send(answer)
        # The first one compiles; it is not a turn.
        turns = turns or Turns(NAME, 0)


main()
