"""The models of the measurements on a GPU, ResNet-50 and a large Transformer, and tiny ones to try them."""

from functools import partial
from typing import Any

from models import resnet, transformer
from models.model import Array, Model, images, tokens
from models.transformer import Size

_SIDE = 224
_BASE = Size(words=32_000, length=256, width=768, heads=12, blocks=12)
_TINY = Size(words=100, length=8, width=16, heads=2, blocks=1)


def _large_images(count: int) -> tuple[Array, Array]:
    return images(count, _SIDE, _SIDE, 3)


def _resnet50(keras: Any) -> Any:
    shape = (_SIDE, _SIDE, 3)
    return keras.applications.ResNet50(
        weights=None, input_shape=shape, classes=10, classifier_activation=None
    )


def _transformer(size: Size, title: str, batch: int, steps: int) -> Model:
    examples = partial(tokens, length=size.length, words=size.words)
    return Model(title, batch, steps, examples, partial(transformer.layers, size=size))


LARGE = {
    "resnet": Model("ResNet-50", 64, 10, _large_images, _resnet50),
    "transformer": _transformer(_BASE, "a Transformer of 110 million parameters", 16, 10),
}
TINY = {
    "resnet": Model("a tiny ResNet", 2, 2, resnet.examples, partial(resnet.layers, widths=(4, 8))),
    "transformer": _transformer(_TINY, "a tiny Transformer", 2, 2),
}
