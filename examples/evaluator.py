"""A chief and a worker train while an evaluator evaluates their checkpoints: one script for all tasks.

cd examples
TASKS='{"chief": ["localhost:20000"], "worker": ["localhost:20001"]}'
TF_CONFIG='{"cluster": '$TASKS', "task": {"type": "chief", "index": 0}}' python evaluator.py saved &
TF_CONFIG='{"cluster": '$TASKS', "task": {"type": "worker", "index": 0}}' python evaluator.py saved &
TF_CONFIG='{"cluster": '$TASKS', "task": {"type": "evaluator", "index": 0}}' python evaluator.py saved
"""

import argparse
import math

import keras
import numpy as np

import lockstep

BATCH_SIZE = 64


def load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return handwritten digits of 8x8 pixels; every fifth is held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images / 16.0).astype("float32")
    held_out = np.arange(len(images)) % 5 == 0
    return (images[~held_out], digits.target[~held_out]), (images[held_out], digits.target[held_out])


def build_and_compile_model() -> keras.Model:
    layers = [
        keras.layers.Input((8, 8)),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="of the checkpoints; the same for all tasks")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    strategy = lockstep.MultiWorkerMirroredStrategy()
    evaluates = strategy.cluster_resolver.task_type == "evaluator"
    (x, y), held_out = load_digits()
    with strategy.scope():
        model = build_and_compile_model()

    every = math.ceil(len(x) / BATCH_SIZE)
    history = model.fit(
        x,
        y,
        batch_size=BATCH_SIZE,
        epochs=arguments.epochs,
        # The tasks that train leave validation to the evaluator.
        validation_data=held_out if evaluates else None,
        callbacks=[lockstep.callbacks.Checkpoint(arguments.folder, every=every)],
        verbose=0,
    )
    if evaluates:
        print(f"steps: {history.epoch}")
        print(f"figures: {history.history}")
        accuracy, step = max(zip(history.history["val_accuracy"], history.epoch, strict=True))
        print(f"accuracy on {len(held_out[0])} held-out digits: {accuracy:.4f} after {step} steps")
    elif lockstep.is_chief():
        print(f"loss: {history.history['loss'][-1]:.4f}")


if __name__ == "__main__":
    main()
