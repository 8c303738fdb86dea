"""A custom loop that workers can join and leave: kill one, or use `lockstep scale`, while it trains.

    lockstep run -n 2 --checkpoint saved examples/hot_loop.py

Joining workers and checkpoints receive the state that the loop names.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import tensorflow as tf

import lockstep
from digits import load_digits

BATCH_SIZE = 128
STEPS = 60

strategy = lockstep.MultiWorkerMirroredStrategy()
(images, labels), _ = load_digits()
dataset = tf.data.Dataset.from_tensor_slices((images, labels.astype("int64")))
batches = iter(
    strategy.experimental_distribute_dataset(dataset.shuffle(1000, seed=1).repeat().batch(BATCH_SIZE))
)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-3)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    compute_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def replica_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = tf.nn.compute_average_loss(compute_loss(labels, predictions), global_batch_size=BATCH_SIZE)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    accuracy.update_state(labels, predictions)
    return loss


@tf.function
def train_step(batches):
    return strategy.reduce("SUM", strategy.run(replica_step, args=(next(batches),)))


losses = []
state = {
    "model": model,
    "optimizer": optimizer,
    "accuracy": accuracy,
    "batches": batches,
    "losses": losses,
}
for step in strategy.steps(STEPS, state):
    losses.append(float(train_step(batches)))
    if lockstep.is_chief() and step % 10 == 9:
        print(f"step {step + 1}: loss {losses[-1]:.4f}, accuracy {float(accuracy.result()):.4f}")

print(f"first loss: {losses[0]:.4f}, last loss: {losses[-1]:.4f}")
print("digest:", lockstep.digest(model))
