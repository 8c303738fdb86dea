"""The training of `parameter_server.py` as a custom loop: functions that workers run when they are free.

    lockstep run --ps 2 -n 3 --backend tensorflow examples/parameter_server_loop.py

Each worker creates its own dataset, in another order. After each epoch, the workers also evaluate.
"""

from typing import Any

import keras
import tensorflow as tf

import lockstep
from parameter_server import BATCH_SIZE, build_model, dataset

EPOCHS, STEPS, EVALUATIONS = 5, 25, 6


def main() -> None:
    keras.utils.set_random_seed(1)
    partitioner = lockstep.MinSizePartitioner(min_shard_bytes=256, max_shards=2)
    strategy = lockstep.ParameterServerStrategy(variable_partitioner=partitioner)
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.RMSprop(0.05)
        accuracy = keras.metrics.BinaryAccuracy()
        held_out = keras.metrics.BinaryAccuracy()
    loss_of = keras.losses.BinaryCrossentropy()

    @tf.function
    def train_step(batches: Any) -> Any:
        heroes, wins = next(batches)
        with tf.GradientTape() as tape:
            predicted = model(heroes, training=True)
            loss = loss_of(wins, predicted)
        gradients = tape.gradient(loss, model.trainable_variables)
        accuracy.update_state(wins, predicted)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def evaluate_step(batches: Any) -> None:
        heroes, wins = next(batches)
        held_out.update_state(wins, model(heroes, training=False))

    coordinator = lockstep.ClusterCoordinator(strategy)
    training = coordinator.create_per_worker_dataset(
        lambda: dataset(800, seed=1).shuffle(800).batch(BATCH_SIZE).repeat()
    )
    other_teams = coordinator.create_per_worker_dataset(
        lambda: dataset(200, seed=3).shuffle(200).batch(BATCH_SIZE).repeat()
    )
    batches, other_batches = iter(training), iter(other_teams)
    for epoch in range(EPOCHS):
        accuracy.reset_state()
        held_out.reset_state()
        for _ in range(STEPS):
            loss = coordinator.schedule(train_step, args=(batches,))
        coordinator.join()
        for _ in range(EVALUATIONS):
            coordinator.schedule(evaluate_step, args=(other_batches,))
        coordinator.join()
        print(f"epoch {epoch}: loss {loss.fetch():.4f}, accuracy {float(accuracy.result()):.3f}")
    print(f"accuracy on other teams: {float(held_out.result()):.3f}")
    print(f"digest: {lockstep.digest(model)}")


if __name__ == "__main__":
    main()
