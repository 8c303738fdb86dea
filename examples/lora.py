"""Fine-tunes a text model of KerasHub with LoRA: which part of Python's library is a paragraph about?

    pip install keras-hub
    lockstep run -n 2 examples/lora.py

The example downloads nothing, so it first trains a small backbone itself, on paragraphs about other parts of
the library. With `keras_hub.models.Backbone.from_preset`, it would be a trained one.
"""

import keras
import keras_hub
import numpy as np

import lockstep
from text import LENGTH, PACKAGES, WORDS, encode, load, paragraphs

OTHER_PACKAGES = ("concurrent", "ctypes", "encodings", "http", "idlelib", "importlib", "logging", "urllib")


def load_others() -> tuple[np.ndarray, np.ndarray]:
    found = [
        (encode(text), label)
        for label, package in enumerate(OTHER_PACKAGES)
        for text in sorted({text for text in paragraphs(package) if len(text.split()) >= 8})
    ]
    return np.array([row for row, _ in found], "int32"), np.array([label for _, label in found], "int32")


def build_classifier(backbone: keras.Model, classes: int, rate: float) -> keras.Model:
    """Return the backbone with a head on the mean of its features."""
    mean = keras.layers.GlobalAveragePooling1D()(backbone.output, mask=backbone.input["padding_mask"])
    model = keras.Model(backbone.input, keras.layers.Dense(classes)(mean))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    trained = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    print(f"{trained:,} of {model.count_params():,} weights are trainable")
    return model


def train(model: keras.Model, x: np.ndarray, y: np.ndarray, epochs: int) -> float:
    """Train the model, and return its accuracy on held-out paragraphs."""
    held_out = np.arange(len(x)) % 5 == 0
    training, validation = (
        ({"token_ids": x[chosen], "padding_mask": (x[chosen] > 0).astype("int32")}, y[chosen])
        for chosen in (~held_out, held_out)
    )
    model.fit(*training, batch_size=64, epochs=epochs, validation_data=validation, verbose=2)
    return model.evaluate(*validation, verbose=0)[1]


def main() -> None:
    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=WORDS,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
        max_sequence_length=LENGTH,
    )
    train(build_classifier(backbone, len(OTHER_PACKAGES), rate=3e-3), *load_others(), epochs=5)
    backbone.enable_lora(rank=8)
    accuracy = train(build_classifier(backbone, len(PACKAGES), rate=1e-2), *load(), epochs=15)
    if lockstep.is_chief():
        backbone.save_lora_weights("adapter.lora.h5")
    print(f"accuracy on held-out paragraphs: {accuracy:.4f}")


if __name__ == "__main__":
    main()
