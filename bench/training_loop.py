"""One worker of Lockstep on TensorFlow that trains a model in a custom loop, one epoch per turn.

training_loop.py PROGRAM MODEL BATCH TURNS STEPS
"""

import sys
import time
from typing import Any

from lockstep.worker import job
from turns import Turns, pin

NAME, MODEL = sys.argv[1:3]
BATCH, TURNS, STEPS = map(int, sys.argv[3:])
WORKER = job.current().worker
pin(WORKER)

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

import lockstep  # noqa: E402
from models import MODELS  # noqa: E402
from pipelines import without_tuning  # noqa: E402

strategy = lockstep.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
measured = MODELS[MODEL]
size = BATCH * strategy.num_replicas_in_sync
x, y = measured.examples(STEPS * size)
whole = tuple(array.reshape(STEPS, size, *array.shape[1:]) for array in (x, y))
with strategy.scope():
    model = measured.compiled(keras)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    dataset = without_tuning(tf.data.Dataset.from_tensor_slices(whole).repeat())
    batches = iter(strategy.experimental_distribute_dataset(dataset))
losses_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def replica_step(inputs: Any) -> Any:
    examples, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(examples, training=True)
        loss = tf.nn.compute_average_loss(losses_of(labels, predictions), global_batch_size=size)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    accuracy.update_state(labels, predictions)
    return loss


@tf.function
def train_step(batches: Any) -> Any:
    losses = strategy.run(replica_step, args=(next(batches),))
    return strategy.reduce("SUM", losses, axis=None)


def epoch() -> tuple[float, float]:
    """Train an epoch; return its seconds and the mean loss."""
    begun = time.perf_counter()
    total = tf.zeros(())
    for _ in range(STEPS):
        total += train_step(batches)
    return time.perf_counter() - begun, float(total) / STEPS


epoch()
turns = Turns(NAME, WORKER)
for _ in range(TURNS):
    turns.wait()
    accuracy.reset_state()
    turns.answer(*epoch(), model.get_weights())
