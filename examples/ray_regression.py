"""Ray Train's TensorFlow example for a regression, with Lockstep.

    python examples/ray_regression.py --num-workers 2

The function loads its data itself, where Ray's calls `train.get_dataset_shard`; Lockstep divides each batch.
"""

import argparse

import numpy as np
import tensorflow as tf

import lockstep
import ray
from lockstep.ray import ReportCallback

REPLICAS = 2


def load_dataset(batch_size: int) -> tf.data.Dataset:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(1000, 100)).astype("float32")
    y = (x @ generator.normal(size=100) / 10).astype("float32")
    return tf.data.Dataset.from_tensor_slices({"x": x, "y": y}).batch(batch_size)


def build_model() -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.Input(shape=(100,)),
            tf.keras.layers.Dense(10),
            tf.keras.layers.Dense(1),
        ]
    )


def train_func(config: dict) -> list[dict]:
    batch_size = config.get("batch_size", 64)
    epochs = config.get("epochs", 3)

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        multi_worker_model = build_model()
        multi_worker_model.compile(
            optimizer=tf.keras.optimizers.SGD(learning_rate=config.get("lr", 1e-3)),
            loss=tf.keras.losses.MeanAbsoluteError(),
            metrics=[tf.keras.metrics.MeanSquaredError()],
        )

    dataset = load_dataset(batch_size)

    results = []
    for _ in range(epochs):
        tf_dataset = dataset.map(lambda row: (row["x"], row["y"]))
        history = multi_worker_model.fit(tf_dataset, callbacks=[ReportCallback()], verbose=2)
        results.append(history.history)
    print("digest:", lockstep.digest(multi_worker_model))
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", "-n", type=int, default=2)
    args = parser.parse_args()
    ray.init()
    result = lockstep.ray.fit(
        train_func,
        {"lr": 1e-2, "batch_size": 64, "epochs": 4},
        workers=args.num_workers,
        replicas=REPLICAS,
        backend="tensorflow",
        tf_distribute=True,
    )
    print("losses:", [loss for history in result.value for loss in history["loss"]])
    print("metrics:", result.metrics)


if __name__ == "__main__":
    main()
