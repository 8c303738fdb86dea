"""A Transformer of four blocks on sequences of 32 tokens: 5.3 million parameters."""

from dataclasses import dataclass
from typing import Any

from models.model import CLASSES, Array, Model, tokens


@dataclass(frozen=True)
class Size:
    """The size of a Transformer: words of its vocabulary, tokens of a sequence, and so on."""

    words: int
    length: int
    width: int
    heads: int
    blocks: int


SIZE = Size(words=8_000, length=32, width=256, heads=4, blocks=4)


def examples(count: int) -> tuple[Array, Array]:
    return tokens(count, SIZE.length, SIZE.words)


def layers(keras: Any, size: Size = SIZE) -> Any:
    made = keras.layers

    def normal(x: Any, name: str) -> Any:
        return made.LayerNormalization(epsilon=1e-6, name=name)(x)

    def block(x: Any, name: str) -> Any:
        inner = normal(x, f"{name}_normal")
        attention = made.MultiHeadAttention(size.heads, size.width // size.heads, name=f"{name}_attention")
        x = made.Add()([x, attention(inner, inner)])
        inner = made.Dense(4 * size.width, activation="relu", name=f"{name}_wide")(
            normal(x, f"{name}_last_normal")
        )
        return made.Add()([x, made.Dense(size.width, name=f"{name}_narrow")(inner)])

    inputs = made.Input((size.length,), dtype="int32")
    x = made.Embedding(size.words, size.width, name="embedding")(inputs)
    # One bias per position.
    x = made.EinsumDense("btd,de->bte", (size.length, size.width), bias_axes="te", name="positions")(x)
    for number in range(size.blocks):
        x = block(x, f"block{number}")
    x = made.GlobalAveragePooling1D()(normal(x, "normal"))
    return keras.Model(inputs, made.Dense(CLASSES, name="logits")(x))


MODEL = Model("a Transformer", 8, 5, examples, layers, compared=2, sparse=True)
