"""A custom training loop on PyTorch: each replica computes forward pass, backward pass and update.

lockstep run -n 2 --backend torch examples/custom_loop_torch.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch

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
accuracy = keras.metrics.SparseCategoricalAccuracy()


def replica_step(x, y):
    logits = model(x, training=True)
    # A replica's part of the mean over the batch: the parts add up to the mean for any division of the batch.
    loss = torch.nn.functional.cross_entropy(logits, y, reduction="sum") / BATCH_SIZE
    model.zero_grad()
    loss.backward()
    gradients = [variable.value.grad for variable in model.trainable_variables]
    with torch.no_grad():
        # Adds the gradients up over the replicas, and updates once.
        optimizer.apply(gradients, model.trainable_variables)
        # Counts the examples of all replicas.
        accuracy.update_state(y, logits)
    return loss


# Every worker reads the same batches, here in an order that follows from a seed.
examples = torch.utils.data.TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
loader = torch.utils.data.DataLoader(
    examples, batch_size=BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(1)
)
batches = strategy.experimental_distribute_dataset(loader)
for epoch in range(EPOCHS):
    losses = []
    for x, y in batches:
        losses.append(float(strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)))))
    if lockstep.is_chief():
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, accuracy {float(accuracy.result()):.4f}")
    accuracy.reset_state()

print(f"last loss: {np.mean(losses):.4f}")
print("digest:", lockstep.digest(model))
