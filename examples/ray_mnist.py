"""Ray Train's TensorFlow example for MNIST, with Lockstep: the training function changes by one name.

    python examples/ray_mnist.py --num-workers 2

The images are generated: a bar per digit, with noise, in the shape of MNIST.
"""

import argparse
import json
import os

import numpy as np
import tensorflow as tf

import lockstep
import ray
from lockstep.ray import ReportCallback

REPLICAS = 2


def generated_images() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, 10_000).astype("uint8")
    images = generator.integers(0, 64, (len(labels), 28, 28)).astype("uint8")
    for digit in range(10):
        images[labels == digit, 2 * digit + 4 : 2 * digit + 6] += 128
    return images, labels


def mnist_dataset(batch_size: int) -> tf.data.Dataset:
    x_train, y_train = generated_images()
    x_train = x_train / np.float32(255)
    y_train = y_train.astype(np.int64)
    return tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(60000).repeat().batch(batch_size)


def build_cnn_model() -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.Input(shape=(28, 28)),
            tf.keras.layers.Reshape(target_shape=(28, 28, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )


def train_func(config: dict) -> dict:
    per_worker_batch_size = config.get("batch_size", 64)
    epochs = config.get("epochs", 3)
    steps_per_epoch = config.get("steps_per_epoch", 70)

    # One task per replica, whatever the number of workers.
    tf_config = json.loads(os.environ["TF_CONFIG"])
    num_workers = len(tf_config["cluster"]["worker"])

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    global_batch_size = per_worker_batch_size * num_workers
    multi_worker_dataset = mnist_dataset(global_batch_size)

    with strategy.scope():
        multi_worker_model = build_cnn_model()
        learning_rate = config.get("lr", 0.001)
        multi_worker_model.compile(
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=tf.keras.optimizers.SGD(learning_rate=learning_rate),
            metrics=["accuracy"],
        )

    history = multi_worker_model.fit(
        multi_worker_dataset,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        callbacks=[ReportCallback()],
        verbose=2,
    )
    print("digest:", lockstep.digest(multi_worker_model))
    return history.history


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", "-n", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--smoke-test", action="store_true", help="take a few steps only")
    args = parser.parse_args()
    config = {"lr": 1e-2, "batch_size": 64, "epochs": args.epochs}
    if args.smoke_test:
        config["steps_per_epoch"] = 5
    ray.init()
    result = lockstep.ray.fit(
        train_func,
        config,
        workers=args.num_workers,
        replicas=REPLICAS,
        backend="tensorflow",
        tf_distribute=True,
    )
    print("losses:", result.value["loss"])
    print("metrics:", result.metrics)


if __name__ == "__main__":
    main()
