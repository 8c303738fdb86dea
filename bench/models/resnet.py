"""A ResNet of four blocks with BatchNormalization on images of 16 x 16: 4.9 million parameters."""

from typing import Any

from models.model import CLASSES, Array, Model, images

WIDTHS = (64, 128, 256, 512)


def examples(count: int) -> tuple[Array, Array]:
    return images(count, 16, 16, 3)


def layers(keras: Any, widths: tuple[int, ...] = WIDTHS) -> Any:
    made = keras.layers

    def convolution(x: Any, name: str, width: int, size: int, stride: int) -> Any:
        options = {"strides": stride, "padding": "same", "use_bias": False}
        x = made.Conv2D(width, size, name=name, **options)(x)
        return made.BatchNormalization(name=f"{name}_normal")(x)

    def block(x: Any, name: str, width: int, stride: int) -> Any:
        inner = made.ReLU()(convolution(x, f"{name}_first", width, 3, stride))
        inner = convolution(inner, f"{name}_second", width, 3, 1)
        past = x if stride == 1 else convolution(x, f"{name}_past", width, 1, stride)
        return made.ReLU()(made.Add()([inner, past]))

    inputs = made.Input((16, 16, 3))
    x = made.ReLU()(convolution(inputs, "stem", widths[0], 3, 2))
    for number, width in enumerate(widths):
        x = block(x, f"block{number}", width, 1 if number == 0 else 2)
    x = made.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, made.Dense(CLASSES, name="logits")(x))


# The losses fall to a hundredth within a turn, and normalization amplifies rounding differences.
MODEL = Model("a ResNet", 16, 3, examples, layers, compared=1, near=0.05, batch_statistics=True)
