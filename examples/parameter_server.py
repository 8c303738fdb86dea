"""Trains asynchronously on parameter servers with Keras's `fit`: which heroes make a team win?

    lockstep run --ps 2 -n 3 examples/parameter_server.py

Words are looked up in the input pipeline, and the rows of the embedding are divided between two servers.
"""

import random

import keras
import tensorflow as tf

import lockstep

HEROES = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
BATCH_SIZE = 32


def teams(count: int, seed: int) -> dict[str, list[list[str]]]:
    """Return teams of three heroes, and whether each wins: those with an avenger do."""
    draw = random.Random(seed)
    found = [draw.sample(HEROES, 3) for _ in range(count)]
    return {"heroes": found, "wins": [["yes" if "avenger" in team else "no"] for team in found]}


def dataset(count: int, seed: int) -> tf.data.Dataset:
    """Return (numbers of heroes, 1 or 0), with the lookups in the pipeline."""
    hero = keras.layers.StringLookup(vocabulary=HEROES, num_oov_indices=0, mask_token=None)
    answer = keras.layers.StringLookup(vocabulary=["no", "yes"], num_oov_indices=0, mask_token=None)
    rows = tf.data.Dataset.from_tensor_slices(teams(count, seed))
    return rows.map(lambda row: (hero(row["heroes"]), answer(row["wins"])))


def build_model() -> keras.Model:
    heroes = keras.Input((3,), dtype="int32")
    features = keras.layers.Embedding(len(HEROES), 16)(heroes)
    return keras.Model(heroes, keras.layers.Dense(1, activation="sigmoid")(keras.ops.mean(features, axis=1)))


def main() -> None:
    keras.utils.set_random_seed(1)
    partitioner = lockstep.MinSizePartitioner(min_shard_bytes=256, max_shards=2)
    strategy = lockstep.ParameterServerStrategy(variable_partitioner=partitioner)
    with strategy.scope():
        model = build_model()
        model.compile(keras.optimizers.RMSprop(0.05), "binary_crossentropy", metrics=["accuracy"])
    history = model.fit(
        dataset(800, seed=1).shuffle(800, seed=2).batch(BATCH_SIZE).repeat(),
        steps_per_epoch=25,
        epochs=5,
        validation_data=dataset(200, seed=3).batch(BATCH_SIZE),
        verbose=0,
    )
    if lockstep.is_chief():
        print("accuracy by epoch:", [round(value, 3) for value in history.history["accuracy"]])
    print(f"accuracy on other teams: {history.history['val_accuracy'][-1]:.3f}")
    print(f"digest: {lockstep.digest(model)}")


if __name__ == "__main__":
    main()
