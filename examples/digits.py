"""The multi-worker tutorial's classifier, on handwritten digits that need no download.

lockstep run -n 2 examples/digits.py
python examples/digits.py
"""

import argparse
import time

import keras
import numpy as np

import lockstep

BATCH_SIZE_PER_REPLICA = 64


def load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return handwritten digits of 8x8 pixels, enlarged to MNIST's 28x28; every fifth is held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.kron(digits.images / 16.0, np.ones((3, 3)))
    images = np.pad(images, ((0, 0), (2, 2), (2, 2))).astype("float32")
    held_out = np.arange(len(images)) % 5 == 0
    return (images[~held_out], digits.target[~held_out]), (images[held_out], digits.target[held_out])


def load_mnist() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return Keras's MNIST, which is downloaded at the first use."""
    (x, y), (x_test, y_test) = keras.datasets.mnist.load_data()
    return (x.astype("float32") / 255, y), (x_test.astype("float32") / 255, y_test)


def build_and_compile_cnn_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Throughput(keras.callbacks.Callback):
    """Measures images/s from the second epoch on; the first one compiles."""

    def __init__(self, images: int) -> None:
        super().__init__()
        self.images = images
        self.started = 0.0
        self.epochs = 0

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if not self.started:
            self.started = time.perf_counter()
        else:
            self.epochs += 1
            self.rate = self.epochs * self.images / (time.perf_counter() - self.started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=["digits", "mnist"], default="digits")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    strategy = lockstep.MultiWorkerMirroredStrategy()
    (x, y), (x_test, y_test) = load_digits() if arguments.data == "digits" else load_mnist()
    with strategy.scope():
        model = build_and_compile_cnn_model()

    throughput = Throughput(len(x))
    batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
    model.fit(x, y, batch_size=batch_size, epochs=arguments.epochs, callbacks=[throughput])
    _, accuracy = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)

    print(f"images/s: {throughput.rate:,.0f}")
    print(f"accuracy on {len(x_test)} held-out digits: {accuracy:.4f}")
    print(f"digest: {lockstep.digest(model)}")


if __name__ == "__main__":
    main()
