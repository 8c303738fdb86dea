"""Ray Train's TensorFlow example for an autoencoder, with Lockstep.

    python examples/ray_autoencoder.py --num-workers 2

The images are generated, in the shape of MNIST. A generator yields whole batches, which Lockstep divides.
"""

import argparse
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

import lockstep
import ray
from lockstep.ray import ReportCallback

REPLICAS = 2


def load_images() -> np.ndarray:
    generator = np.random.default_rng(0)
    shapes = generator.random((10, 784)) > 0.8
    images = shapes[generator.integers(0, 10, 512)] * generator.uniform(0.5, 1, (512, 1))
    return images.astype("float32")


def build_autoencoder_model() -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.Input(shape=(784,)),
            # encoder
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(32, activation="relu"),
            # decoder
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(784, activation="sigmoid"),
        ]
    )


def train_func(config: dict) -> list[dict]:
    batch_size = config.get("batch_size", 64)
    epochs = config.get("epochs", 3)

    images = load_images()

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    with strategy.scope():
        multi_worker_model = build_autoencoder_model()
        learning_rate = config.get("lr", 0.001)
        multi_worker_model.compile(
            loss=tf.keras.losses.BinaryCrossentropy(),
            optimizer=tf.keras.optimizers.Adam(learning_rate=learning_rate),
            metrics=["binary_crossentropy"],
        )

    def to_tensor_iterator() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            yield batch, batch

    output_signature = (
        tf.TensorSpec(shape=(None, 784), dtype=tf.float32),
        tf.TensorSpec(shape=(None, 784), dtype=tf.float32),
    )

    results = []
    for _ in range(epochs):
        tf_dataset = tf.data.Dataset.from_generator(to_tensor_iterator, output_signature=output_signature)
        history = multi_worker_model.fit(tf_dataset, callbacks=[ReportCallback()], verbose=2)
        results.append(history.history)
    print("digest:", lockstep.digest(multi_worker_model))
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", "-n", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    ray.init()
    result = lockstep.ray.fit(
        train_func,
        {"lr": 1e-3, "batch_size": 64, "epochs": args.epochs},
        workers=args.num_workers,
        replicas=REPLICAS,
        backend="tensorflow",
        tf_distribute=True,
    )
    print("losses:", [loss for history in result.value for loss in history["loss"]])
    print("metrics:", result.metrics)


if __name__ == "__main__":
    main()
