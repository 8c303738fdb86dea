"""An Estimator's `input_fn(mode, input_context)`, which creates the pipeline of one replica.

    lockstep run -n 2 examples/input_fn.py

Each replica reads the part of the examples that its `input_context` names, on any worker.
"""

import keras
import tensorflow as tf

import lockstep
from digits import load_digits

BATCH_SIZE = 64
STEPS = 22


def input_fn(mode: str, input_context: lockstep.InputContext) -> tf.data.Dataset:
    training, held_out = load_digits()
    dataset = tf.data.Dataset.from_tensor_slices(training if mode == "train" else held_out)
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    if mode == "train":
        dataset = dataset.shuffle(1000, seed=1).repeat()
    return dataset.batch(input_context.get_per_replica_batch_size(BATCH_SIZE))


def build_and_compile() -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    return model


def main() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    training, held_out = (
        strategy.distribute_datasets_from_function(lambda context, mode=mode: input_fn(mode, context))
        for mode in ("train", "eval")
    )
    with strategy.scope():
        model = build_and_compile()
    model.fit(training, epochs=5, steps_per_epoch=STEPS, verbose=2)
    _, accuracy = model.evaluate(held_out, verbose=0)
    print(f"accuracy: {accuracy:.4f}")
    print(f"digest: {lockstep.digest(model)}")


if __name__ == "__main__":
    main()
