"""An image classifier with augmentation and BatchNormalization, on handwritten digits.

lockstep run -n 2 examples/augmentation.py
"""

import keras

import lockstep
from digits import load_digits


def build() -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((28, 28)),
            layers.Reshape((28, 28, 1)),
            layers.RandomContrast(0.3, value_range=(0, 1)),
            layers.GaussianNoise(0.1),
            layers.Conv2D(16, 3, strides=2, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Conv2D(32, 3, strides=2, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    (x, y), (x_test, y_test) = load_digits()
    with strategy.scope():
        model = build()
    model.fit(x, y, batch_size=64, epochs=8)
    _, accuracy = model.evaluate(x_test, y_test, batch_size=64, verbose=0)
    print(f"accuracy on {len(x_test)} held-out digits: {accuracy:.4f}")
    print(f"digest: {lockstep.digest(model)}")


if __name__ == "__main__":
    main()
