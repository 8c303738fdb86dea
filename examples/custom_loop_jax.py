"""A custom training loop on JAX: gradients of a compiled function, summed over the replicas.

    lockstep run -n 2 --backend jax examples/custom_loop_jax.py

The compiled function is pure, as always with JAX. The function passed to `strategy.run` reads and assigns
variables, so that each replica draws its own random numbers, and the averages of BatchNormalization become
the mean over the replicas.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np

import lockstep
from digits import load_digits

BATCH_SIZE = 64
EPOCHS = 3

strategy = lockstep.MultiWorkerMirroredStrategy()
(images, labels), _ = load_digits()

layers = keras.layers
model = keras.Sequential(
    [
        layers.Input((28, 28)),
        layers.Flatten(),
        layers.Dense(128),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.Dropout(0.2),
        layers.Dense(10),
    ]
)
optimizer = keras.optimizers.Adam(1e-3)
optimizer.build(model.trainable_variables)
accuracy = keras.metrics.SparseCategoricalAccuracy()
# A replica's part of the mean over the batch: the parts add up to the mean for any division of the batch.
summed = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def values(variables):
    return [variable.value for variable in variables]


def assign(variables, new):
    for variable, value in zip(variables, new, strict=True):
        variable.assign(value)


def compute_loss(trainable, others, x, y):
    logits, others = model.stateless_call(trainable, others, x, training=True)
    return summed(y, logits) / BATCH_SIZE, (logits, others)


differentiate = jax.jit(jax.value_and_grad(compute_loss, has_aux=True))
update = jax.jit(optimizer.stateless_apply)


def replica_step(x, y):
    trainable, others = values(model.trainable_variables), values(model.non_trainable_variables)
    (loss, (logits, others)), gradients = differentiate(trainable, others, x, y)
    assign(model.non_trainable_variables, others)
    accuracy.update_state(y, logits)
    return loss, gradients


def train_step(batch):
    loss, gradients = strategy.reduce("SUM", strategy.run(replica_step, args=batch))
    trainable, state = update(values(optimizer.variables), gradients, values(model.trainable_variables))
    assign(model.trainable_variables, trainable)
    assign(optimizer.variables, state)
    return loss


# Every worker reads the same batches.
random = np.random.default_rng(0)
for epoch in range(EPOCHS):
    order = random.permutation(len(images))
    rows = [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
    batches = strategy.experimental_distribute_dataset([(images[some], labels[some]) for some in rows])
    losses = [float(train_step(batch)) for batch in batches]
    if lockstep.is_chief():
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, accuracy {float(accuracy.result()):.4f}")
    accuracy.reset_state()

print(f"last loss: {np.mean(losses):.4f}")
print("digest:", lockstep.digest(model))
