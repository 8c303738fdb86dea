"""A Transformer of four blocks on sequences of 32 tokens: 5.3 million parameters."""

from typing import Any

from models.model import CLASSES, Array, Model, tokens

WORDS = 8_000
LENGTH = 32
WIDTH = 256
HEADS = 4
BLOCKS = 4


def examples(count: int) -> tuple[Array, Array]:
    return tokens(count, LENGTH, WORDS)


def layers(keras: Any) -> Any:
    made = keras.layers

    def normal(x: Any, name: str) -> Any:
        return made.LayerNormalization(epsilon=1e-6, name=name)(x)

    def block(x: Any, name: str) -> Any:
        inner = normal(x, f"{name}_normal")
        attention = made.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"{name}_attention")
        x = made.Add()([x, attention(inner, inner)])
        inner = made.Dense(4 * WIDTH, activation="relu", name=f"{name}_wide")(
            normal(x, f"{name}_last_normal")
        )
        return made.Add()([x, made.Dense(WIDTH, name=f"{name}_narrow")(inner)])

    inputs = made.Input((LENGTH,), dtype="int32")
    x = made.Embedding(WORDS, WIDTH, name="embedding")(inputs)
    # One bias per position.
    x = made.EinsumDense("btd,de->bte", (LENGTH, WIDTH), bias_axes="te", name="positions")(x)
    for number in range(BLOCKS):
        x = block(x, f"block{number}")
    x = made.GlobalAveragePooling1D()(normal(x, "normal"))
    return keras.Model(inputs, made.Dense(CLASSES, name="logits")(x))


MODEL = Model("a Transformer", 8, 5, examples, layers, compared=2, sparse=True)
