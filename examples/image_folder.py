"""Train on a folder of images with one subfolder per class, with augmentation.

    lockstep run -n 2 examples/image_folder.py [FOLDER]

FOLDER contains `train/<class>/*.png` and `validation/<class>/*.png`. Without FOLDER, each worker first writes
handwritten digits to its own temporary folder. TensorFlow reads the files; the model trains on any backend.
"""

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import lockstep
from digits import load_digits

BATCH_SIZE = 64
SIZE = (28, 28)


def write_digits(folder: Path) -> None:
    parts = zip(("train", "validation"), load_digits(), strict=True)
    for part, (images, labels) in parts:
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / part / str(label) / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.round(image * 255).astype("uint8")[..., np.newaxis]
            path.write_bytes(tf.io.encode_png(pixels).numpy())


def read(folder: Path, *, shuffle: bool) -> tf.data.Dataset:
    return keras.utils.image_dataset_from_directory(
        folder,
        image_size=SIZE,
        color_mode="grayscale",
        batch_size=BATCH_SIZE,
        shuffle=shuffle,
        seed=1 if shuffle else None,
        verbose=False,
    )


def build_and_compile(classes: int) -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Input((*SIZE, 1)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.RandomTranslation(0.1, 0.1),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(classes),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    return model


def train(folder: Path) -> None:
    training = read(folder / "train", shuffle=True)
    validation = read(folder / "validation", shuffle=False)
    strategy = lockstep.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build_and_compile(len(training.class_names))
    model.fit(training, validation_data=validation, epochs=8, verbose=2)
    _, accuracy = model.evaluate(validation, verbose=0)
    print(f"accuracy: {accuracy:.4f}")
    print(f"digest: {lockstep.digest(model)}")


def main() -> None:
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_digits(Path(folder))
        train(Path(folder))


if __name__ == "__main__":
    main()
